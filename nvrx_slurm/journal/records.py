"""The records that cross a process or outlive one: frozen, versioned by growth, with one codec.

Every record is a frozen struct. A field may be added with a default; none is renamed or removed, and an unknown
field passes, so two neighbouring versions can meet during an upgrade. On the wire (the store) a record is
MessagePack; in a file (`events.jsonl`) it is JSON. Both forms carry the record's name in `event`.

Two families:

- `Fact`s: what happened, said by an agent, by the batch host, or by the controller's own watch. They are the
  input of `core`.
- `Decision`s: what the controller decided. They are the output of `core`, and reach agents as orders.

Facts and decisions together, in order, are the journal. Durations are seconds in fields that end in `_s`.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

import msgspec

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from nvrx_slurm.util.decoding import decode

SignalReason = Literal[
    "cancel", "interrupt", "hangup", "time_limit", "agents_gone", "no_agents", "lease_lapsed", "preempted"
]

# The reason of the shutdown of a job whose nodes Slurm takes back.
PREEMPTED = "preempted or requeued"

# What is checked when a record is decoded. Readers make paths of names, and pack numbers into 64 bits again.
# A name of a node, replica or role: one component of a path, and not `.` or `..`.
# `\Z`: msgspec searches for the pattern, and `$` would pass a newline at the end.
FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00-\x1f\x7f]{1,255}\Z")]
# A path below the job folder: relative, and without `..`.
PathBelow = Annotated[str, msgspec.Meta(pattern=r"^(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\x00-\x1f\x7f]{1,4096}\Z")]

Host = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:%\[\]-]{0,255}\Z")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
# A rank, a cycle, a generation, or how many there are of something.
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

Step = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all records."""


# ---------------------------------------------------------------------------------------------- facts


class Fact(Record, frozen=True, kw_only=True, tag_field="event"):
    """Something that happened."""


class FromAgent(Fact, frozen=True, kw_only=True):
    """A fact that an agent reports. `incarnation` names the agent process, `seq` grows with each of its facts,
    so one that arrives twice, or from an agent that was replaced since, is recognised and dropped."""

    node: FileName
    incarnation: FileName
    seq: Step
    generation: Count = 0


class JobStarted(Fact, frozen=True, kw_only=True, tag="job_started"):
    """Begins each generation; only a `controller_started` comes before it. `expected`: the allocation's nodes, in
    Slurm's order."""

    job: str
    name: str
    expected: tuple[FileName, ...]
    generation: Count = 0
    suspects: tuple[FileName, ...] = ()
    """Nodes of the allocation that other jobs' evidence blames."""


class ControllerStarted(Fact, frozen=True, kw_only=True, tag="controller_started"):
    """A controller took the lease; `epoch` fences all before it. `clock_s`: what the host's monotonic clock said then
    (0: it is not known), by which the next controller there knows how much later it is."""

    epoch: Count
    host: Host
    pid: int
    clock_s: float = 0.0


class NodeJoined(FromAgent, frozen=True, kw_only=True, tag="node_joined"):
    """An agent is up and healthy. `addr` reaches the node; `port` is held free there for a rendezvous; at
    `fence_port` its kernel takes the datagram that kills its workers (0: it cannot)."""

    addr: Host
    port: Port
    pid: int = 0
    fence_port: Port = 0


class NodeReady(FromAgent, frozen=True, kw_only=True, tag="node_ready"):
    """The node has no worker of an older cycle left and waits for its assignment in `cycle`. `step`: the last that
    the cycle before had reached there, as far as it is known."""

    replica: FileName
    cycle: Count
    port: Port
    teardown_s: float = 0.0
    step: Step | None = None
    peers_lost: tuple[Count, ...] = ()
    """Ranks of that cycle on this node that had lost the connection to a peer before they were stopped."""


class WorkersStarted(FromAgent, frozen=True, kw_only=True, tag="workers_started"):
    """All workers of this node run: rank → process id. `warm`: how many of them were forked from the role's warm
    process; `cold`: why the others were started cold, where the role has `prewarm`."""

    replica: FileName
    cycle: Count
    pids: dict[Count, int]
    spawn_s: float = 0.0
    warm: Count = 0
    cold: str | None = None


class Prewarmed(FromAgent, frozen=True, kw_only=True, tag="prewarmed"):
    """A warm process of the role waits on this node: its next workers are forked from it. `modules`: how many it has
    imported; `skipped`: module → why it was not imported there."""

    role: FileName
    modules: Count = 0
    took_s: float = 0.0
    memory_bytes: Step = 0
    skipped: dict[str, str] = {}


class PrewarmFailed(FromAgent, frozen=True, kw_only=True, tag="prewarm_failed"):
    """The role has no warm process on this node, so its workers start cold there. Reported once for each reason."""

    role: FileName
    why: str


class Progress(FromAgent, frozen=True, kw_only=True, tag="progress"):
    """The first step that a worker of this node reported in the cycle; later ones travel in heartbeats only."""

    replica: FileName
    cycle: Count
    rank: Count
    step: Step


class RestartedInProcess(FromAgent, frozen=True, kw_only=True, tag="restarted_in_process"):
    """A group of ranks has begun its function again, inside the same processes: nothing else follows from it.
    `node`: that of the rank which reported it. `times`: it stands for so many restarts, and describes the last of
    them; where they come too fast for an entry each."""

    replica: FileName
    cycle: Count
    restart: InProcessRestart
    times: int = 1


class WorkerFailed(FromAgent, frozen=True, kw_only=True, tag="worker_failed"):
    """A worker ended with another exit code than 0, or by a signal that its agent had not sent. `ago_s`: how long
    before this message its end was noticed. `peer_lost`: by its output it lost the connection to a peer, so that peer
    ended first."""

    replica: FileName
    cycle: Count
    rank: Count
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    """The exception that it failed with; without an exit code: why it could not start."""
    step: Step | None = None
    ago_s: float = 0.0
    peer_lost: bool = False


class WorkerHung(FromAgent, frozen=True, kw_only=True, tag="worker_hung"):
    """A worker lives and makes no progress. `why`: one sentence; `where`: the innermost line of its main thread;
    `stacks`: the file, below the job folder, that holds all of them."""

    replica: FileName
    cycle: Count
    rank: Count
    why: str
    step: Step | None = None
    where: str | None = None
    stacks: PathBelow | None = None
    ago_s: float = 0.0
    silent_s: float = 0.0
    """How long it had made no progress by then."""
    limit_s: float | None = None
    """The deadline that has passed; a section has its own. None: an older agent's."""


class NodeIsolated(FromAgent, frozen=True, kw_only=True, tag="node_isolated"):
    """The agent had lost both store and controller for the fence timeout: its workers are dead."""

    replica: FileName
    cycle: Count
    for_s: float


class Learned(FromAgent, frozen=True, kw_only=True, tag="learned"):
    """How long things take in this role: section (`step`: between two beats) → how many were seen, the longest in
    seconds. Reported when a longest has grown; kept across cycles and generations."""

    role: FileName
    seen: dict[str, tuple[int, float]]


class StacksDumped(FromAgent, frozen=True, kw_only=True, tag="stacks_dumped"):
    """Stacks of live workers are on file. `files`: rank → path below the job folder; `where`: rank → innermost line;
    `request`: who asked, if it was `nvrx-slurm dump`."""

    why: str
    files: dict[Count, PathBelow] = {}
    where: dict[Count, str] = {}
    problems: tuple[str, ...] = ()
    request: str | None = None


class LogFindings(FromAgent, frozen=True, kw_only=True, tag="log_findings"):
    """What the agent has found in the logs of its ranks (attribution/analyze/node_findings.py). `whole`: no worker of
    the cycle was left on its node. It is for the sources of attribution: no decision depends on it but through their
    answers, so it is in no journal."""

    replica: FileName
    cycle: Count
    whole: bool
    data: bytes


class WorkersDone(FromAgent, frozen=True, kw_only=True, tag="workers_done"):
    """Every worker of this node ended with exit code 0."""

    replica: FileName
    cycle: Count
    step: Step | None = None


class NodeLeft(FromAgent, frozen=True, kw_only=True, tag="node_left"):
    """The agent is about to exit, its workers gone. `survivors`: processes that even SIGKILL did not end; `step`: the
    last that its workers had reported."""

    reason: str
    survivors: tuple[int, ...] = ()
    step: Step | None = None


class NodeLost(Fact, frozen=True, kw_only=True, tag="node_lost"):
    """The controller declares the node dead. `cause`: `connection_closed` or `heartbeat_timeout`. A node whose next
    agent joins before that has no such entry: its second `node_joined` is the loss of the first agent.

    `safe_after_s`: its workers may still run for so long, and until then no node gets their ranks. 0: its own kernel
    says that they are dead.
    """

    node: FileName
    incarnation: FileName
    cause: str
    step: Step | None = None
    ago_s: float = 0.0
    safe_after_s: float = 0.0
    silent_s: float = 0.0
    """How long no sign of life had arrived from it, if that is why it is declared dead."""

    @property
    def why(self) -> str:
        """The cause in words. An older journal's cause keeps its words: a replay must give the same decisions."""
        closed = self.cause == "connection_closed"
        return "connection to its agent closed" if closed else self.cause.replace("_", " ")


class NodeFenced(Fact, frozen=True, kw_only=True, tag="node_fenced"):
    """The workers of a lost node are proven dead. `proof`: by what."""

    node: FileName
    incarnation: FileName
    proof: str


class SlurmNodeState(Fact, frozen=True, kw_only=True, tag="slurm_node_state"):
    """The state of a lost node in Slurm, such as `DOWN+NOT_RESPONDING`."""

    node: FileName
    state: str
    reason: str | None = None


class AgentsStarted(Fact, frozen=True, kw_only=True, tag="agents_started"):
    """The batch host starts agents on these nodes again, in one step of Slurm. `missing`: nodes without an agent that
    do not answer. `step_ended`: the srun of all their agents had ended, by Slurm or a signal, which is no fault of
    theirs. `attempt`: the number of this start within a short time, from 1."""

    nodes: tuple[FileName, ...]
    missing: tuple[FileName, ...] = ()
    step_ended: bool = False
    attempt: Count = 1
    generation: Count = 0


class DumpAsked(Fact, frozen=True, kw_only=True, tag="dump_asked"):
    """A user asks for stacks of live workers now. `ranks` empty: of all."""

    request: str
    by: str
    ranks: tuple[Count, ...] = ()
    replica: FileName | None = None


class RestartAsked(Fact, frozen=True, kw_only=True, tag="restart_asked"):
    """A user asks for the next cycle of replicas that run. `cycles`: replica → its cycle as the user saw it. One that
    has begun another cycle since is left alone."""

    request: str
    by: str
    cycles: dict[FileName, Count]
    generation: Count = 0


class DrainAsked(Fact, frozen=True, kw_only=True, tag="drain_asked"):
    """A user asks that a node gets no ranks any more, and that a spare takes those that it has. `force`: the replica
    may go on with fewer nodes, down to its `min_nodes`."""

    request: str
    by: str
    node: FileName
    force: bool = False
    generation: Count = 0


class UndrainAsked(Fact, frozen=True, kw_only=True, tag="undrain_asked"):
    """A user asks that a drained node may get ranks again."""

    request: str
    by: str
    node: FileName
    generation: Count = 0


class CommandAsked(Fact, frozen=True, kw_only=True, tag="command_asked"):
    """A user asks for a command to be run beside a worker, in its environment. `cycle`: as the user saw it."""

    request: str
    by: str
    argv: tuple[str, ...]
    replica: FileName
    rank: Count
    cycle: Count
    generation: Count = 0


class CommandEnded(FromAgent, frozen=True, kw_only=True, tag="command_ended"):
    """How a user's command ended: with an exit code, by a signal, or why it was not run."""

    request: str
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    took_s: float = 0.0


class Signalled(Fact, frozen=True, kw_only=True, tag="signalled"):
    """The batch host reports why the job must end: a user cancels it, its terminal closed (`hangup`), time is up, no
    agent runs any more, none can run in the job's container (`no_agents`), no client has touched the job's lease
    file, or Slurm takes the nodes back (`preempted`: also for a requeue). `saves`: there is time for a checkpoint
    first. `by`: a user asks to cancel it, from a host that cannot signal the batch host."""

    reason: SignalReason
    generation: Count = 0
    saves: bool = False
    by: str | None = None


class Terminating(FromAgent, frozen=True, kw_only=True, tag="terminating"):
    """Slurm has sent SIGTERM to this node's processes; ahead of a preemption with a GraceTime, to no other process of
    the job. Of several at once only the first is journaled."""


class Suspending(FromAgent, frozen=True, kw_only=True, tag="suspending"):
    """Slurm has announced to this node that it suspends the job (SIGTSTP, two seconds ahead of SIGSTOP). Only the
    first of a suspension is journaled."""


class NodeResumed(FromAgent, frozen=True, kw_only=True, tag="node_resumed"):
    """The node's workers live by their ordinary lease again, after the suspension whose number this is.
    `stood_still_s`: how long the agent did not run."""

    stood_still_s: float = 0.0
    suspension: Count = 0


class JobResumed(Fact, frozen=True, kw_only=True, tag="job_resumed"):
    """The controller runs again after a suspension, or the announced one has not come (`stood_still_s` 0). No
    deadline counts the time that it stood still."""

    stood_still_s: float = 0.0
    generation: Count = 0


class Attributed(Fact, frozen=True, kw_only=True, tag="attributed"):
    """A source of attribution has answered about the first failure of a cycle. `rank` as in the failure's key."""

    replica: FileName
    cycle: Count
    generation: Count = 0
    rank: Count | None = None
    attribution: Attribution


class RecordsRefused(Fact, frozen=True, kw_only=True, tag="records_refused"):
    """The controller has set aside `count` records of one of the store's streams since it last said so (at most once
    a minute): they are not signed with the job's key, or cannot be decoded. `why`: what was wrong with the first."""

    stream: str
    count: Count
    why: str


class DecisionsLate(Fact, frozen=True, kw_only=True, tag="decisions_late"):
    """What this controller has decided from `since` on (as `t`) reached the store only now: the controller or the
    store stood still meanwhile. Each time for acting on it counts from now."""

    since: float


class StoreDataLost(Fact, frozen=True, kw_only=True, tag="store_data_lost"):
    """The store lacks the last `entries` entries of the journal, which the copy in the job folder has, and so perhaps
    facts and orders that no process has read. Every agent has to join again, and every cycle that ran ends."""

    entries: Count
    generation: Count = 0


class Tick(Fact, frozen=True, kw_only=True, tag="tick"):
    """A deadline of the core passed. Journaled only where it led to a decision, or to another deadline."""


# ------------------------------------------------------------------------------------------ decisions


class Decision(Record, frozen=True, kw_only=True, tag_field="event"):
    """Something that the controller decided."""


class RendezvousOpened(Decision, frozen=True, kw_only=True, tag="rendezvous_opened"):
    """The replica's nodes stop the workers of older cycles and get ready for `cycle`. `dump`: write down the stacks
    of all of them first, for this reason."""

    replica: FileName
    cycle: Count
    generation: Count = 0
    dump: str | None = None


class Assignment(Record, frozen=True, kw_only=True):
    """What one node does in one cycle. Ranks are `first_rank` … `first_rank + workers - 1`."""

    group_rank: Count
    first_rank: Count
    workers: Count
    world_size: Count
    group_world_size: Count
    master_addr: Host
    master_port: Port
    restart_count: Count = 0
    role: FileName
    incarnation: str = ""  # of the agent that it is for: one that has joined since starts nothing
    seen: dict[str, tuple[int, float]] = {}  # what the role's workers have taken so far: `Learned`


class RendezvousClosed(Decision, frozen=True, kw_only=True, tag="rendezvous_closed"):
    """The replica's world in `cycle`: `nodes` in group-rank order. `active` and `standby` count nodes job-wide."""

    replica: FileName
    cycle: Count
    nodes: tuple[FileName, ...]
    promoted: tuple[FileName, ...] = ()
    """Hot spares that got ranks in this rendezvous."""
    active: Count
    standby: Count
    world_size: Count
    master_addr: Host
    master_port: Port
    generation: Count = 0


class AttributionAsked(Decision, frozen=True, kw_only=True, tag="attribution_asked"):
    """The sources are asked about the first failure of a cycle. `holds`: no new rendezvous closes before they have
    answered, or their time is up."""

    replica: FileName
    cycle: Count
    generation: Count = 0
    rank: Count | None = None
    node: FileName
    sources: tuple[str, ...]
    holds: bool = False


class AttributionJudged(Decision, frozen=True, kw_only=True, tag="attribution_judged"):
    """The verdict that follows from the answers of all sources, formed once. `acted`: whether it decided about the
    restart; if not, `why` is the reason. A later answer is recorded and has no effect."""

    replica: FileName
    cycle: Count
    generation: Count = 0
    rank: Count | None = None
    verdict: Verdict
    acted: bool
    why: str
    blamed: tuple[FileName, ...] = ()
    """Nodes that get ranks only where no other is left."""
    waited_s: float = 0.0
    """How long the rendezvous waited for it."""


class RestartDecided(Decision, frozen=True, kw_only=True, tag="restart_decided"):
    """What is done about a failure, and on what evidence. It comes once the next rendezvous could close where a
    verdict may stop the job, where the plan has `max_no_progress_cycles`, and where the first report was of a lost
    connection to a peer, or of a hang that was found sooner than a silent node is lost: there `cause`, `node` and
    `rank` are those of what happened to the peer, as far as it is known by then. Else it comes at once. `by`: what
    settled it, in the order in which they are asked; `no_progress`: how many cycles in a row have made too few steps.
    `delay_s`: the next cycle begins so long after the failure at the earliest, since `crashes` cycles in a row have
    failed soon after their start."""

    replica: FileName
    cycle: Count
    """The cycle that failed."""
    action: Literal["restart_replica", "restart_job", "ignore", "fail_job", "stop"]
    cause: str
    node: FileName
    rank: Count | None = None
    step: Step | None = None
    restarts_left: int = 0
    by: Literal["policy", "attribution", "progress", "budget"] = "policy"
    no_progress: int = 0
    delay_s: float = 0.0
    crashes: int = 0


class Recovered(Decision, frozen=True, kw_only=True, tag="recovered"):
    """A replica runs again: how long each phase took, in seconds; they add up to `total_s`.

    `phases`, in order: `decided` (from the moment the death was noticed on its node, or its connection closed),
    `torn_down` (until the last node had no old worker), `closed` (the rendezvous, after the pause of a crash loop if
    there is one), `spawned` (until the last node had started its workers). The user's own start-up follows:
    `first_step_reached`.
    """

    replica: FileName
    cycle: Count
    phases: dict[str, float]
    total_s: float


class FirstStepReached(Decision, frozen=True, kw_only=True, tag="first_step_reached"):
    """After a recovery every node of the replica has reported a first step. `phases` are those of `recovered`, and
    `first_step`: from the start of the last node's workers to the last node's first step. They add up to `total_s`.
    `node`: the last one; `step`: the lowest of the steps that they began with. A cycle has none if it ended before,
    or if a node of it reports no steps."""

    replica: FileName
    cycle: Count
    node: FileName
    step: Step
    phases: dict[str, float]
    total_s: float


class ReplicaEnded(Decision, frozen=True, kw_only=True, tag="replica_ended"):
    """The replica has ended: `done` (all ranks exited with 0) or `failed` (in a role with `on_failure: ignore`)."""

    replica: FileName
    cycle: Count
    outcome: Literal["done", "failed"]


class Shutdown(Decision, frozen=True, kw_only=True, tag="shutdown"):
    """The job ends, for this reason, with this exit code. The first one wins for good. `checkpoint`: workers are
    asked to save what they can first; `dump`: write down their stacks first, for this reason."""

    exit_code: int
    reason: str
    checkpoint: bool = False
    dump: str | None = None


class JobEnded(Decision, frozen=True, kw_only=True, tag="job_ended"):
    """All agents have left, or the bound for that has passed (`missing`: the nodes that did not answer)."""

    exit_code: int
    reason: str
    missing: tuple[FileName, ...] = ()


class Fence(Decision, frozen=True, kw_only=True, tag="fence"):
    """The agent with this incarnation kills its workers and must join again: its ranks may run elsewhere."""

    node: FileName
    incarnation: FileName


class Quarantined(Decision, frozen=True, kw_only=True, tag="quarantined"):
    """The node is here again, and gets no ranks any more: it was lost `deaths` times, or kept a process that nothing
    could kill."""

    node: FileName
    deaths: Count
    reason: str


class JobSuspended(Decision, frozen=True, kw_only=True, tag="job_suspended"):
    """Slurm suspends the job, on all nodes. Until each of these agents has resumed, its workers outlive their lease,
    so none of their ranks is given away by the clock; only on proof. `suspension` numbers those of the job, from
    0."""

    incarnations: tuple[FileName, ...]
    generation: Count = 0
    suspension: Count = 0


class RequestRefused(Decision, frozen=True, kw_only=True, tag="request_refused"):
    """Nothing follows from a user's request."""

    request: str
    why: str


class RestartOrdered(Decision, frozen=True, kw_only=True, tag="restart_ordered"):
    """A user's request restarts a replica, or drains a node of it (`node`); or the controller does, for a reason that
    is no failure (`why`). It does not count against a budget, and no source is asked about it. `cycle`: the one that
    ends."""

    request: str
    by: str
    replica: FileName
    cycle: Count
    node: FileName | None = None
    why: str | None = None


class NodeDrained(Decision, frozen=True, kw_only=True, tag="node_drained"):
    """From now on the node gets no ranks; it keeps those that it has until the next rendezvous."""

    request: str
    by: str
    node: FileName


class NodeUndrained(Decision, frozen=True, kw_only=True, tag="node_undrained"):
    """The node may get ranks again. `why`: set if the controller revoked the drain (of request `request`) itself, and
    the reason."""

    request: str
    by: str
    node: FileName
    why: str = ""


class CommandOrdered(Decision, frozen=True, kw_only=True, tag="command_ordered"):
    """The node's agent runs a user's command beside the worker of a rank, while that cycle lasts."""

    request: str
    by: str
    node: FileName
    argv: tuple[str, ...]
    replica: FileName
    rank: Count
    cycle: Count
    generation: Count = 0


class DumpOrdered(Decision, frozen=True, kw_only=True, tag="dump_ordered"):
    """Agents write down the stacks of their live workers. `ranks` empty: of all."""

    request: str
    ranks: tuple[Count, ...] = ()
    replica: FileName | None = None


AnyFact = (
    JobStarted
    | ControllerStarted
    | NodeJoined
    | NodeReady
    | WorkersStarted
    | Prewarmed
    | PrewarmFailed
    | Progress
    | RestartedInProcess
    | WorkerFailed
    | WorkerHung
    | WorkersDone
    | NodeIsolated
    | Learned
    | StacksDumped
    | NodeLeft
    | NodeLost
    | NodeFenced
    | SlurmNodeState
    | AgentsStarted
    | DumpAsked
    | RestartAsked
    | DrainAsked
    | UndrainAsked
    | CommandAsked
    | CommandEnded
    | Signalled
    | Terminating
    | Suspending
    | NodeResumed
    | JobResumed
    | Attributed
    | RecordsRefused
    | DecisionsLate
    | StoreDataLost
    | Tick
)
AnyDecision = (
    RendezvousOpened
    | AttributionAsked
    | AttributionJudged
    | RendezvousClosed
    | RestartDecided
    | Recovered
    | FirstStepReached
    | ReplicaEnded
    | Shutdown
    | JobEnded
    | Fence
    | Quarantined
    | JobSuspended
    | RequestRefused
    | RestartOrdered
    | NodeDrained
    | NodeUndrained
    | CommandOrdered
    | DumpOrdered
)
AnyRecord = AnyFact | AnyDecision
# What may stand in the inbox. `LogFindings` goes to the sources of attribution, and into no journal.
AnyInboxRecord = AnyRecord | LogFindings


class ControllerUp(Record, frozen=True, kw_only=True, tag_field="event", tag="controller_up"):
    """An order only: where the newest controller accepts liveness connections."""

    epoch: Count
    host: Host
    port: Port


AnyOrder = AnyDecision | ControllerUp


class Entry(Record, frozen=True, kw_only=True):
    """One line of the journal. `t`: seconds since the epoch by the store's clock; `n` counts from 1 without a gap."""

    n: int
    t: float
    record: AnyRecord


class Heartbeat(Record, frozen=True, kw_only=True):
    """An agent's sign of life, in the `beats` stream.

    `steps`: rank → last step reported by its worker; `quiet`: rank → seconds since its last sign of progress;
    `sections`: rank → the sections it has open, outermost first, each with the seconds since it was entered;
    `teardown`: the phase that a teardown is in.
    """

    node: FileName
    incarnation: FileName
    generation: Count = 0
    state: str = "standby"
    replica: FileName | None = None
    cycle: Count = 0
    steps: dict[Count, Step] = {}
    quiet: dict[Count, float] = {}
    sections: dict[Count, tuple[tuple[str, float], ...]] = {}
    teardown: str | None = None


# ---------------------------------------------------------------------------------------------- codec


# Names of events in journals up to 0.1 → their names today.
RENAMED_EVENTS = {"round_opened": "rendezvous_opened", "round_closed": "rendezvous_closed"}

# How each name stands in an encoded record, with the key before it: no value is mistaken for it.
_RENAMED_IN_JSON = [
    tuple(msgspec.json.encode({"event": name})[1:-1] for name in pair) for pair in RENAMED_EVENTS.items()
]
_RENAMED_IN_MSGPACK = [
    tuple(msgspec.msgpack.encode({"event": name})[1:] for name in pair) for pair in RENAMED_EVENTS.items()
]


def _translate_deprecated(data: bytes, renamed: list[tuple[bytes, ...]]) -> bytes:
    # One search in data that has no such name, as nearly all have none.
    if b"round_" in data:
        for old, new in renamed:
            data = data.replace(old, new)
    return data


class _Head(msgspec.Struct):
    """What a line of `events.jsonl` has beside the record."""

    n: int
    t: float


_head_from_json = msgspec.json.Decoder(_Head)
_record_from_json: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
_packer = msgspec.msgpack.Encoder()
_unpack_record: msgspec.msgpack.Decoder[AnyInboxRecord] = msgspec.msgpack.Decoder(AnyInboxRecord)
_unpack_order: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)
_unpack_entry = msgspec.msgpack.Decoder(Entry)
_unpack_heartbeat = msgspec.msgpack.Decoder(Heartbeat)
_unpack_assignment = msgspec.msgpack.Decoder(Assignment)


def pack(record: Record) -> bytes:
    """The wire form of any record."""
    return _packer.encode(record)


def unpack_record(data: bytes) -> AnyInboxRecord:
    """A fact or decision from its wire form. Raises MalformedRecord, as all of these do."""
    return decode(_unpack_record.decode, data, "a record")


def unpack_entry(data: bytes) -> Entry:
    """A journal entry from its wire form, as the `journal` stream holds it."""
    return decode(_unpack_entry.decode, _translate_deprecated(data, _RENAMED_IN_MSGPACK), "a journal entry")


def unpack_order(data: bytes) -> AnyOrder:
    """An order from its wire form."""
    return decode(_unpack_order.decode, _translate_deprecated(data, _RENAMED_IN_MSGPACK), "an order")


def unpack_heartbeat(data: bytes) -> Heartbeat:
    """A beat from its wire form."""
    return decode(_unpack_heartbeat.decode, data, "a heartbeat")


def unpack_assignment(data: bytes) -> Assignment:
    """An assignment from its wire form."""
    return decode(_unpack_assignment.decode, data, "an assignment")


def entry_to_json(entry: Entry) -> bytes:
    """One line of `events.jsonl`, without the newline: flat, so that `jq .event` works."""
    # Microseconds: the store's clock has no more digits, and a float may show others.
    flat: dict[str, Any] = {"n": entry.n, "t": round(entry.t, 6)}
    flat |= msgspec.to_builtins(entry.record, str_keys=True)
    return msgspec.json.encode(flat)


def entry_from_json(line: bytes) -> Entry:
    """The entry of one line of `events.jsonl`. Raises MalformedRecord on a torn line."""
    line = _translate_deprecated(line, _RENAMED_IN_JSON)
    # Both decoders read the whole line: each passes the other's keys as unknown ones.
    head = decode(_head_from_json.decode, line, "a line of the journal")
    return Entry(n=head.n, t=head.t, record=decode(_record_from_json.decode, line, "a line of the journal"))


def entries_from_json(lines: bytes) -> list[Entry]:
    """The entries of whole lines of `events.jsonl`. A line torn by a crash is no entry, nor is an event of a newer
    version that this one cannot know."""
    lines = _translate_deprecated(lines, _RENAMED_IN_JSON)
    try:  # all at once takes a third of the time
        heads = decode(_head_from_json.decode_lines, lines, "a part of the journal")
        found = decode(_record_from_json.decode_lines, lines, "a part of the journal")
    except MalformedRecord:
        entries = []
        for line in lines.split(b"\n"):
            with contextlib.suppress(MalformedRecord):
                entries.append(entry_from_json(line))
        return entries
    return [Entry(n=head.n, t=head.t, record=record) for head, record in zip(heads, found, strict=True)]
