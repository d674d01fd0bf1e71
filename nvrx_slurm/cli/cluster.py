"""`nvrx-slurm cluster`: a real multi-node Slurm on this machine, without root."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.output import note, print_json
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:  # loaded inside the commands, so that `cluster --help` stays fast
    from nvrx_slurm.lab.devcluster import DevCluster

_name = click.option("--name", default="dev", show_default=True, help="Which cluster; several can run side by side.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_node = click.argument("node")


@click.group()
def cluster() -> None:
    """A real Slurm on this machine, without root, and real faults for it.

    \b
    nvrx-slurm cluster up --nodes 6
    eval "$(nvrx-slurm cluster env)"
    sinfo
    nvrx-slurm cluster kill-node n3
    nvrx-slurm cluster down
    """


@cluster.command()
@_name
@click.option("--nodes", default=6, show_default=True, help="How many nodes: n1, n2, …")
@click.option("--cpus-per-node", default=4, show_default=True, help="CPUs that each node declares.")
@click.option("--accounting", is_flag=True, help="Add slurmdbd and a MariaDB of its own, so that sacct answers.")
def up(name: str, nodes: int, cpus_per_node: int, accounting: bool) -> None:
    """Start a cluster; returns when every node is idle."""
    from nvrx_slurm.lab.devcluster import DevCluster

    clock = SystemClock()
    started = clock.monotonic()
    DevCluster.up(name=name, nodes=nodes, cpus_per_node=cpus_per_node, accounting=accounting, say=note)
    option = "" if name == "dev" else f" --name {name}"
    click.echo(f"cluster {name!r}: {nodes} nodes are idle after {clock.monotonic() - started:.2f} s")
    click.echo(f'point Slurm\'s commands at it: eval "$(nvrx-slurm cluster env{option})"')


@cluster.command()
@_name
@click.option("--all", "everything", is_flag=True, help="Take every cluster of yours down.")
def down(name: str, everything: bool) -> None:
    """Stop a cluster and its jobs, and delete its files; also a partly dead cluster."""
    from nvrx_slurm.lab.devcluster import names, remove

    for each in names() if everything else [name]:
        remove(each)
        click.echo(f"cluster {each!r} is down")


@cluster.command()
@_name
@_json
def status(name: str, as_json: bool) -> None:
    """Nodes, as Slurm sees them and as they are, and which daemons live."""
    state = _load(name).status()
    if as_json:
        print_json(state)
        return
    lines = [
        f"cluster {state.name!r} ({state.slurm_conf})",
        *([f"the nodes' states are unknown: {state.error}"] if state.error else []),
        "  ".join(f"{daemon} {condition}" for daemon, condition in state.daemons.items()),
        f"{'node':6} {'slurm':12} {'slurmd':8} processes",
        *(f"{node.name:6} {node.slurm_state:12} {node.slurmd:8} {node.processes}" for node in state.nodes),
    ]
    for line in lines:
        click.echo(one_line(line))


@cluster.command()
@_name
def env(name: str) -> None:
    """Print what points Slurm's commands at the cluster, for a shell to eval."""
    for key, value in _load(name).environment().items():
        click.echo(f"export {key}={shlex.quote(value)}")


@cluster.command("kill-node")
@_node
@_name
def kill_node(node: str, name: str) -> None:
    """Lose a node: SIGKILL its slurmd, its job steps and all that they started, at once."""
    killed = _load(name).kill_node(node)
    click.echo(f"{node}: {_count(killed)} killed")


@cluster.command("stop-node")
@_node
@_name
def stop_node(node: str, name: str) -> None:
    """Freeze a node (SIGSTOP): its connections stay open, and it does not answer."""
    frozen = _load(name).stop_node(node)
    click.echo(f"{node}: {_count(frozen)} frozen; `restore-node {node}` continues them")


@cluster.command("restore-node")
@_node
@_name
def restore_node(node: str, name: str) -> None:
    """Continue a frozen node, or start a killed one again; returns when Slurm uses it again."""
    _load(name).restore_node(node)
    click.echo(f"{node}: back")


def _load(name: str) -> DevCluster:
    from nvrx_slurm.lab.devcluster import DevCluster

    return DevCluster.load(name, say=note)


def _count(pids: list[int]) -> str:
    return f"{len(pids)} process{'' if len(pids) == 1 else 'es'}"
