"""What a development cluster is (name, size, ports), and which processes belong to it and to each of its nodes.

Descent shows nearly all: every daemon adopts its orphans. Three marks show the rest, whose daemon died before them:
a job's processes carry SLURM_CONF and SLURMD_NODENAME in their environment, a slurmstepd (which wipes its own)
stands in its node's spool folder, and a daemon carries the mark that nvrx-slurm gave it. A mark counts only on a
process of the cluster's owner: root reads the environment of all users' processes.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.devcluster.daemons import MARK, living
from nvrx_slurm.lab.devcluster.places import Places
from nvrx_slurm.lab.devcluster.processes import (
    Table,
    descendants,
    environment_of,
    is_own,
    marked,
    working_folder_of,
)


def of_nodes(spec: ClusterSpec, table: Table) -> dict[str, set[int]]:
    """Node → its slurmd, its slurmstepds, and all that runs below them. A dead node has an empty set."""
    daemons = living(spec.places, table)
    roots: dict[str, set[int]] = {node: set() for node in spec.nodes}
    spools = {str(spec.places.spool(node)): node for node in spec.nodes}
    for process in table.values():
        # The node that this process says it is of, if it says one.
        if process.program == "slurmstepd":
            node = spools.get(working_folder_of(process.pid))
        else:
            environment = environment_of(process.pid)
            is_job = environment.get("SLURM_CONF") == str(spec.places.slurm_conf) and "SLURM_JOB_ID" in environment
            node = environment.get("SLURMD_NODENAME") if is_job else None
        if node in roots and is_own(process.pid):
            roots[node].add(process.pid)
    # The barrier: a slurmd that a job on another node restarted may descend from that job.
    return {
        node: descendants(
            table,
            pids | ({daemons[node]} if node in daemons else set()),
            barrier=(pid for name, pid in daemons.items() if name != node),
        )
        for node, pids in roots.items()
    }


def of_cluster(spec: ClusterSpec, table: Table) -> set[int]:
    """Every daemon of the cluster and all that runs below them."""
    return of_daemons(spec.places, table).union(*of_nodes(spec, table).values())


def of_daemons(places: Places, table: Table) -> set[int]:
    """All that descends from a daemon of the cluster, found without `cluster.json`, which may be damaged."""
    roots = marked(table, MARK, str(places.state)) | set(living(places, table).values())
    return descendants(table, roots)


MAX_NODES = 64
MAX_CPUS_PER_NODE = 1024
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class ClusterSpec(Record, frozen=True, kw_only=True):
    """One cluster. `node_ports` is in node order: n1 first."""

    name: str
    user: str
    hostname: str
    slurm_version: tuple[int, int]
    cpus_per_node: int
    controller_port: int
    node_ports: tuple[int, ...]
    database_port: int | None = None  # slurmdbd's; None: no accounting
    state: str
    runtime: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)  # lines that replace generated ones of slurm.conf

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, len(self.node_ports) + 1))

    @property
    def daemons(self) -> tuple[str, ...]:
        """Every daemon of the cluster, in the order in which they are started."""
        database = () if self.database_port is None else ("mariadb", "slurmdbd")
        return ("munged", *database, "slurmctld", *self.nodes)

    @property
    def places(self) -> Places:
        return Places(state=Path(self.state), runtime=Path(self.runtime))

    @property
    def client_environment(self) -> dict[str, str]:
        """What a child needs so that sbatch, srun and the others speak to this cluster."""
        return {"SLURM_CONF": str(self.places.slurm_conf)}


def check_request(name: str, nodes: int, cpus_per_node: int) -> None:
    """Raises UsageError where a value is out of its bounds."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"cluster name {name!r}: use 1 to 32 of a-z, 0-9 and '-', and neither start nor end with '-'"
        )
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes {nodes}: a cluster has 1 to {MAX_NODES} nodes")
    if not 1 <= cpus_per_node <= MAX_CPUS_PER_NODE:
        raise UsageError(f"--cpus-per-node {cpus_per_node}: a node has 1 to {MAX_CPUS_PER_NODE} CPUs")


def encode(spec: ClusterSpec) -> bytes:
    """`cluster.json`, indented for people."""
    return msgspec.json.format(msgspec.json.encode(spec), indent=2) + b"\n"


def decode(text: bytes) -> ClusterSpec:
    """The spec of `cluster.json`. Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(text, type=ClusterSpec)


# Slurm's states of a node that gets jobs. Of an idle node backfill makes a planned one, for a job that waits.
USABLE = ("idle", "planned", "mixed", "allocated", "completing")


def is_usable(state: str) -> bool:
    """Whether a node in this state, as sinfo names it, gets jobs. `mixed-` is planned, too."""
    return state.rstrip("-") in USABLE


class DevNodeStatus(Record, frozen=True, kw_only=True):
    """One node. `slurm_state` is slurmctld's view, `slurmd` the truth: `alive`, `frozen` or `dead`."""

    name: str
    slurm_state: str
    slurmd: str
    processes: int


class ClusterStatus(Record, frozen=True, kw_only=True):
    """The cluster. `error` says why slurmctld did not answer; the nodes' states are then `unknown`."""

    name: str
    slurm_conf: str
    error: str | None
    nodes: tuple[DevNodeStatus, ...]
    daemons: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Every daemon lives and every node gets jobs."""
        return all(condition == "alive" for condition in self.daemons.values()) and all(
            node.slurmd == "alive" and is_usable(node.slurm_state) for node in self.nodes
        )
