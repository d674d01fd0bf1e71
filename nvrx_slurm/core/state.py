"""What the controller knows of a job. Changed only by the modules of this package, only through `job.step`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nvrx_slurm.ids import replica_id
from nvrx_slurm.records import Plan, RolePlan, Shutdown


class NodeState(StrEnum):
    """Where a node stands. Transitions: see `membership.TRANSITIONS`."""

    EXPECTED = "expected"  # in the allocation, not heard of yet
    STANDBY = "standby"  # a hot spare: joined, healthy, not assigned
    READY = "ready"  # here for a round that is still open, no old worker left
    ACTIVE = "active"  # its workers run, or are being torn down for the next round
    LOST = "lost"
    LEFT = "left"
    QUARANTINED = "quarantined"  # here, and gets no ranks: it was lost too often


class Phase(StrEnum):
    """Where a replica stands."""

    ROUND = "round"  # a round is open: nodes get ready
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # ended by a failure that its role ignores


@dataclass(slots=True)
class Node:
    """One node of the allocation, and the agent process (`incarnation`) that speaks for it."""

    name: str
    index: int
    state: NodeState = NodeState.EXPECTED
    incarnation: str = ""
    seq: int = 0
    addr: str = ""
    port: int = 0
    fence_port: int = 0
    replica: str | None = None
    fenced: bool = False
    deaths: int = 0
    former: set[str] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return self.state in (NodeState.STANDBY, NodeState.READY, NodeState.ACTIVE, NodeState.QUARANTINED)


@dataclass(slots=True)
class Stamps:
    """When each phase of a recovery ended, on the store's clock."""

    noticed: float
    decided: float
    torn_down: float = 0.0
    closed: float = 0.0


@dataclass(slots=True)
class Replica:
    """One world of ranks: its open round, or its running cycle.

    `unsafe`: its lost nodes whose death nobody has proven → the moment from which their workers are dead all the
    same.
    """

    id: str
    role: RolePlan
    phase: Phase = Phase.ROUND
    cycle: int = -1
    restarts: int = 0
    order: tuple[str, ...] = ()  # group-rank order of the last closed round; in an open one, who is preferred
    awaited: set[str] = field(default_factory=set)  # preferred nodes that may still get ready
    ready: set[str] = field(default_factory=set)  # preferred nodes that are
    opened_at: float = 0.0
    last_call_at: float | None = None
    started: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    first_done_at: float | None = None
    unsafe: dict[str, float] = field(default_factory=dict)
    stamps: Stamps | None = None

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)


@dataclass(slots=True)
class Job:
    """The whole of a job's state. `standby` is the shared pool of hot spares."""

    plan: Plan
    generation: int = 0
    started_at: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)
    standby: set[str] = field(default_factory=set)
    wanted_by: dict[str, str] = field(default_factory=dict)  # node → the open round that prefers it
    replicas: dict[str, Replica] = field(default_factory=dict)
    seen: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)  # role → what `Learned` has told
    shutdown: Shutdown | None = None
    shutdown_deadline: float = 0.0
    ended: bool = False

    def spares_in_order(self) -> list[str]:
        """The pool, in the allocation's order, so that ranks follow the network's topology."""
        return sorted(self.standby, key=lambda name: self.nodes[name].index)

    def count(self, state: NodeState) -> int:
        return sum(node.state is state for node in self.nodes.values())


def new_job(plan: Plan) -> Job:
    """A job of which nothing has happened yet."""
    job = Job(plan=plan)
    for role in plan.roles:
        for index in range(role.replicas):
            identity = replica_id(role.name, index)
            job.replicas[identity] = Replica(id=identity, role=role)
    return job
