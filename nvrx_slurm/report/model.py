"""The values that a job's journal adds up to. `status --json` prints them; a key may be added, none goes away.

Times (`…_at`, `since`) are seconds since the epoch by the store's clock; durations end in `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import Heartbeat, Shutdown

NodeState = Literal["joining", "ready", "standby", "active", "lost", "left", "quarantined", "drained"]
Phase = Literal["joining", "starting", "running", "stopping", "done", "failed", "stopped"]
# Replica, generation, cycle.
CycleKey = tuple[str, int, int]


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what follows: frozen, and encodable as JSON."""


class NodeView(Value, frozen=True, kw_only=True):
    """One node. `joining`: in the allocation, not joined yet; `ready`: joined, its rendezvous still open;
    `standby`: a hot spare; `quarantined`: joined, and gets no ranks any more; `drained`: the same, because a user
    asked for it. `step` is the last one that any of its ranks reported in its cycle. `held_until`: of a lost node,
    until when its ranks wait for proof of its death.
    """

    name: str
    state: NodeState = "joining"
    since: float = 0.0
    replica: str | None = None
    role: str | None = None
    group_rank: int | None = None
    ranks: tuple[int, ...] = ()
    step: int | None = None
    promoted: bool = False
    """A hot spare that got ranks in the running cycle."""
    why: str | None = None
    """For `lost`, `left`, `quarantined` and `drained`."""
    done: bool = False
    """All its workers have ended with exit code 0."""
    held_until: float | None = None
    slurm_says: str | None = None
    """Of a lost node."""
    incarnation: str = ""
    prewarm: dict[str, str | None] = {}
    """Roles with `prewarm` → why their workers start cold here; null: a warm process waits."""


class ReplicaView(Value, frozen=True, kw_only=True):
    """One world of ranks.

    `starting`: the rendezvous has closed and not all workers run yet; `stopping`: workers of the cycle before are
    being torn down; `stopped`: the job ended before it was done. Which nodes keep it in its phase:
    `JobView.waits_for`. `step` is the last one that any rank reported in the cycle; while a new rendezvous is open,
    in the cycle before.
    """

    id: str
    role: str
    phase: Phase = "joining"
    cycle: int = 0
    nodes: tuple[str, ...] = ()
    """In group-rank order."""
    world_size: int = 0
    step: int | None = None
    since: float = 0.0


class CycleView(Value, frozen=True, kw_only=True):
    """One cycle of a replica, from the opening of its rendezvous. What has not happened yet is null."""

    replica: str
    generation: int
    cycle: int
    opened_at: float
    closed_at: float | None = None
    started_at: float | None = None
    """When the last node had started its workers."""
    first_step_at: float | None = None
    first_step: int | None = None
    ended_at: float | None = None
    outcome: str | None = None
    """`done`, `failed`, or the cause of the restart, or of the job's end; none where its generation left no end."""
    last_step: int | None = None
    """The last step that any rank reported in it, once the next rendezvous has closed or its generation has ended."""
    nodes: tuple[str, ...] = ()
    promoted: tuple[str, ...] = ()
    world_size: int = 0
    restarts_in_process: int = 0
    warm: int = 0
    """How many of its workers were forked from a warm process."""
    cold: str | None = None
    """Why others were not, where the role has `prewarm`."""


# `worker_error`: an exception, or a worker that could not start. `node_lost`: proven, or its connection closed;
# `node_silent`: no heartbeat in time. `user`: a restart or a drain that a user asked for, which is no failure.
FailureKind = Literal[
    "worker_exit",
    "worker_signal",
    "worker_error",
    "worker_hung",
    "node_lost",
    "node_silent",
    "node_isolated",
    "node_left",
    "user",
    "unknown",
]


class FailureView(Value, frozen=True, kw_only=True):
    """What failed, where, when, and why in one sentence."""

    at: float
    """When it was noticed."""
    why: str
    node: str
    replica: str | None = None
    cycle: int | None = None
    rank: int | None = None
    step: int | None = None
    stacks: str | None = None
    """Of a hung worker: the file, below the job folder."""
    peer_lost: bool = False
    """It is a consequence, as far as is known: the worker lost the connection to a peer."""
    peers_lost: tuple[int, ...] = ()
    """Other ranks of the cycle that lost their connection to a peer, as far as their nodes have reported it."""
    kind: FailureKind = "unknown"


class SectionView(Value, frozen=True, kw_only=True):
    """A section that a worker has entered and not left."""

    name: str
    open_s: float


class RankView(Value, frozen=True, kw_only=True):
    """One rank that has a worker, as the last heartbeat of its node reported it.

    `lag`: how many steps it was behind the fastest of its replica when that heartbeat was sent. `quiet_s`: since its
    last sign of progress. `sections`: outermost first.
    """

    replica: str
    rank: int
    node: str
    step: int | None = None
    lag: int | None = None
    quiet_s: float | None = None
    sections: tuple[SectionView, ...] = ()


class StacksView(Value, frozen=True, kw_only=True):
    """Stacks of live workers that were written down last. `files`: rank → path below the job folder."""

    at: float
    why: str
    node: str
    files: dict[int, str]


class InProcess(Value, frozen=True, kw_only=True):
    """The last restart in process: what interrupted their function, and how long until all were in it again."""

    at: float
    cause: str
    node: str
    replica: str
    cycle: int
    iteration: int
    """The iteration that began."""
    total_s: float


class Decided(Value, frozen=True, kw_only=True):
    """What the controller last decided, in one sentence."""

    at: float
    what: str


def steps_lost(before: int | None, first: int | None) -> int | None:
    """How many steps had to be made again: `before` was the last one done, `first` the first one done afterwards.
    None: one of them is not known."""
    return None if before is None or first is None else max(0, before - first + 1)


class Recovery(Value, frozen=True, kw_only=True):
    """How a replica got to run again. `phases`, in order, add up to `total_s`, the orchestration's own time.

    `startup_s` follows it: the user's own start-up (imports, checkpoint) until every node has reported its first
    step; before that, until the first node has. Null until then.
    """

    replica: str
    generation: int
    cycle: int
    """The new cycle."""
    why: str
    node: str
    noticed_at: float
    recovered_at: float
    phases: dict[str, float]
    total_s: float
    promoted: tuple[str, ...] = ()
    step_before: int | None = None
    """The last step that any rank had reported, in the last cycle before that made one: it failed there."""
    first_step: int | None = None
    """The first one that a rank reported afterwards: it resumed there, and this step is done."""
    startup_s: float | None = None
    last_to_step: str | None = None
    """The node whose first step was the last."""
    warm: int = 0
    """How many of its workers were forked from a warm process."""
    cold: str | None = None
    """Why others were not, where the role has `prewarm`."""
    kind: FailureKind = "unknown"

    @property
    def steps_lost(self) -> int | None:
        """How many steps had to be made again."""
        return steps_lost(self.step_before, self.first_step)

    @property
    def to_first_step_s(self) -> float | None:
        """From the moment the death was noticed to the first step after it."""
        return None if self.startup_s is None else self.total_s + self.startup_s

    @property
    def took_s(self) -> float:
        """Until steps were made again; where none is known, until all workers ran."""
        return self.total_s if self.to_first_step_s is None else self.to_first_step_s


@dataclass(frozen=True, slots=True)
class ReceivedHeartbeat:
    """A heartbeat, and when it reached the store: seconds since the epoch by the store's clock."""

    t: float
    heartbeat: Heartbeat


@dataclass(slots=True)
class JobView:
    """A job after journal entry `n`. It grows in place, as the core's state does: copying a fleet of thousands for
    every entry would make reading a journal quadratic. Its parts are frozen."""

    plan: Plan | None = None
    job: str = ""
    name: str = ""
    generation: int = 0
    n: int = 0
    t: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    nodes: dict[str, NodeView] = field(default_factory=dict)
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    cycles: dict[CycleKey, CycleView] = field(default_factory=dict)
    recoveries: dict[CycleKey, Recovery] = field(default_factory=dict)
    waiting: dict[str, set[str]] = field(default_factory=dict)  # replica → nodes that keep it in its phase
    outages: dict[str, FailureView] = field(default_factory=dict)  # replica → the failure it has yet to recover from
    preferred: dict[str, tuple[str, ...]] = field(default_factory=dict)  # replica → nodes that it prefers
    # Node → its last heartbeat, and the one before it of the same cycle. Only the store has them.
    heard: dict[str, ReceivedHeartbeat] = field(default_factory=dict)
    heard_before: dict[str, ReceivedHeartbeat] = field(default_factory=dict)
    # The last start of a controller: the number of its entry, and when the entry before it was written.
    led_from: tuple[int, float] = (0, 0.0)
    restarts: int = 0
    restarted_at: dict[str, list[float]] = field(default_factory=dict)  # replica → restarts after failed workers
    recorded_left: int | None = None  # restarts left, by the last decision; without the plan no more is known
    restarts_asked: int = 0  # by users: no budget counts them
    asked: dict[str, FailureView] = field(default_factory=dict)  # replica → why a user has it restarted
    drained: dict[str, str] = field(default_factory=dict)  # nodes that get no ranks → at whose request
    restarts_in_process: int = 0
    last_in_process: InProcess | None = None
    last_failure: FailureView | None = None
    # Failures by node and rank, since the last rendezvous closed: the cause may be reported after its consequences.
    reported: dict[tuple[str, int | None], FailureView] = field(default_factory=dict)
    # Replica, cycle → ranks that lost the connection to a peer.
    peers_lost: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    last_decision: Decided | None = None
    last_verdict: Decided | None = None  # a verdict that nothing follows from: of a dry run, or too late
    last_stacks: StacksView | None = None
    shutdown: Shutdown | None = None
    unused_spares: tuple[str, ...] | None = None  # the hot spares at the shutdown: they leave with the job
    exit_code: int | None = None
    missing: tuple[str, ...] = ()

    def last_step(self, cycle: CycleView) -> int | None:
        """The last step that any rank reported in the cycle, also of one that runs."""
        replica = self.replicas.get(cycle.replica)
        if cycle.last_step is not None or replica is None or cycle.generation != self.generation:
            return cycle.last_step
        # While a rendezvous is open the replica has the step of the cycle before.
        is_open = self.cycles[cycle.replica, self.generation, replica.cycle].closed_at is None
        return replica.step if cycle.cycle == replica.cycle - is_open else None

    def restarts_left(self, now: float, replica: str | None = None) -> int | None:
        """How many more failures of its workers the replica would be restarted after; without `replica`: the one that
        has the fewest restarts left. None: neither the plan nor a decision says so."""
        if self.plan is None:
            return self.recorded_left
        bounds, every = self.plan.fault_tolerance, list(self.restarted_at.values())
        own = every if replica is None else [self.restarted_at.get(replica, [])]
        left = min((bounds.max_restarts.left(times, now) for times in own), default=bounds.max_restarts.count)
        if bounds.max_job_restarts is not None:
            left = min(left, bounds.max_job_restarts.left([at for times in every for at in times], now))
        return left

    def waits_for(self, replica: str) -> tuple[str, ...]:
        """The nodes that keep the replica in its phase, in its order; none while it runs or merely lacks nodes."""
        waiting = self.waiting.get(replica, set())
        return tuple(name for name in self.replicas[replica].nodes if name in waiting)

    def unproven(self, replica: str) -> tuple[str, ...]:
        """The lost nodes of the replica that may still have workers: its rendezvous cannot close before that is
        over."""
        names = self.replicas[replica].nodes
        return tuple(name for name in names if name in self.nodes and self.nodes[name].held_until is not None)

    def last_heartbeat(self, name: str) -> ReceivedHeartbeat | None:
        """The last heartbeat of the node's present agent, or of the one that was lost; None: none is known."""
        heard, node = self.heard.get(name), self.nodes.get(name)
        if heard is None or node is None or heard.heartbeat.generation != self.generation:
            return None
        return heard if node.incarnation in ("", heard.heartbeat.incarnation) else None

    def is_current(self, node: NodeView, beat: Heartbeat) -> bool:
        """Whether it reports the workers that the node has now: of its present agent, generation and cycle."""
        replica = self.replicas.get(beat.replica or "")
        if replica is None or node.state != "active" or node.replica != beat.replica:
            return False
        fresh = node.incarnation in ("", beat.incarnation) and beat.generation == self.generation
        return fresh and beat.cycle == replica.cycle

    @property
    def spares(self) -> tuple[str, ...]:
        """The hot spares that are left; of a job that has ended, those that it had not used."""
        if self.unused_spares is not None:
            return self.unused_spares
        return tuple(node.name for node in self.nodes.values() if node.state == "standby")

    @property
    def present(self) -> tuple[str, ...]:
        """The nodes whose agents have not gone."""
        here = ("ready", "standby", "active", "quarantined", "drained")
        return tuple(node.name for node in self.nodes.values() if node.state in here)

    @property
    def step(self) -> int | None:
        """The last step that any rank reported."""
        return max((r.step for r in self.replicas.values() if r.step is not None), default=None)

    @property
    def cycle(self) -> int:
        """The highest cycle of any replica."""
        return max((replica.cycle for replica in self.replicas.values()), default=0)
