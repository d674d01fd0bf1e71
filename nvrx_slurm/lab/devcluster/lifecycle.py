"""Bringing a cluster up: its ports and its spec, its daemons one by one, and the wait until every node is idle."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from nvrx_slurm.errors import NvrxError, WaitTimeout
from nvrx_slurm.lab.devcluster import configuration
from nvrx_slurm.lab.devcluster import programs as slurm
from nvrx_slurm.lab.devcluster.daemons import Daemon, last_words, living, start
from nvrx_slurm.lab.devcluster.places import PRIVATE, clusters_folder
from nvrx_slurm.lab.devcluster.processes import read_table, wait_until
from nvrx_slurm.lab.devcluster.spec import ClusterSpec, decode, encode
from nvrx_slurm.util.clock import Clock

SERVES_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 30.0
_PORT_TAKEN = "Address already in use"
_MUNGE_KEY_BYTES = 128

Say = Callable[[str], None]


class DaemonDied(NvrxError):
    """A daemon ended instead of serving; the message ends with the end of its log."""

    @property
    def port_was_taken(self) -> bool:
        """Whether another process took a chosen port before the daemon did: worth another try on other ports."""
        return _PORT_TAKEN in str(self)


def ports_of_clusters() -> set[int]:
    """Those of every cluster of this user. It may want them again: a killed node's slurmd does not listen now."""
    taken: set[int] = set()
    for file in clusters_folder().glob("*/cluster.json"):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # going down just now, or damaged
            other = decode(file.read_bytes())
            taken |= {other.controller_port, other.database_port or 0, *other.node_ports}
    return taken


def launch(spec: ClusterSpec, programs: Mapping[str, str], clock: Clock, say: Say) -> None:
    """Start every daemon and wait until all nodes are idle. Raises NvrxError; what was started then still runs."""
    places = spec.places
    # Before anything is started: `down` reads it.
    (places.state / "cluster.json").write_bytes(encode(spec))
    places.slurm_conf.write_text(configuration.slurm_conf(spec))
    if (cgroup := configuration.cgroup_conf(spec)) is not None:
        (places.state / "cgroup.conf").write_text(cgroup)
    # The mode ahead of the key: at no moment can another user read it.
    places.munge_key.touch(mode=0o600)
    places.munge_key.write_bytes(secrets.token_bytes(_MUNGE_KEY_BYTES))
    for node in spec.nodes:
        places.spool(node).mkdir(mode=PRIVATE, exist_ok=True)

    # munged first: every other daemon asks it for credentials. slurmdbd before slurmctld, which registers there.
    options = {
        "socket": places.munge_socket,
        "key-file": places.munge_key,
        "pid-file": places.runtime / "munge" / "munged.pid",
        "seed-file": places.runtime / "key" / "munged.seed",
    }
    # --force: without it munged refuses a socket that other users cannot reach. This one gives jobs as the owner.
    command = [programs["munged"], "--foreground", "--force", *(f"--{key}={value}" for key, value in options.items())]
    _serve(spec, Daemon("munged", command, folder=places.runtime), places.munge_socket, clock)
    if spec.database_port is not None:
        say("setting up the accounting database")
        configuration.prepare(spec, programs)
        _serve(spec, configuration.database(spec, programs), places.database_socket, clock)
        _serve(spec, configuration.slurmdbd(spec, programs), spec.database_port, clock)
    slurmctld = Daemon(
        "slurmctld",
        [programs["slurmctld"], "-D"],
        folder=places.controller_state,
        environment=spec.client_environment,
    )
    _serve(spec, slurmctld, spec.controller_port, clock)
    say(f"starting {len(spec.nodes)} nodes")
    for node in spec.nodes:
        # No wait after each of them, as `_serve` has: `await_idle` waits for all at once.
        start(slurmd(spec, node, programs["slurmd"]), places)
    await_idle(spec, clock, say)


def _serve(spec: ClusterSpec, daemon: Daemon, at: Path | int, clock: Clock) -> None:
    """Start the daemon and wait until something listens `at` its socket or port."""
    start(daemon, spec.places)

    def listening() -> bool:
        check_alive(spec, [daemon.name])
        if isinstance(at, Path):
            return at.is_socket()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", at)) == 0

    try:
        wait_until(listening, timeout_s=SERVES_TIMEOUT_S, what=f"{daemon.name} to serve", clock=clock)
    except WaitTimeout as error:
        raise WaitTimeout(f"{error}\n{last_words(daemon.name, spec.places)}") from None


def check_alive(spec: ClusterSpec, names: list[str]) -> None:
    """Raises DaemonDied for the first of these daemons that has ended."""
    alive = living(spec.places, read_table())
    for name in names:
        if name not in alive:
            raise DaemonDied(f"{name} ended instead of serving\n{last_words(name, spec.places)}")


def await_idle(spec: ClusterSpec, clock: Clock, say: Say, timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Wait until slurmctld holds every node for idle. Raises WaitTimeout with the states and the logs' ends."""
    states: dict[str, str] = {}
    said = ""

    def all_idle() -> bool:
        nonlocal said
        check_alive(spec, ["slurmctld", *spec.nodes])
        states.update(slurm.node_states(spec.client_environment))
        missing = [f"{node} ({states.get(node, 'unknown')})" for node in spec.nodes if states.get(node) != "idle"]
        if missing and said != (said := f"waiting for {', '.join(missing)} to be idle"):
            say(said)
        return not missing

    try:
        wait_until(all_idle, timeout_s=timeout_s, what="every node to be idle", clock=clock)
    except WaitTimeout as error:
        first = next((node for node in spec.nodes if states.get(node) != "idle"), spec.nodes[0])
        tails = [last_words(daemon, spec.places) for daemon in ("slurmctld", first)]
        raise WaitTimeout("\n".join([f"{error}: {states}", *tails])) from None


def slurmd(spec: ClusterSpec, node: str, program: str) -> Daemon:
    """The daemon of one node. It stands in its spool folder, and so do its slurmstepds: `members` looks there."""
    return Daemon(
        name=node,
        command=[program, "-D", "-N", node],
        folder=spec.places.spool(node),
        environment=spec.client_environment,
    )


_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES_PER_PORT = 200


def free_ports(count: int, taken: Iterable[int] = ()) -> list[int]:
    """`count` different ports on which nothing listens now, none of them in `taken`.

    A port of the kernel's ephemeral range would do for a moment, but a daemon that is restarted later on the same
    port could find it used by an outgoing connection. Raises NvrxError when none is left.
    """
    try:
        highest = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        highest = 32_768
    # An ephemeral range that begins so low leaves too few ports below it: then ports inside of it are taken.
    if highest <= _LOWEST + 1_000:
        highest = 60_000
    refused, ports = set(taken), list[int]()
    for _ in range(count * _TRIES_PER_PORT):
        if len(ports) == count:
            return ports
        # At random: of two clusters that are brought up at once each would take the first free ports.
        port = random.randrange(_LOWEST, highest)
        if port not in refused:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemons do
                probe.bind(("", port))
                ports.append(port)
        refused.add(port)
    raise NvrxError(f"no {count} free TCP ports between {_LOWEST} and {highest} on this machine")
