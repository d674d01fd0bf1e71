"""What a development cluster is: its name, its size, its ports. Written once, read by every later command."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.devcluster.places import Places

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
    settings: dict[str, str] = msgspec.field(default_factory=dict)  # lines of slurm.conf that differ from ours

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, len(self.node_ports) + 1))

    @property
    def accounting(self) -> bool:
        return self.database_port is not None

    @property
    def daemons(self) -> tuple[str, ...]:
        """Every daemon of the cluster, in the order in which they are started."""
        database = ("mariadb", "slurmdbd") if self.accounting else ()
        return ("munged", *database, "slurmctld", *self.nodes)

    @property
    def places(self) -> Places:
        return Places(state=Path(self.state), runtime=Path(self.runtime))


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
