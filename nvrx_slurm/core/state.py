"""What the controller knows of a job. Changed only by the modules of this package, only through `job.step`."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

import msgspec

from nvrx_slurm.jobspec.model import OnFailure
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import DrainAsked, Shutdown
from nvrx_slurm.journal.verdicts import Attribution


class NodeState(StrEnum):
    """Where a node stands. Transitions: see `membership.TRANSITIONS`."""

    EXPECTED = "expected"  # in the allocation, has not joined yet
    STANDBY = "standby"  # a hot spare: joined, healthy, not assigned
    READY = "ready"  # here for a rendezvous that is still open, no old worker left
    ACTIVE = "active"  # its workers run, or are being torn down for the next rendezvous
    LOST = "lost"
    LEFT = "left"
    QUARANTINED = "quarantined"  # here, and gets no ranks: it was lost too often
    DRAINED = "drained"  # here, and gets no ranks: a user asked for that


class Phase(StrEnum):
    """Where a replica stands."""

    RENDEZVOUS = "rendezvous"  # a rendezvous is open: nodes get ready
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # ended by a failure that its role ignores


class Node(msgspec.Struct):
    """One node of the allocation, and the agent process (`incarnation`) that represents it."""

    name: str
    index: int
    state: NodeState = NodeState.EXPECTED
    incarnation: str = ""
    seq: int = 0
    addr: str = ""
    port: int = 0
    fence_port: int = 0
    replica: str | None = None
    grant: int | None = None  # the suspension by which its workers outlive their lease, until it has resumed from it
    deaths: int = 0
    excused: bool = False  # its agent's next end is not counted: Slurm ended the step of all agents
    former: set[str] = set()

    @property
    def alive(self) -> bool:
        return self.state not in (NodeState.EXPECTED, NodeState.LOST, NodeState.LEFT)


class Stamps(msgspec.Struct):
    """When each phase of a recovery ended, on the store's clock."""

    noticed: float
    decided: float
    torn_down: float = 0.0
    closed: float = 0.0
    spawned: float | None = None


class Replica(msgspec.Struct):
    """One world of ranks: its open rendezvous, or its running cycle.

    `unsafe`: its lost nodes whose death is not proven → the moment from which their workers are dead all the
    same.
    """

    id: str
    role: RolePlan
    phase: Phase = Phase.RENDEZVOUS
    cycle: int = -1
    order: tuple[str, ...] = ()  # group-rank order of the last closed rendezvous; in an open one, who is preferred
    awaited: set[str] = set()  # preferred nodes that may still get ready
    ready: set[str] = set()  # preferred nodes that are
    opened_at: float = 0.0
    called_at: float = 0.0  # its nodes knew of the open rendezvous by then
    last_call_at: float | None = None
    short_since: float | None = None  # too few nodes are left, and no more can come
    started: set[str] = set()  # nodes whose workers of the running cycle have started
    stepped: set[str] = set()  # nodes that have reported the first step of it
    has_run: bool = False  # on any node, in any cycle: its program can be executed
    unrunnable: bool = False  # its last cycle failed since its program could not be
    done: set[str] = set()
    first_done_at: float | None = None
    unsafe: dict[str, float] = {}
    silent: set[str] = set()  # nodes that did not answer the teardown, and have not been heard since
    leaving: dict[str, DrainAsked] = {}  # drained nodes that the open rendezvous replaces
    stamps: Stamps | None = None
    began_at: float = 0.0  # when the last rendezvous closed
    crashes: int = 0  # how many cycles in a row have crashed (`backoff`)
    pause_until: float | None = None  # the open rendezvous closes no sooner
    paused: bool = False  # the rendezvous could close, and waits for that
    held: bool = False  # the rendezvous could close, and waits for a decision
    waits_for: tuple[str, ...] = ()  # and so for nodes of these replicas
    restarted_at: list[float] = []  # after failed workers
    first_step: int | None = None  # that a worker reported, of the running cycle or of the one that has just failed
    reached: int | None = None  # its highest
    best_step: int | None = None  # the highest of the cycles before it
    no_progress: int = 0  # how many cycles in a row have made too few steps

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)


class Failure(msgspec.Struct, frozen=True):
    """What went wrong in a cycle: by the first report, or by the best evidence since (`cause.py`). A lost node spends
    spares, a failed worker spends the budget."""

    kind: Literal["worker", "node"]
    cause: str
    node: str
    noticed: float
    rank: int | None = None
    step: int | None = None
    hung: bool = False  # it lives: its stacks, and those of all ranks that wait for it, show why
    hang_limit_s: float | None = None  # the deadline that has passed, where its agent says so
    signal: int | None = None  # that ended the worker
    peer_lost: bool = False  # the worker reports that it lost the connection to a peer
    unrunnable: bool = False  # the node's kernel would not execute the worker's program
    misconfigured: bool = False  # an option of the worker's in-process wrapper is wrong


class RestartDecision(msgspec.Struct):
    """A failure whose consequence is pending: see `restart_decision.py`.

    `waits`: a STOP may end the job, so no rendezvous closes before the answers or `due_at`. `holds`: replicas whose
    next rendezvous closes only once this is decided. `policy`: of the replica of the first report. `noticed`: when
    that came. `is_symptom`: it may be one, so evidence of the cause may still come (`cause.py`).
    """

    replica: str
    cycle: int
    policy: OnFailure
    failure: Failure
    members: tuple[str, ...]
    sources: tuple[str, ...]
    opened_at: float
    due_at: float
    waits: bool
    holds: frozenset[str]
    noticed: float
    is_symptom: bool
    asked: bool = False  # the sources, about `failure`
    answers: dict[str, Attribution] = {}
    held_at: float | None = None  # since when a rendezvous has waited for it
    judged: bool = False  # its answers have been read
    decided: bool = False  # what follows is settled


class ControlState(msgspec.Struct):
    """All that decisions about a job rest on. `standby` is the shared pool of hot spares."""

    plan: Plan
    generation: int = 0
    started_at: float = 0.0
    nodes: dict[str, Node] = {}
    expected: set[str] = set()  # an agent is being started there
    expected_until: float = 0.0
    standby: set[str] = set()
    wanted_by: dict[str, str] = {}  # node → the open rendezvous that prefers it
    replicas: dict[str, Replica] = {}
    seen: dict[str, dict[str, tuple[int, float]]] = {}  # role → what `Learned` has reported
    requests: set[str] = set()  # of users, that were answered
    drained: set[str] = set()  # nodes that get no ranks, whether they are here or not
    # (replica, cycle) → the decision on that cycle's failure; of this generation only
    restart_decisions: dict[tuple[str, int], RestartDecision] = {}
    suspects: set[str] = set()  # nodes that other jobs' evidence blames
    blamed: set[str] = set()  # nodes that this job's does
    nodes_lost_at: list[float] = []
    requeued_at: list[float] = []
    shutdown: Shutdown | None = None
    shutdown_deadline: float = 0.0
    suspended_at: float | None = None  # Slurm suspends the job: nothing is decided until it has been resumed
    suspensions: int = 0
    ended: bool = False
    terminating_until: float | None = None  # Slurm has sent SIGTERM to a node's processes, and says why before this
    behind_until: float = -math.inf  # facts of up to then arrived while no controller ran, or while it stood still
    catches_up: bool = False  # this step's fact is one of them, and more may follow

    def is_over(self, deadline: float, now: float) -> bool:
        """Whether a deadline has passed, and no fact that arrived before it can still follow."""
        return now >= deadline and not self.catches_up

    def spares_in_order(self) -> list[str]:
        """The pool: clean nodes first, each kind in the allocation's order: ranks follow the network's topology."""
        return sorted(self.standby, key=lambda name: (self.is_suspect(name), self.nodes[name].index))

    def is_suspect(self, node: str) -> bool:
        """Whether evidence speaks against the node: it gets ranks only where no other is left."""
        return node in self.blamed or node in self.suspects


def new_job(plan: Plan) -> ControlState:
    """A job of which nothing has happened yet."""
    replicas = {identity: Replica(id=identity, role=role) for identity, role in plan.replica_roles.items()}
    return ControlState(plan=plan, replicas=replicas)
