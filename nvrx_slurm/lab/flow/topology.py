"""Which node, rank and process is where in a running job, by its journal; and which of them a fault targets. Pure.

The core's own state is asked, fed with the same facts as the controller's; beside it only the process ids are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import ControlState, Phase, Replica, new_job
from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import ControllerStarted, Entry, Fact, JobStarted, NodeJoined, WorkersStarted


class JobTopology:
    """A job as far as its journal has been fed. Process ids outlive their processes: who signals one must look."""

    def __init__(self, plan: Plan) -> None:
        self._job: ControlState = new_job(plan)
        self._agents: dict[str, int] = {}
        self._workers: dict[tuple[str, int], int] = {}
        self._controller: int | None = None
        self._batch_host: str | None = None

    def feed(self, entry: Entry) -> None:
        """Take in the next entry of the journal."""
        record = entry.record
        # The core makes its decisions again from the facts alone; those of the journal are the same.
        if isinstance(record, Fact):
            step(self._job, record, entry.t)
        match record:
            case JobStarted(expected=expected):
                self._batch_host = expected[0]
                # The processes of the generation before have ended: their numbers may belong to others by now.
                self._agents, self._workers = {}, {}
            case ControllerStarted(pid=pid):
                self._controller = pid
            case NodeJoined(node=node, pid=pid):
                self._agents[node] = pid
            case WorkersStarted(replica=replica, pids=pids):
                self._workers |= {(replica, rank): pid for rank, pid in pids.items()}

    @property
    def generation(self) -> int:
        return self._job.generation

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node that this generation knows of, the allocation's order first."""
        return tuple(self._job.nodes)

    @property
    def standby(self) -> tuple[str, ...]:
        """The hot spares, in the allocation's order."""
        return tuple(self._job.spares_in_order())

    @property
    def batch_host(self) -> str:
        """The node that runs the batch host: the allocation's first. Raises FaultFailed before there is one."""
        if self._batch_host is None:
            raise FaultFailed("the job has not started: no node is known")
        return self._batch_host

    @property
    def controller(self) -> int:
        """The newest controller's process id. Raises FaultFailed."""
        if self._controller is None:
            raise FaultFailed("no controller has started yet")
        return self._controller

    def agent(self, node: str) -> int:
        """The process id of the node's newest agent, also of one that is frozen or lost. Raises FaultFailed."""
        if node not in self._agents:
            raise FaultFailed(f"{node} has no agent: {_listed('agents are on', self._agents)}")
        return self._agents[node]

    def worker(self, rank: int, replica: str | None = None) -> int:
        """The process id of the rank's newest worker. Raises FaultFailed."""
        world = self.replica(replica)
        if (world.id, rank) not in self._workers:
            known = [str(each) for name, each in self._workers if name == world.id]
            raise FaultFailed(f"rank {rank} of {world.id} has no worker: {_listed('workers run as rank', known)}")
        return self._workers[world.id, rank]

    def node_of_rank(self, rank: int, replica: str | None = None) -> str:
        """The node that holds the rank in the replica's newest closed rendezvous. Raises FaultFailed."""
        world = self.replica(replica)
        per_node, nodes = world.role.workers_per_node, world.order if _has_closed(world) else ()
        if not 0 <= rank < len(nodes) * per_node:
            raise FaultFailed(f"{world.id} has no rank {rank}: its world has {len(nodes) * per_node} ranks now")
        return nodes[rank // per_node]

    def first_rank_on(self, node: str) -> tuple[str, int]:
        """The replica and the first rank that the node holds. Raises FaultFailed."""
        for world in self._job.replicas.values():
            if _has_closed(world) and node in world.order:
                return world.id, world.order.index(node) * world.role.workers_per_node
        raise FaultFailed(f"{node} holds no rank now")

    def replica(self, name: str | None = None) -> Replica:
        """The replica of this id; without one, the only one. Raises FaultFailed."""
        replicas = self._job.replicas
        if name is None and len(replicas) == 1:
            return next(iter(replicas.values()))
        if name not in replicas:
            asked = "`replica` must say whose rank" if name is None else f"there is no replica {name!r}"
            raise FaultFailed(f"{asked}: {_listed('there are', replicas)}")
        return replicas[name]


def _has_closed(replica: Replica) -> bool:
    """Whether a rendezvous of it has closed: before that its order is only planned."""
    return replica.cycle > 0 or (replica.cycle == 0 and replica.phase is not Phase.RENDEZVOUS)


def _listed(what: str, names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f"{what} {listed}" if listed else "there are none yet"


Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TargetWorker:
    """One rank's newest worker: its process, and the node that it runs on."""

    replica: str
    rank: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.replica} on {self.node}"


def resolved(arguments: Arguments, bindings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, each capture replaced by its value. Raises FaultFailed for one that nothing has bound yet."""
    found = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, str) and value.startswith("$"):
            if value[1:] not in bindings:
                known = ", ".join(f"${name}" for name in bindings) or "none"
                raise FaultFailed(f"{value} has no value yet (bound so far: {known})")
            found[key] = bindings[value[1:]]
    return found


def node_of(arguments: Arguments, world: JobTopology) -> str:
    """The node that is meant: `node`, `of_rank` (and `replica`), `spare`, or `batch_host`. Raises FaultFailed."""
    match arguments:
        case {"node": str(node)}:
            return _known(node, world)
        case {"of_rank": rank}:
            return world.node_of_rank(int(rank), arguments.get("replica"))
        case {"spare": number}:
            spares = world.standby
            if not 1 <= int(number) <= len(spares):
                raise FaultFailed(f"there is no hot spare {number}: on standby now: {', '.join(spares) or 'none'}")
            return spares[int(number) - 1]
        case {"batch_host": True}:
            return world.batch_host
    raise FaultFailed(f"no node is named by {dict(arguments)}: it takes node, of_rank, spare, or batch_host")


def worker_of(arguments: Arguments, world: JobTopology) -> TargetWorker:
    """The worker that is meant: `rank` (and `replica`), or `of_node`. Raises FaultFailed."""
    if "of_node" in arguments:
        replica, rank = world.first_rank_on(_known(str(arguments["of_node"]), world))
    else:
        replica, rank = world.replica(arguments.get("replica")).id, int(arguments["rank"])
    return TargetWorker(replica, rank, world.node_of_rank(rank, replica), world.worker(rank, replica))


def _known(node: str, world: JobTopology) -> str:
    if world.nodes and node not in world.nodes:  # while the job waits its cluster alone knows the node
        raise FaultFailed(f"the job has no node {node!r}: it has {', '.join(world.nodes)}")
    return node
