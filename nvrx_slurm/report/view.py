"""The fold: a job's view after one more entry of its journal. No I/O, no clock.

    view = new_view(plan)
    for entry in entries:
        view = fold(view, entry)

It reads the journal only, and decides nothing: where the core's rules can be seen in the records, it goes by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report import recovery, words
from nvrx_slurm.report.model import (
    CycleView,
    Decided,
    FailureView,
    Heard,
    InProcess,
    JobView,
    NodeState,
    NodeView,
    ReplicaView,
    StacksView,
)
from nvrx_slurm.report.ranks import is_current
from nvrx_slurm.report.sentences import describe
from nvrx_slurm.util.ids import replica_id

OPEN = ("joining", "stopping")
"""The phases of a replica whose rendezvous is open."""


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


def report_step(view: JobView, name: str, step: int) -> None:
    """A rank of the node reported a step."""
    change_node(view, name, step=step)
    replica = view.replicas.get(view.nodes[name].replica or "")
    if replica is not None and (replica.step is None or step > replica.step):
        change_replica(view, replica.id, step=step)


def arrive(view: JobView, name: str, t: float) -> None:
    """A node without old workers has arrived: for the open rendezvous that waits for it, else as a hot spare."""
    for replica in view.replicas.values():
        if replica.phase in OPEN and name in view.waiting[replica.id]:
            place = {"replica": replica.id, "role": replica.role, "ranks": (), "done": False}
            change_node(view, name, state="ready", since=t, **place)
            stop_waiting(view, replica.id, name)
            return
    free = {"replica": None, "role": None, "group_rank": None, "ranks": (), "promoted": False, "done": False}
    change_node(view, name, state="standby", since=t, **free)


def depart(view: JobView, name: str, state: NodeState, why: str, t: float) -> None:
    """A node is gone. It keeps the name of the replica that it worked for, and no replica waits for it any more."""
    gone = {"done": False, "group_rank": None, "ranks": (), "promoted": False, "held_until": None}
    change_node(view, name, state=state, since=t, why=why, **gone)
    for replica in view.replicas.values():
        stop_waiting(view, replica.id, name)


def hold_ranks(view: JobView, name: str, until: float) -> None:
    """The ranks of the lost node wait until then, unless its death is proven before."""
    change_node(view, name, held_until=until)


def release_ranks(view: JobView, replica: str) -> None:
    """The replica's rendezvous has closed: none of its lost nodes has workers any more."""
    for name in view.unproven(replica):
        change_node(view, name, held_until=None)


def stop_waiting(view: JobView, replica: str, name: str) -> None:
    """The replica waits for one node less; once no old worker is left, its rendezvous only lacks nodes."""
    waiting = view.waiting[replica]
    waiting.discard(name)
    if not waiting and view.replicas[replica].phase == "stopping" and view.shutdown is None:
        change_replica(view, replica, phase="joining")


def may_come(view: JobView, name: str, replica: str) -> bool:
    """Whether an opening rendezvous of the replica still has to wait for this node of its cycle before."""
    node = view.nodes.get(name)
    if node is None or node.state in ("lost", "left", "quarantined"):
        return False
    return node.state in ("joining", "standby") or node.replica == replica


def _job_started(view: JobView, fact: records.JobStarted, t: float) -> None:
    view.job, view.name, view.generation = fact.job, fact.name, fact.generation
    view.started_at = t if view.started_at is None else view.started_at
    view.shutdown = view.unused_spares = view.exit_code = view.ended_at = None
    view.nodes = {name: NodeView(name=name, since=t) for name in fact.expected}
    view.replicas, view.waiting, view.outages, view.heard, view.missing = {}, {}, {}, {}, ()
    # Each replica's share of the allocation, in its order: the nodes that the first rendezvous prefers.
    plan, expected = view.plan, fact.expected
    calls: dict[str, tuple[str, ...]] = {}
    first = 0
    for role in plan.roles if plan else ():
        for index in range(role.replicas):
            calls[replica_id(role.name, index)] = expected[first : first + role.nodes_per_replica]
            first += role.nodes_per_replica
    view.preferred = calls


def _controller_started(view: JobView, fact: records.ControllerStarted, t: float) -> None:
    view.controllers += 1


def _node_joined(view: JobView, fact: records.NodeJoined, t: float) -> None:
    view.nodes[fact.node] = NodeView(name=fact.node, since=t, incarnation=fact.incarnation)
    arrive(view, fact.node, t)


def _node_ready(view: JobView, fact: records.NodeReady, t: float) -> None:
    arrive(view, fact.node, t)


def _workers_started(view: JobView, fact: records.WorkersStarted, t: float) -> None:
    change_node(view, fact.node, ranks=tuple(sorted(fact.pids)))
    current, waiting = view.replicas[fact.replica], view.waiting[fact.replica]
    if current.phase != "starting" or current.cycle != fact.cycle:
        return
    waiting.discard(fact.node)
    if not waiting:
        change_replica(view, current.id, phase="running", since=t)
        change_cycle(view, current.id, current.cycle, started_at=t)


def _progress(view: JobView, fact: records.Progress, t: float) -> None:
    report_step(view, fact.node, fact.step)
    key = (fact.replica, view.generation, fact.cycle)
    cycle = view.cycles.get(key)
    if cycle is None or cycle.first_step_at is not None:
        return
    view.cycles[key] = replace(cycle, first_step_at=t, first_step=fact.step)
    if key in view.recoveries:
        view.recoveries[key] = recovery.with_first_step(view.recoveries[key], t, fact.step)


def _restarted_in_process(view: JobView, fact: records.RestartedInProcess, t: float) -> None:
    view.restarts_in_process += fact.times
    cycle = view.cycles.get((fact.replica, view.generation, fact.cycle))
    if cycle is not None:
        change_cycle(view, fact.replica, fact.cycle, restarts_in_process=cycle.restarts_in_process + fact.times)
    view.last_in_process = InProcess(
        at=t,
        cause=fact.restart.cause,
        node=fact.node,
        replica=fact.replica,
        cycle=fact.cycle,
        iteration=fact.restart.iteration,
        total_s=fact.restart.total_s,
    )


def _worker_failed(view: JobView, fact: records.WorkerFailed, t: float) -> None:
    _fail_worker(view, fact, words.worker_end(fact), t)


def _worker_hung(view: JobView, fact: records.WorkerHung, t: float) -> None:
    _fail_worker(view, fact, words.worker_hang(fact), t, stacks=fact.stacks)
    if fact.stacks is not None:
        view.last_stacks = StacksView(at=t, why=fact.why, node=fact.node, files={fact.rank: fact.stacks})


def _fail_worker(
    view: JobView, fact: records.WorkerFailed | records.WorkerHung, why: str, t: float, stacks: str | None = None
) -> None:
    if fact.step is not None:
        report_step(view, fact.node, fact.step)
    if view.shutdown is not None:  # the job was ending already
        return
    view.last_failure = FailureView(
        at=t - fact.ago_s,
        why=why,
        node=fact.node,
        replica=fact.replica,
        cycle=fact.cycle,
        rank=fact.rank,
        step=_step_of(view, fact.node, fact.step),
        stacks=stacks,
    )


def _node_isolated(view: JobView, fact: records.NodeIsolated, t: float) -> None:
    if view.shutdown is None:
        view.last_failure = _node_failure(view, fact.node, words.isolation(fact), t, None)


def _stacks_dumped(view: JobView, fact: records.StacksDumped, t: float) -> None:
    if fact.files:
        view.last_stacks = StacksView(at=t, why=fact.why, node=fact.node, files=fact.files)


def _workers_done(view: JobView, fact: records.WorkersDone, t: float) -> None:
    if fact.step is not None:
        report_step(view, fact.node, fact.step)
    change_node(view, fact.node, done=True)


def _node_left(view: JobView, fact: records.NodeLeft, t: float) -> None:
    if view.shutdown is None:
        view.last_failure = _node_failure(view, fact.node, f"{fact.node} left: {fact.reason}", t, None)
    depart(view, fact.node, "left", fact.reason, t)


def _node_lost(view: JobView, fact: records.NodeLost, t: float) -> None:
    if fact.step is not None:
        report_step(view, fact.node, fact.step)
    if view.shutdown is None:
        why = words.node_loss(fact)
        view.last_failure = _node_failure(view, fact.node, why, t - fact.ago_s, fact.step)
    had_ranks = fact.node in view.nodes and view.nodes[fact.node].state == "active"
    depart(view, fact.node, "lost", fact.why, t)
    if had_ranks and fact.safe_after_s > 0.0:
        hold_ranks(view, fact.node, t + fact.safe_after_s)


def _node_fenced(view: JobView, fact: records.NodeFenced, t: float) -> None:
    node = view.nodes.get(fact.node)
    if node is not None and node.incarnation == fact.incarnation:
        change_node(view, fact.node, held_until=None)


def _slurm_node_state(view: JobView, fact: records.SlurmNodeState, t: float) -> None:
    node = view.nodes.get(fact.node)
    if node is not None and node.state == "lost":
        change_node(view, fact.node, slurm_says=words.slurm_state(fact))


def _recorded(view: JobView, fact: records.AnyFact, t: float) -> None:
    """It changes nothing that a view shows; the decisions that follow from it may."""


def _node_failure(view: JobView, name: str, why: str, at: float, step: int | None) -> FailureView:
    node = view.nodes.get(name)
    replica = view.replicas.get(node.replica or "") if node else None
    return FailureView(
        at=at,
        why=why,
        node=name,
        replica=replica.id if replica else None,
        cycle=replica.cycle if replica else None,
        step=_step_of(view, name, step),
    )


def _step_of(view: JobView, name: str, told: int | None) -> int | None:
    node = view.nodes.get(name)
    return node.step if told is None and node else told


_FACTS: dict[type[Any], Callable[[JobView, Any, float], None]] = {
    records.JobStarted: _job_started,
    records.ControllerStarted: _controller_started,
    records.NodeJoined: _node_joined,
    records.NodeReady: _node_ready,
    records.WorkersStarted: _workers_started,
    records.Progress: _progress,
    records.RestartedInProcess: _restarted_in_process,
    records.WorkerFailed: _worker_failed,
    records.WorkerHung: _worker_hung,
    records.WorkersDone: _workers_done,
    records.NodeIsolated: _node_isolated,
    records.Learned: _recorded,
    records.StacksDumped: _stacks_dumped,
    records.NodeLeft: _node_left,
    records.NodeLost: _node_lost,
    records.NodeFenced: _node_fenced,
    records.SlurmNodeState: _slurm_node_state,
    records.DumpAsked: _recorded,
    records.Signalled: _recorded,
    records.Attributed: _recorded,
    records.RecordsRefused: _recorded,
    records.Tick: _recorded,
}
"""Kind of fact → what changes, given the view, the fact, and the time of its entry."""


RESTARTS = ("restart_replica", "restart_job")
ENDED = ("done", "failed", "stopped")


def _round_opened(view: JobView, decision: records.RoundOpened, t: float) -> None:
    replica, cycle = decision.replica, decision.cycle
    known = view.replicas.get(replica)
    called = known.nodes if known else view.preferred.get(replica, tuple(view.nodes))
    view.waiting[replica] = {name for name in called if may_come(view, name, replica)}
    view.replicas[replica] = ReplicaView(
        id=replica,
        role=replica.rpartition("-")[0],
        phase="stopping" if cycle and view.waiting[replica] else "joining",
        cycle=cycle,
        nodes=called,
        step=known.step if known else None,
        since=t,
    )
    opened = CycleView(replica=replica, generation=view.generation, cycle=cycle, opened_at=t)
    view.cycles[replica, view.generation, cycle] = opened
    if cycle and view.last_failure:
        change_cycle(view, replica, cycle - 1, ended_at=t, outcome=view.last_failure.why)
        view.outages.setdefault(replica, view.last_failure)


def _round_closed(view: JobView, decision: records.RoundClosed, t: float) -> None:
    replica, nodes = decision.replica, decision.nodes
    release_ranks(view, replica)
    promoted = decision.promoted if decision.cycle else ()  # cycle 0 promotes no spare
    for name in set(view.replicas[replica].nodes).difference(nodes):
        if name in view.nodes and view.nodes[name].state == "ready":
            change_node(view, name, state="standby", since=t, replica=None, role=None)
    for index, name in enumerate(nodes):
        # The node with its ranks: as many as each node of the rendezvous has.
        workers = decision.world_size // len(decision.nodes)
        view.nodes[name] = replace(
            view.nodes.get(name) or NodeView(name=name),
            state="active",
            since=t,
            replica=decision.replica,
            role=view.replicas[decision.replica].role,
            group_rank=index,
            ranks=tuple(range(index * workers, (index + 1) * workers)),
            step=None,
            done=False,
            promoted=bool(decision.cycle) and name in decision.promoted,
        )
    view.waiting[replica] = set(nodes)
    world = decision.world_size
    change_replica(view, replica, phase="starting", nodes=nodes, world_size=world, step=None, since=t)
    fields = {"nodes": nodes, "promoted": promoted, "world_size": world}
    change_cycle(view, replica, decision.cycle, closed_at=t, **fields)


def _restart_decided(view: JobView, decision: records.RestartDecided, t: float) -> None:
    noticed = view.last_failure if view.last_failure and view.last_failure.node == decision.node else None
    view.last_failure = FailureView(
        at=noticed.at if noticed else t,
        why=noticed.why if noticed else decision.cause,
        node=decision.node,
        replica=decision.replica,
        cycle=decision.cycle,
        rank=decision.rank,
        step=noticed.step if noticed and decision.step is None else decision.step,
        stacks=noticed.stacks if noticed else None,
    )
    view.restarts += decision.action in RESTARTS
    view.restarts_left = decision.restarts_left
    view.last_decision = Decided(at=t, what=describe(decision))


def _recovered(view: JobView, decision: records.Recovered, t: float) -> None:
    key = (decision.replica, view.generation, decision.cycle)
    outage = view.outages.pop(decision.replica, None)
    view.recoveries[key] = recovery.complete(decision, t, outage, view.cycles[key])


def _replica_ended(view: JobView, decision: records.ReplicaEnded, t: float) -> None:
    view.waiting[decision.replica] = set()
    change_replica(view, decision.replica, phase=decision.outcome, since=t)
    change_cycle(view, decision.replica, decision.cycle, ended_at=t, outcome=decision.outcome)


def _shutdown(view: JobView, decision: records.Shutdown, t: float) -> None:
    if view.shutdown is None:
        view.unused_spares = view.spares
    view.shutdown = decision
    view.last_decision = Decided(at=t, what=f"shutdown with {describe(decision)}")
    for replica in list(view.replicas.values()):
        if replica.phase not in ENDED:
            view.waiting[replica.id] = {name for name in view.present if view.nodes[name].replica == replica.id}
            change_replica(view, replica.id, phase="stopping", since=t)


def _job_ended(view: JobView, decision: records.JobEnded, t: float) -> None:
    view.exit_code, view.ended_at, view.missing = decision.exit_code, t, decision.missing
    for key, cycle in view.cycles.items():
        if cycle.generation == view.generation and cycle.ended_at is None:
            view.cycles[key] = replace(cycle, ended_at=t, outcome=decision.reason)
    for replica in list(view.replicas.values()):
        if replica.phase not in ENDED:
            change_replica(view, replica.id, phase="stopped", since=t)


def _fence(view: JobView, decision: records.Fence, t: float) -> None:
    node = view.nodes.get(decision.node)
    if node and node.state not in ("lost", "left") and node.incarnation == decision.incarnation:
        depart(view, node.name, "lost", "fenced: too late for its rendezvous", t)
        if view.plan is not None:  # it may still be killing its workers
            hold_ranks(view, node.name, t + view.plan.fault_tolerance.gives_away_after_s)


def _quarantined(view: JobView, decision: records.Quarantined, t: float) -> None:
    depart(view, decision.node, "quarantined", decision.reason, t)
    view.last_decision = Decided(at=t, what=f"quarantined {describe(decision)}")


def _attribution_asked(view: JobView, decision: records.AttributionAsked, t: float) -> None:
    """Nothing changes: the rendezvous has opened, or will."""


def _attribution_judged(view: JobView, decision: records.AttributionJudged, t: float) -> None:
    judged = Decided(at=t, what=describe(decision))
    if decision.acted:
        view.last_decision = replace(judged, what=f"attribution: {judged.what}")
    else:
        view.last_verdict = judged


def _dump_ordered(view: JobView, decision: records.DumpOrdered, t: float) -> None:
    """Nothing changes: workers go on while their stacks are written down."""


_DECISIONS: dict[type[Any], Callable[[JobView, Any, float], None]] = {
    records.RoundOpened: _round_opened,
    records.RoundClosed: _round_closed,
    records.AttributionAsked: _attribution_asked,
    records.AttributionJudged: _attribution_judged,
    records.RestartDecided: _restart_decided,
    records.Recovered: _recovered,
    records.ReplicaEnded: _replica_ended,
    records.Shutdown: _shutdown,
    records.JobEnded: _job_ended,
    records.Fence: _fence,
    records.Quarantined: _quarantined,
    records.DumpOrdered: _dump_ordered,
}
"""Kind of decision → what changes, given the view, the decision, and the time of its entry."""


__all__ = ["JobView", "fold", "new_view", "with_beat"]

_HANDLERS = {**_FACTS, **_DECISIONS}


def new_view(plan: Plan | None = None) -> JobView:
    """A job of which nothing has happened yet. With its plan, the view also has the nodes that the first rendezvous
    waits for."""
    if plan is None:
        return JobView()
    return JobView(plan=plan, name=plan.name, restarts_left=plan.fault_tolerance.max_restarts.count)


def fold(view: JobView, entry: Entry) -> JobView:
    """The view after `entry`. One that was folded in before (by its number) changes nothing."""
    if entry.n <= view.n:
        return view
    view.n, view.t = entry.n, entry.t
    _HANDLERS[type(entry.record)](view, entry.record, entry.t)
    return view


def with_beat(view: JobView, heard: Heard) -> JobView:
    """The view with a heartbeat. One of an older agent changes nothing; one of an older cycle changes no step."""
    beat = heard.beat
    node = view.nodes.get(beat.node)
    if node is None or node.incarnation not in ("", beat.incarnation) or beat.generation != view.generation:
        return view
    view.heard[beat.node] = heard
    if beat.steps and is_current(view, node, beat):
        report_step(view, node.name, max(beat.steps.values()))
    return view
