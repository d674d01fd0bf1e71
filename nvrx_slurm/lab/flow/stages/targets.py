"""Whom a fault is meant for: arguments of a flow file in, nodes and processes of the running job out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.lab.flow.stages.world import World

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank's newest worker: its process, and the node that it runs on."""

    replica: str
    rank: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.replica} on {self.node}"


def resolved(arguments: Arguments, bindings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with what each capture stands for in its place. Raises FaultFailed for one that stands for
    nothing yet."""
    return {key: _resolved(value, bindings) for key, value in arguments.items()}


def _resolved(value: Any, bindings: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    if value[1:] not in bindings:
        known = ", ".join(f"${name}" for name in bindings) or "none"
        raise FaultFailed(f"{value} stands for nothing yet (bound so far: {known})")
    return bindings[value[1:]]


def node_of(arguments: Arguments, world: World) -> str:
    """The node that is meant: `node`, `of_rank` (and `replica`), `spare`, or `batch_host`. Raises FaultFailed."""
    match arguments:
        case {"node": str(node)}:
            return _known(node, world)
        case {"of_rank": rank}:
            return world.node_of_rank(int(rank), arguments.get("replica"))
        case {"spare": number}:
            return _spare(int(number), world)
        case {"batch_host": True}:
            return world.batch_host
    raise FaultFailed(f"no node is named by {dict(arguments)}: it takes node, of_rank, spare, or batch_host")


def worker_of(arguments: Arguments, world: World) -> Worker:
    """The worker that is meant: `rank` (and `replica`), or `of_node`. Raises FaultFailed."""
    if "of_node" in arguments:
        replica, rank = world.first_rank_on(_known(str(arguments["of_node"]), world))
    else:
        replica, rank = world.replica(arguments.get("replica")).id, int(arguments["rank"])
    return Worker(replica, rank, world.node_of_rank(rank, replica), world.worker(rank, replica))


def _known(node: str, world: World) -> str:
    if world.nodes and node not in world.nodes:  # while the job waits its cluster alone knows the node
        raise FaultFailed(f"the job has no node {node!r}: it has {', '.join(world.nodes)}")
    return node


def _spare(number: int, world: World) -> str:
    spares = world.standby
    if not 1 <= number <= len(spares):
        raise FaultFailed(f"there is no hot spare {number}: standing by now: {', '.join(spares) or 'nobody'}")
    return spares[number - 1]
