"""One pass over a job's journal that feeds every reader of it. No I/O, no clock.

    fold = JobFold(plan, [reader, …])
    for item in journal.catch_up():
        fold.take(item)
    fold.view

The view takes each entry first. Each subscriber then gets the entry and the view, so it keeps only what the view
lacks. A new reader of the journal is one more `Subscriber`.

The view goes by the records alone and decides nothing. So it also shows a journal without its plan, and one that a
controller of another version wrote. What the core knew at a failure is another need: see `failure_replay`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from msgspec.structs import replace

from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report import recovery, words
from nvrx_slurm.report.model import (
    CycleView,
    Decided,
    FailureKind,
    FailureView,
    InProcess,
    JobView,
    NodeState,
    NodeView,
    ReceivedHeartbeat,
    ReplicaView,
    StacksView,
)
from nvrx_slurm.report.sentences import describe

ENDED = ("done", "failed", "stopped")
# Kinds of which the last one is shown as the last decision, with the verdicts that decided.
SHOWN_DECISIONS = (
    records.Shutdown,
    records.Quarantined,
    records.RestartDecided,
    records.RestartOrdered,
    records.NodeDrained,
    records.NodeUndrained,
)


class Subscriber(Protocol):
    """A reader of the journal."""

    def take(self, entry: Entry, view: JobView) -> None:
        """One entry, each once and in order. The view has taken it already, and changes after this call."""


class JobFold:
    """A job's view, and the subscribers that read the journal with it."""

    def __init__(self, plan: Plan | None = None, subscribers: Iterable[Subscriber] = ()) -> None:
        self.view = new_view(plan)
        self._subscribers = tuple(subscribers)

    def take(self, item: Entry | ReceivedHeartbeat) -> None:
        """One item of a `Journal`. An entry that was taken before (by its number) changes nothing."""
        view = self.view
        if isinstance(item, ReceivedHeartbeat):
            with_heartbeat(view, item)
        elif item.n > view.n:
            fold(view, item)
            for subscriber in self._subscribers:
                subscriber.take(item, view)


def new_view(plan: Plan | None = None) -> JobView:
    """A job of which nothing has happened yet. With its plan, the view also has the nodes that the first rendezvous
    waits for."""
    return JobView(plan=plan, name=plan.name if plan else "")


def fold(view: JobView, entry: Entry) -> JobView:
    """The view after `entry`. One that was folded in before (by its number) changes nothing."""
    if entry.n <= view.n:
        return view
    if _can_show(view, entry):
        # Reports first: every node sends some in every cycle, so nearly all entries are reports.
        for take in (_take_report, _take_node, _take_replica, _take_request, _take_job):
            if take(view, entry):
                break
        if isinstance(entry.record, SHOWN_DECISIONS):
            view.last_decision = Decided(at=entry.t, what=describe(entry.record))
    view.n, view.t = entry.n, entry.t
    return view


def _can_show(view: JobView, entry: Entry) -> bool:
    """Whether the cycle that the entry is about is known.

    Where the line that opened it is lost, the journal is damaged, or its first part is gone. The line that closes
    the rendezvous has all that is needed to go on; until then no entry about the cycle can be shown.
    """
    record = entry.record
    key = (getattr(record, "replica", None), view.generation, getattr(record, "cycle", None))
    if None in key or key in view.cycles:
        return True
    if isinstance(record, records.RendezvousClosed):
        _open_rendezvous(view, records.RendezvousOpened(replica=record.replica, cycle=record.cycle), entry.t)
        return True
    return isinstance(record, records.RendezvousOpened)


def with_heartbeat(view: JobView, heard: ReceivedHeartbeat) -> JobView:
    """The view with a heartbeat. One of an older agent changes nothing; one of an older cycle changes no step."""
    beat = heard.heartbeat
    node = view.nodes.get(beat.node)
    if node is None or node.incarnation not in ("", beat.incarnation) or beat.generation != view.generation:
        return view
    before = view.heard.get(beat.node)
    same = before and (before.heartbeat.incarnation, before.heartbeat.replica, before.heartbeat.cycle)
    if before is not None and same == (beat.incarnation, beat.replica, beat.cycle):
        view.heard_before[beat.node] = before  # lag goes by two heartbeats of one cycle
    else:
        view.heard_before.pop(beat.node, None)
    view.heard[beat.node] = heard
    if beat.steps and view.is_current(node, beat):
        report_step(view, node.name, max(beat.steps.values()))
    return view


def _take_report(view: JobView, entry: Entry) -> bool:
    """What nodes report of their workers."""
    t, record = entry.t, entry.record
    match record:
        case records.WorkersStarted():
            known = view.nodes.get(record.node)
            if known is None or known.ranks != tuple(record.pids):  # else they are those that the close has given
                change_node(view, record.node, ranks=tuple(sorted(record.pids)))
            started = view.cycles.get((record.replica, view.generation, record.cycle))
            if started is not None and (record.warm or record.cold):
                warm, cold = started.warm + record.warm, started.cold or record.cold
                change_cycle(view, record.replica, record.cycle, warm=warm, cold=cold)
            current = view.replicas[record.replica]
            # A late report of an older cycle does not make the replica run.
            if current.phase == "starting" and current.cycle == record.cycle:
                waiting = view.waiting[record.replica]
                waiting.discard(record.node)
                if not waiting:
                    change_replica(view, current.id, phase="running", since=t)
                    change_cycle(view, current.id, current.cycle, started_at=t)
        case records.Progress():
            report_step(view, record.node, record.step)
            key = (record.replica, view.generation, record.cycle)
            stepping = view.cycles.get(key)
            # The first rank of the first node: `first_step_reached` reports the last node's, and comes later.
            if stepping is not None and stepping.first_step_at is None:
                view.cycles[key] = replace(stepping, first_step_at=t, first_step=record.step)
                if key in view.recoveries:
                    view.recoveries[key] = recovery.with_first_step(view.recoveries[key], t, record.step)
        case records.NodeReady():
            report_step(view, record.node, record.step)
            arrive(view, record.node, t)
            if record.peers_lost:
                lose_peers(view, record.replica, record.cycle - 1, record.peers_lost)
        case records.Prewarmed() | records.PrewarmFailed():
            why_cold = record.why if isinstance(record, records.PrewarmFailed) else None
            node = view.nodes.get(record.node) or NodeView(name=record.node)
            change_node(view, record.node, prewarm={**node.prewarm, record.role: why_cold})
        case records.RestartedInProcess(restart=restart):
            view.restarts_in_process += record.times
            cycle = view.cycles.get((record.replica, view.generation, record.cycle))
            if cycle is not None:
                total = cycle.restarts_in_process + record.times
                change_cycle(view, record.replica, record.cycle, restarts_in_process=total)
            view.last_in_process = InProcess(
                at=t,
                cause=restart.cause,
                node=record.node,
                replica=record.replica,
                cycle=record.cycle,
                iteration=restart.iteration,
                total_s=restart.total_s,
            )
        case records.WorkerFailed():
            report_step(view, record.node, record.step)
            kind: FailureKind = "worker_exit" if record.signal is None else "worker_signal"
            if record.error is not None:
                kind = "worker_error"
            place = {"replica": record.replica, "cycle": record.cycle, "rank": record.rank}
            place["peer_lost"] = record.peer_lost
            note_failure(view, record.node, kind, words.worker_end(record), t - record.ago_s, record.step, **place)
            if record.peer_lost:
                lose_peers(view, record.replica, record.cycle, [record.rank])
        case records.WorkerHung():
            report_step(view, record.node, record.step)
            place = {"replica": record.replica, "cycle": record.cycle, "rank": record.rank, "stacks": record.stacks}
            why = words.worker_hang(record)
            note_failure(view, record.node, "worker_hung", why, t - record.ago_s, record.step, **place)
            if record.stacks is not None:
                files = {record.rank: record.stacks}
                view.last_stacks = StacksView(at=t, why=record.why, node=record.node, files=files)
        case records.WorkersDone():
            report_step(view, record.node, record.step)
            change_node(view, record.node, done=True)
        case records.StacksDumped() if record.files:
            view.last_stacks = StacksView(at=t, why=record.why, node=record.node, files=record.files)
        case _:
            return False
    return True


def _take_node(view: JobView, entry: Entry) -> bool:
    """Nodes: they join, leave, are lost, fenced and quarantined."""
    t, record = entry.t, entry.record
    match record:
        case records.NodeJoined():
            before = view.nodes.get(record.node)
            if before is not None and before.state == "active":
                works_for = view.replicas.get(before.replica or "")
                # No other record says that the workers of the agent before are gone.
                if works_for is not None and works_for.phase not in ENDED:
                    note_failure(view, record.node, "node_lost", f"{record.node} lost: its agent was replaced", t)
            # All that is known of the node's agent before goes: the new one has no ranks, and no warm process yet.
            view.nodes[record.node] = NodeView(name=record.node, since=t, incarnation=record.incarnation)
            arrive(view, record.node, t)
        case records.NodeIsolated():
            note_failure(view, record.node, "node_isolated", words.isolation(record), t)
        case records.NodeLeft():
            report_step(view, record.node, record.step)
            # Before `depart`, which takes the ranks from the node.
            note_failure(view, record.node, "node_left", f"{record.node} left: {record.reason}", t)
            depart(view, record.node, "left", record.reason, t)
        case records.NodeLost():
            report_step(view, record.node, record.step)
            kind: FailureKind = "node_silent" if record.cause == "heartbeat_timeout" else "node_lost"
            loss = f"{record.node} lost: {record.why}"
            note_failure(view, record.node, kind, loss, t - record.ago_s, record.step)
            had_ranks = record.node in view.nodes and view.nodes[record.node].state == "active"
            depart(view, record.node, "lost", record.why, t)
            # The ranks of a spare, which has none, need not wait for proof of its death.
            if had_ranks and record.safe_after_s > 0.0:
                change_node(view, record.node, held_until=t + record.safe_after_s)
        case records.NodeFenced():
            fenced = view.nodes.get(record.node)
            # The proof is about one agent: a newer one of the node may have been lost since.
            if fenced is not None and fenced.incarnation == record.incarnation:
                change_node(view, record.node, held_until=None)
        case records.SlurmNodeState():
            lost = view.nodes.get(record.node)
            if lost is not None and lost.state == "lost":
                change_node(view, record.node, slurm_says=words.slurm_state(record))
        case records.StoreDataLost():
            for name in [node.name for node in view.nodes.values() if node.state not in ("joining", "lost", "left")]:
                depart(view, name, "lost", "the store lost its data", t)
        case records.Fence():
            late = view.nodes.get(record.node)
            # A lost node is fenced too: what it was lost for says more.
            if late and late.state not in ("lost", "left") and late.incarnation == record.incarnation:
                depart(view, late.name, "lost", "fenced: too late for its rendezvous", t)
                if view.plan is not None:  # it may still be killing its workers
                    change_node(view, late.name, held_until=t + view.plan.fault_tolerance.gives_away_after_s)
        case records.Quarantined():
            depart(view, record.node, "quarantined", record.reason, t)
        case _:
            return False
    return True


def _take_replica(view: JobView, entry: Entry) -> bool:
    """Replicas: their rendezvous, and what was decided about their failures."""
    t, record = entry.t, entry.record
    match record:
        case records.RendezvousOpened():
            _open_rendezvous(view, record, t)
        case records.RendezvousClosed():
            _close_rendezvous(view, record, t)
        case records.RestartDecided():
            # The cause may have been reported after one of its consequences.
            last = view.last_failure if view.last_failure and view.last_failure.node == record.node else None
            noticed = view.reported.get((record.node, record.rank), last)
            noticed = noticed or FailureView(at=t, why=record.cause, node=record.node)
            others = view.peers_lost.get((record.replica, record.cycle), set()) - {record.rank}
            failure = view.last_failure = replace(
                noticed,
                replica=record.replica,
                cycle=record.cycle,
                rank=record.rank,
                step=noticed.step if record.step is None else record.step,
                peers_lost=tuple(sorted(others)),
            )
            # An outage that began with a consequence gets the words of the cause, and keeps its own moment: from then
            # on the replica has stood still.
            for name, noted in view.outages.items():
                if noted.peer_lost and (name == record.replica or record.action == "restart_job"):
                    view.outages[name] = replace(failure, at=noted.at)
                    change_cycle(view, name, view.replicas[name].cycle - 1, outcome=failure.why)
            if record.action in ("restart_replica", "restart_job"):
                view.restarts += 1
                # Only a failed worker spends the budget. The record does not name the kind of the failure, and not
                # every failure has a report: but one that spends leaves one restart less than there were.
                left = view.restarts_left(t, record.replica)
                if left is not None and record.restarts_left < left:
                    view.restarted_at.setdefault(record.replica, []).append(t)
            view.recorded_left = record.restarts_left
        case records.AttributionJudged():
            judged = Decided(at=t, what=describe(record))
            if record.acted:
                view.last_decision = judged
            elif record.verdict is not Verdict.TIMEOUT or view.shutdown is None:
                view.last_verdict = judged  # of a job that ends no answer is waited for: that says nothing
        case records.Recovered():
            key = (record.replica, view.generation, record.cycle)
            outage = view.outages.pop(record.replica, None)
            # The replica's own step is of the new cycle by now. Where the cycles of a crash loop have made no step,
            # those of the cycle before them are made again.
            earlier = (view.cycles.get((*key[:2], number)) for number in range(record.cycle - 1, -1, -1))
            reached = next((each.last_step for each in earlier if each and each.last_step is not None), None)
            view.recoveries[key] = recovery.complete(record, t, outage, view.cycles[key], reached)
        case records.FirstStepReached():
            key = (record.replica, view.generation, record.cycle)
            if key in view.recoveries:
                view.recoveries[key] = recovery.with_all_stepped(view.recoveries[key], record)
        case records.ReplicaEnded():
            view.waiting[record.replica] = set()
            change_replica(view, record.replica, phase=record.outcome, since=t)
            change_cycle(view, record.replica, record.cycle, ended_at=t, outcome=record.outcome)
        case _:
            return False
    return True


def _take_request(view: JobView, entry: Entry) -> bool:
    """What users have asked for."""
    t, record = entry.t, entry.record
    match record:
        case records.RestartOrdered():
            view.asked[record.replica] = FailureView(
                at=t,
                why=record.why or f"{record.by} asked for a restart{words.to_move(record)}",
                node=record.node or "",
                replica=record.replica,
                cycle=record.cycle,
                step=view.replicas[record.replica].step,
                kind="user",
            )
            view.restarts_asked += bool(record.request)
        case records.NodeDrained():
            view.drained[record.node] = record.by
            drained = view.nodes.setdefault(record.node, NodeView(name=record.node))
            if drained.state in ("ready", "standby"):
                arrive(view, drained.name, t)
            elif drained.state == "joining":
                for replica in view.replicas.values():
                    stop_waiting(view, replica.id, drained.name)
        case records.NodeUndrained():
            if view.drained.pop(record.node, None) is not None and view.nodes[record.node].state == "drained":
                arrive(view, record.node, t)
        case _:
            return False
    return True


def _take_job(view: JobView, entry: Entry) -> bool:
    """The job as a whole: its generations, its controllers, its end."""
    t, record = entry.t, entry.record
    match record:
        case records.JobStarted(expected=expected):
            # A generation that left no end ended with its last entry, which stands before that of the controller that
            # begins this one.
            number, led_at = view.led_from
            end_cycles(view, led_at if number == entry.n - 1 else view.t, None)
            view.job, view.name, view.generation = record.job, record.name, record.generation
            # A requeued job goes on with the same journal: its start is that of the first generation.
            view.started_at = t if view.started_at is None else view.started_at
            # The generation before has ended; the job has not.
            view.shutdown = view.unused_spares = view.exit_code = view.ended_at = None
            view.nodes = {name: NodeView(name=name, since=t) for name in expected}
            view.replicas, view.waiting, view.outages, view.heard, view.missing = {}, {}, {}, {}, ()
            view.heard_before = {}
            view.reported, view.peers_lost, view.asked, view.drained = {}, {}, {}, {}
            # Each replica's share of the allocation, in its order: the nodes that the first rendezvous prefers.
            view.preferred, first = {}, 0
            for name, role in view.plan.replica_roles.items() if view.plan else ():
                view.preferred[name] = expected[first : first + role.nodes_per_replica]
                first += role.nodes_per_replica
        case records.JobResumed():
            # A rate counts the time in which the job may fail, as the core does.
            view.restarted_at = {
                replica: [at + record.stood_still_s for at in times] for replica, times in view.restarted_at.items()
            }
        case records.ControllerStarted():
            view.led_from = entry.n, view.t
        case records.Shutdown():
            if view.shutdown is None:
                # Before any of them leaves: a job that has ended shows how many it had not used.
                view.unused_spares = view.spares
            view.shutdown = record
            for replica in list(view.replicas.values()):
                if replica.phase not in ENDED:
                    present = {each for each in view.present if view.nodes[each].replica == replica.id}
                    view.waiting[replica.id] = present
                    change_replica(view, replica.id, phase="stopping", since=t)
        case records.JobEnded():
            view.exit_code, view.ended_at, view.missing = record.exit_code, t, record.missing
            end_cycles(view, t, record.reason)
            for replica in list(view.replicas.values()):
                if replica.phase not in ENDED:
                    change_replica(view, replica.id, phase="stopped", since=t)
        case _:
            return False
    return True


def _open_rendezvous(view: JobView, record: records.RendezvousOpened, t: float) -> None:
    name, cycle = record.replica, record.cycle
    known = view.replicas.get(name)
    called = known.nodes if known else view.preferred.get(name, tuple(view.nodes))
    # It waits for its nodes of the cycle before, but for those that are gone or work for another replica.
    waiting = view.waiting[name] = set()
    for node in (view.nodes[each] for each in called if each in view.nodes):
        is_gone = node.state in ("lost", "left", "quarantined", "drained")
        may_come = node.state in ("joining", "standby") and node.name not in view.drained
        if may_come or (node.replica == name and not is_gone):
            waiting.add(node.name)
    view.replicas[name] = ReplicaView(
        id=name,
        role=name.rpartition("-")[0],
        phase="stopping" if cycle and waiting else "joining",
        cycle=cycle,
        nodes=called,
        step=known.step if known else None,
        since=t,
    )
    opened = CycleView(replica=name, generation=view.generation, cycle=cycle, opened_at=t)
    view.cycles[name, view.generation, cycle] = opened
    # What a user asked for is not the fault of the last failure.
    why = view.asked.pop(name, view.last_failure)
    if cycle and why:
        change_cycle(view, name, cycle - 1, ended_at=t, outcome=why.why)
        view.outages.setdefault(name, why)


def _close_rendezvous(view: JobView, record: records.RendezvousClosed, t: float) -> None:
    name, nodes, world = record.replica, record.nodes, record.world_size
    replica = view.replicas[name]
    view.reported = {key: each for key, each in view.reported.items() if each.replica not in (name, None)}
    view.peers_lost.pop((name, record.cycle - 1), None)
    for lost in view.unproven(name):  # it closes only once none of its lost nodes has workers any more
        change_node(view, lost, held_until=None)
    for left_out in set(replica.nodes).difference(nodes):
        if left_out in view.nodes and view.nodes[left_out].state == "ready":
            change_node(view, left_out, state="standby", since=t, replica=None, role=None)
    promoted = record.promoted if record.cycle else ()  # cycle 0 promotes no spare
    workers = world // max(1, len(nodes))  # each node of a rendezvous has as many
    for index, node in enumerate(nodes):
        change_node(
            view,
            node,
            state="active",
            since=t,
            replica=name,
            role=replica.role,
            group_rank=index,
            ranks=tuple(range(index * workers, (index + 1) * workers)),
            step=None,
            promoted=node in promoted,
            done=False,
        )
    view.waiting[name] = set(nodes)
    # Before the replica's step is reset: by now all nodes have said how far the cycle before had come.
    change_cycle(view, name, record.cycle - 1, last_step=replica.step)
    change_replica(view, name, phase="starting", nodes=nodes, world_size=world, step=None, since=t)
    change_cycle(view, name, record.cycle, closed_at=t, nodes=nodes, promoted=promoted, world_size=world)


# ------------------------------------------------------------------------------------ what they share


def change_node(view: JobView, name: str, **changes: Any) -> None:
    """Change fields of a node; an unknown node is added first."""
    view.nodes[name] = replace(view.nodes.get(name) or NodeView(name=name), **changes)


def change_replica(view: JobView, replica: str, **changes: Any) -> None:
    """Change fields of a replica that has opened a rendezvous."""
    view.replicas[replica] = replace(view.replicas[replica], **changes)


def change_cycle(view: JobView, replica: str, cycle: int, **changes: Any) -> None:
    """Change fields of one cycle of the running generation, if it was seen to open."""
    key = (replica, view.generation, cycle)
    if key in view.cycles:
        view.cycles[key] = replace(view.cycles[key], **changes)


def end_cycles(view: JobView, at: float, outcome: str | None) -> None:
    """The running generation ends, and with it its open cycles. The last cycles keep the steps of their replicas."""
    for key, cycle in view.cycles.items():
        if cycle.generation == view.generation:
            changes: dict[str, Any] = {"last_step": view.last_step(cycle)}
            if cycle.ended_at is None:
                changes |= {"ended_at": at, "outcome": outcome}
            view.cycles[key] = replace(cycle, **changes)


def report_step(view: JobView, name: str, step: int | None) -> None:
    """A rank of the node reported a step; None: the record names none."""
    if step is None:
        return
    node = view.nodes[name] = replace(view.nodes.get(name) or NodeView(name=name), step=step)
    replica = view.replicas.get(node.replica or "")
    if replica is not None and (replica.step is None or step > replica.step):
        change_replica(view, replica.id, step=step)


def note_failure(
    view: JobView, name: str, kind: FailureKind, why: str, at: float, step: int | None = None, **place: Any
) -> None:
    """The node, or a worker in `place`, failed. While the job ends this is no failure."""
    if view.shutdown is not None:
        return
    node = view.nodes.get(name)
    if not place and node and (replica := view.replicas.get(node.replica or "")):
        place = {"replica": replica.id, "cycle": replica.cycle}
    known = node.step if step is None and node else step
    view.last_failure = FailureView(at=at, why=why, node=name, step=known, kind=kind, **place)
    view.reported[name, place.get("rank")] = view.last_failure


def lose_peers(view: JobView, replica: str, cycle: int, ranks: Iterable[int]) -> None:
    """Ranks of the cycle lost the connection to a peer: they follow the failure of that cycle, if it is settled."""
    lost = view.peers_lost.setdefault((replica, cycle), set())
    lost.update(ranks)
    failure = view.last_failure
    if failure is not None and (failure.replica, failure.cycle) == (replica, cycle):
        others = tuple(sorted(rank for rank in lost if rank != failure.rank))
        view.last_failure = replace(failure, peers_lost=others)


def arrive(view: JobView, name: str, t: float) -> None:
    """A node without old workers has arrived: for the open rendezvous that waits for it, else as a hot spare."""
    for replica in view.replicas.values():
        if name in view.drained:
            stop_waiting(view, replica.id, name)
        elif replica.phase in ("joining", "stopping") and name in view.waiting[replica.id]:
            place = {"replica": replica.id, "role": replica.role}
            change_node(view, name, state="ready", since=t, ranks=(), done=False, **place)
            stop_waiting(view, replica.id, name)
            return
    state: NodeState = "drained" if name in view.drained else "standby"
    why = f"drained by {view.drained[name]}" if name in view.drained else None
    free: dict[str, Any] = {"replica": None, "role": None, "group_rank": None, "ranks": (), "step": None}
    free |= {"promoted": False, "done": False}
    change_node(view, name, state=state, since=t, why=why, **free)


def depart(view: JobView, name: str, state: NodeState, why: str, t: float) -> None:
    """A node is gone. It keeps the name of the replica that it worked for, and no replica waits for it any more."""
    gone = {"done": False, "group_rank": None, "ranks": (), "promoted": False, "held_until": None}
    change_node(view, name, state=state, since=t, why=why, **gone)
    for replica in view.replicas.values():
        stop_waiting(view, replica.id, name)


def stop_waiting(view: JobView, replica: str, name: str) -> None:
    """The replica waits for one node less; once no old worker is left, its rendezvous only lacks nodes."""
    waiting = view.waiting[replica]
    waiting.discard(name)
    if not waiting and view.replicas[replica].phase == "stopping" and view.shutdown is None:
        change_replica(view, replica, phase="joining")
