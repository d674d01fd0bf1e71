"""The dispatch: one handler for each kind of fact, in a table.

job = state.new_job(plan)
for entry in journal:                    # a fresh controller, or a replay
    if isinstance(entry.record, Fact):
        decisions = step(job, entry.record, entry.t)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import msgspec

from nvrx_slurm.core import limits, membership, rendezvous, requests, restart, restart_decision, suspension
from nvrx_slurm.core.state import ControlState, Failure, Node, NodeState, Phase, Replica
from nvrx_slurm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_RESTART,
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_TIMEOUT,
)
from nvrx_slurm.journal.records import (
    PREEMPTED,
    AgentsStarted,
    Attributed,
    CommandAsked,
    CommandEnded,
    ControllerStarted,
    Decision,
    DecisionsLate,
    DrainAsked,
    DumpAsked,
    DumpOrdered,
    Fact,
    Fence,
    FirstStepReached,
    FromAgent,
    JobEnded,
    JobResumed,
    JobStarted,
    Learned,
    NodeFenced,
    NodeIsolated,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    NodeResumed,
    Prewarmed,
    PrewarmFailed,
    Progress,
    Quarantined,
    RecordsRefused,
    Recovered,
    ReplicaEnded,
    RestartAsked,
    RestartedInProcess,
    RestartOrdered,
    Shutdown,
    Signalled,
    SignalReason,
    SlurmNodeState,
    StacksDumped,
    StoreDataLost,
    Suspending,
    Terminating,
    Tick,
    UndrainAsked,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.journal.verdicts import cannot_run, is_misconfigured
from nvrx_slurm.util.signals import signal_name

# How long beyond its teardown grace an agent may take to report that it has left.
ACKNOWLEDGE_S = 10.0

# How long after Slurm's SIGTERM to a node's processes the end of all workers waits for the reason of that signal.
TERMINATING_S = 5.0

SIGNALS: dict[SignalReason, Shutdown] = {
    "cancel": Shutdown(exit_code=EXIT_TERMINATED, reason="cancelled"),
    "interrupt": Shutdown(exit_code=EXIT_INTERRUPTED, reason="interrupted"),
    "time_limit": Shutdown(exit_code=EXIT_TIMEOUT, reason="out of time: the job's time limit is near"),
    "preempted": Shutdown(exit_code=EXIT_RETRY, reason=PREEMPTED),
    "agents_gone": Shutdown(exit_code=EXIT_RETRY, reason="every agent is gone"),
    "no_agents": Shutdown(
        exit_code=EXIT_NO_RESTART, reason="no agent can run in the job's container; the job's log says why"
    ),
    "hangup": Shutdown(exit_code=EXIT_TERMINATED, reason="its terminal was closed"),
    "lease_lapsed": Shutdown(
        exit_code=EXIT_TERMINATED, reason="whoever submitted this job is gone: its lease has lapsed"
    ),
}

_F = TypeVar("_F", bound=FromAgent)


def step(job: ControlState, fact: Fact, now: float) -> list[Decision] | None:
    """Take in one fact at time `now` (seconds, the store's clock; never smaller than before).

    Returns the decisions that follow, in the order in which they hold. None: the fact is stale (an older generation,
    cycle or agent, a repetition, or of a job that has ended) and must leave no trace.
    """
    if isinstance(fact, ControllerStarted):
        # No deadline is looked at yet: the facts that arrived while no controller ran are taken in first. Their time
        # is this one, since the journal's never goes back.
        job.behind_until = now
        return []
    if job.ended and not isinstance(fact, JobStarted):
        return None
    if isinstance(fact, DecisionsLate):  # no deadline is looked at yet, for the same reason
        return _decisions_late(job, fact, now)
    job.catches_up = now <= job.behind_until and not isinstance(fact, Tick)
    decisions = _HANDLERS[type(fact)](job, fact, now)
    if decisions is None:
        return None
    if isinstance(fact, FromAgent):
        membership.heard(job, fact)  # only now: a refused fact must not use up its sequence number
    # The order matters: a hang at the exit is a failure, which opens a rendezvous, which may close in the same step.
    if job.shutdown is None and not _shutdown_in(decisions):
        decisions += restart.end_exit_skew(job, now)
    if job.shutdown is None and not _shutdown_in(decisions):
        decisions += rendezvous.close_what_can(job, now)
    decisions += restart_decision.judge_what_can(job, now)
    return decisions + _settle(job, decisions, now)


def next_deadline(job: ControlState) -> float | None:
    """When a `Tick` is due if nothing happens before; None: never."""
    if job.ended or job.suspended_at is not None:
        return None
    if job.shutdown is not None:
        return job.shutdown_deadline
    deadlines = [restart_decision.due_at(job)]
    if all(replica.ended for replica in job.replicas.values()):
        deadlines.append(job.terminating_until)
    for replica in job.replicas.values():
        if replica.phase is Phase.RENDEZVOUS and replica.cycle >= 0:
            deadlines.append(rendezvous.deadline(job, replica))
        else:
            deadlines.append(restart.exits_due_at(job, replica))
    return min((at for at in deadlines if at is not None), default=None)


def _settle(job: ControlState, decisions: list[Decision], now: float) -> list[Decision]:
    """What follows from the new state: the first shutdown is permanent; the job ends when all nodes have left."""
    more: list[Decision] = []
    if job.shutdown is None:
        job.shutdown = _shutdown_in(decisions)
        # Workers that save at SIGTERM and exit with 0 have not done their work: a cancelled or preempted job is not
        # done, and the batch host knows in a moment which it is.
        is_judged = job.terminating_until is None or job.is_over(job.terminating_until, now)
        if job.shutdown is None and is_judged and all(replica.ended for replica in job.replicas.values()):
            done = any(replica.phase is Phase.DONE for replica in job.replicas.values())
            job.shutdown = (
                Shutdown(exit_code=EXIT_DONE, reason="done")
                if done
                else Shutdown(exit_code=EXIT_FAILED, reason="every replica failed")
            )
            more.append(job.shutdown)
        if job.shutdown is not None:
            bounds = job.plan.fault_tolerance
            saving_s = bounds.teardown.checkpoint_timeout if job.shutdown.checkpoint else 0.0
            job.shutdown_deadline = now + bounds.teardown.grace + saving_s + ACKNOWLEDGE_S
    if job.shutdown is None or job.ended:
        return more
    # The bound is for nodes that cannot be reached: they must not keep the job from its end. `missing` names them.
    if job.is_over(job.shutdown_deadline, now) or not any(node.alive for node in job.nodes.values()):
        job.ended = True
        more += restart_decision.judge_rest(job, now)
        present = tuple(sorted(node.name for node in job.nodes.values() if node.alive))
        more.append(JobEnded(exit_code=job.shutdown.exit_code, reason=job.shutdown.reason, missing=present))
    return more


def _shutdown_in(decisions: list[Decision]) -> Shutdown | None:
    return next((decision for decision in decisions if isinstance(decision, Shutdown)), None)


# ------------------------------------------------------------------------------------------- handlers


def _job_started(job: ControlState, fact: JobStarted, now: float) -> list[Decision] | None:
    # A second one of this generation is of a controller that has replayed no journal.
    if job.started_at and fact.generation <= job.generation:
        return None
    # Budgets, steps and blamed nodes live on: they are of the job, and not of one of its generations.
    job.generation, job.started_at = fact.generation, now
    job.restart_decisions, job.suspects = {}, set(fact.suspects)
    job.nodes = {name: Node(name=name, index=i) for i, name in enumerate(fact.expected)}
    job.expected, job.standby, job.wanted_by, job.drained = set(fact.expected), set(), {}, set()
    job.expected_until = now + job.plan.fault_tolerance.rendezvous.join_timeout
    job.shutdown, job.suspended_at, job.ended, job.terminating_until = None, None, False, None
    if fact.generation:
        job.requeued_at.append(now)
        if spent := limits.preemptions_spent(job, now):
            return [Shutdown(exit_code=EXIT_FAILED, reason=spent)]
    decisions: list[Decision] = []
    preferred = iter(sorted(fact.expected, key=job.is_suspect))  # clean nodes first, each in the allocation's order
    for replica in job.replicas.values():
        replica.order = tuple(islice(preferred, replica.role.nodes_per_replica))
        replica.cycle, replica.unsafe, replica.silent, replica.leaving = -1, {}, set(), {}
        replica.crashes, replica.pause_until = 0, None
        decisions += rendezvous.open_rendezvous(job, replica, now, noticed=now)
    return decisions


def _node_joined(job: ControlState, fact: NodeJoined, now: float) -> list[Decision] | None:
    if not membership.is_news(job, fact):
        return None
    known = job.nodes.get(fact.node)
    decisions: list[Decision] = []
    if known is not None and known.alive:
        decisions = _depart(job, known, NodeState.LOST, f"{known.name} lost: its agent was replaced", now, now)
    node = membership.welcome(job, fact)
    limit = job.plan.fault_tolerance.quarantine_after
    if node.deaths >= limit:
        # A node that keeps dying costs every other node a restart each time: it gets no ranks any more.
        membership.move(job, node, NodeState.QUARANTINED)
        rendezvous.forget(job, node, now)
        reason = f"lost {node.deaths} times (limit {limit})"
        return [*decisions, Quarantined(node=node.name, deaths=node.deaths, reason=reason)]
    rendezvous.arrive(job, node, now)
    return decisions


def _node_ready(job: ControlState, fact: NodeReady, now: float) -> list[Decision] | None:
    node, replica = membership.recognise(job, fact), job.replicas.get(fact.replica)
    if node is None or replica is None or node.state is not NodeState.ACTIVE or node.replica != fact.replica:
        return None
    # The nodes of a replica that has ended report it too, once their workers are gone: they become spares.
    if not (replica.ended or (replica.phase is Phase.RENDEZVOUS and fact.cycle == replica.cycle)):
        return None
    if not replica.ended:
        limits.reach_step(replica, fact.step)
    node.port = fact.port
    rendezvous.arrive(job, node, now)
    return []


def _workers_started(job: ControlState, fact: WorkersStarted, now: float) -> list[Decision] | None:
    replica = _running(job, fact, fact.replica, fact.cycle)
    if replica is None:
        return None
    replica.started.add(fact.node)
    replica.has_run = True
    return _follow_recovery(replica, fact.node, now)


def _progress(job: ControlState, fact: Progress, now: float) -> list[Decision] | None:
    replica = _running(job, fact, fact.replica, fact.cycle)
    if replica is None:
        return None
    limits.first_step(replica, fact.step)
    replica.stepped.add(fact.node)
    return _follow_recovery(replica, fact.node, now)


def _worker_failed(job: ControlState, fact: WorkerFailed, now: float) -> list[Decision] | None:
    cause = f"rank {fact.rank} on {fact.node} "
    if fact.error is not None:
        cause += f"{'could not start' if fact.exit_code is None else 'failed'}: {fact.error}"
    elif fact.signal is not None:
        cause += f"was killed by {signal_name(fact.signal)}"
    else:
        cause += f"exited with code {fact.exit_code}"
    failure = Failure(
        kind="worker",
        cause=cause,
        node=fact.node,
        noticed=now - fact.ago_s,
        rank=fact.rank,
        step=fact.step,
        signal=fact.signal,
        peer_lost=fact.peer_lost,
        unrunnable=cannot_run(fact.exit_code, fact.signal, fact.error),
        misconfigured=is_misconfigured(fact.error),
    )
    return _fail(job, fact, failure, now)


def _worker_hung(job: ControlState, fact: WorkerHung, now: float) -> list[Decision] | None:
    where = f", in {fact.where}" if fact.where else ""
    failure = Failure(
        kind="worker",
        cause=f"rank {fact.rank} on {fact.node} hung: {fact.why}{where}",
        node=fact.node,
        noticed=now - fact.ago_s,
        rank=fact.rank,
        step=fact.step,
        hung=True,
        hang_limit_s=fact.limit_s,
    )
    return _fail(job, fact, failure, now)


def _node_isolated(job: ControlState, fact: NodeIsolated, now: float) -> list[Decision] | None:
    cause = f"{fact.node} had lost store and controller for {fact.for_s:.0f} s and stopped its workers"
    return _fail(job, fact, Failure(kind="node", cause=cause, node=fact.node, noticed=now), now)


def _learned(job: ControlState, fact: Learned, now: float) -> list[Decision] | None:
    if membership.recognise(job, fact) is None:
        return None
    known = job.seen.setdefault(fact.role, {})
    for name, (count, longest_s) in fact.seen.items():
        old_count, old_longest_s = known.get(name, (0, 0.0))
        known[name] = (max(count, old_count), max(longest_s, old_longest_s))
    return []


def _noted(
    job: ControlState, fact: Prewarmed | PrewarmFailed | StacksDumped | RestartedInProcess | CommandEnded, now: float
) -> list[Decision] | None:
    """Recorded if its sender is the node's current agent; no decision follows."""
    return [] if membership.recognise(job, fact) else None


def _dump_asked(job: ControlState, fact: DumpAsked, now: float) -> list[Decision] | None:
    if fact.request in job.requests:  # sent twice, or copied by another user of the store
        return None
    job.requests.add(fact.request)
    return [DumpOrdered(request=fact.request, ranks=fact.ranks, replica=fact.replica)]


def _workers_done(job: ControlState, fact: WorkersDone, now: float) -> list[Decision] | None:
    replica = _running(job, fact, fact.replica, fact.cycle)
    if replica is None:
        return None
    replica.done.add(fact.node)
    replica.first_done_at = now if replica.first_done_at is None else replica.first_done_at
    if not replica.done.issuperset(replica.order):
        return []
    replica.phase = Phase.DONE
    return [ReplicaEnded(replica=replica.id, cycle=replica.cycle, outcome="done")]


def _agents_started(job: ControlState, fact: AgentsStarted, now: float) -> list[Decision] | None:
    if fact.generation != job.generation or job.shutdown:
        return None
    for node in (job.nodes[name] for name in fact.nodes if name in job.nodes):
        if fact.step_ended and node.alive:
            node.excused = True  # the controller has not noticed yet that its agent is gone
        elif fact.step_ended and node.state is NodeState.LOST:  # of a node that has left nothing was counted
            node.deaths = max(0, node.deaths - 1)
        if not node.alive and node.name not in job.drained:
            job.expected.add(node.name)  # LOST as before: an old agent that still runs there is fenced all the same
    job.expected_until = max(job.expected_until, now + job.plan.fault_tolerance.rendezvous.join_timeout)
    return []


def _node_left(job: ControlState, fact: NodeLeft, now: float) -> list[Decision] | None:
    node = membership.recognise(job, fact)
    if node is None or not node.alive:
        return None
    if fact.survivors:  # not even SIGKILL ended them: the node is unhealthy, so it gets no ranks again
        node.deaths = max(node.deaths, job.plan.fault_tolerance.quarantine_after)
    return _depart(job, node, NodeState.LEFT, f"{node.name} left: {fact.reason}", now, now, fact.step)


def _node_lost(job: ControlState, fact: NodeLost, now: float) -> list[Decision] | None:
    node = job.nodes.get(fact.node)
    if node is None or not node.alive or node.incarnation != fact.incarnation:
        return None
    if node.state is NodeState.ACTIVE and node.replica is not None and fact.safe_after_s > 0.0:
        job.replicas[node.replica].unsafe[node.name] = membership.safe_at(node, now + fact.safe_after_s)
    fence = Fence(node=node.name, incarnation=node.incarnation)
    # Its kernel closed the connection at its death; or it was silent for what is left of the time after which its
    # ranks are given away.
    is_proven = not fact.safe_after_s and fact.cause != "heartbeat_timeout"
    silent_s = fact.ago_s if is_proven else job.plan.fault_tolerance.gives_away_after_s - fact.safe_after_s
    began = now - max(0.0, silent_s)
    cause, noticed = f"{node.name} lost: {fact.why}", now - fact.ago_s
    return [fence, *_depart(job, node, NodeState.LOST, cause, now, noticed, fact.step, began)]


def _node_fenced(job: ControlState, fact: NodeFenced, now: float) -> list[Decision] | None:
    node = job.nodes.get(fact.node)
    if node is None or node.incarnation != fact.incarnation:
        return None
    return [] if membership.make_safe(job, node) else None


def _signalled(job: ControlState, fact: Signalled, now: float) -> list[Decision] | None:
    if job.shutdown is not None or fact.generation != job.generation:
        return None
    shutdown = SIGNALS[fact.reason]
    saves = (
        fact.saves or fact.reason == "time_limit"
    ) and job.plan.fault_tolerance.teardown.checkpoint_signal is not None
    return [msgspec.structs.replace(shutdown, checkpoint=True) if saves else shutdown]


def _terminating(job: ControlState, fact: Terminating, now: float) -> list[Decision] | None:
    if membership.recognise(job, fact) is None or job.shutdown is not None:
        return None
    if job.terminating_until is not None and now < job.terminating_until:
        return None  # the same signal, at another node
    job.terminating_until = now + TERMINATING_S
    return []


def _attributed(job: ControlState, fact: Attributed, now: float) -> list[Decision] | None:
    pending = job.restart_decisions.get((fact.replica, fact.cycle)) if fact.generation == job.generation else None
    if pending is None or pending.failure.rank != fact.rank or not restart_decision.take(pending, fact.attribution):
        return None
    if job.shutdown is None and restart_decision.stops(job, pending, now):
        return restart_decision.decide(job, pending, now)
    return []


def _recorded(job: ControlState, fact: Fact, now: float) -> list[Decision] | None:
    """Recorded; no decision follows."""
    return []


def _decisions_late(job: ControlState, fact: DecisionsLate, now: float) -> list[Decision] | None:
    """Move each deadline for acting on what was decided since then."""
    if job.suspended_at is not None:  # its end moves them
        return None
    job.behind_until = now
    late_s, fenced_by = now - fact.since, fact.since + job.plan.fault_tolerance.gives_away_after_s
    if job.shutdown_deadline >= fact.since:
        job.shutdown_deadline += late_s
    for replica in job.replicas.values():
        if replica.phase is Phase.RENDEZVOUS and replica.opened_at >= fact.since:
            replica.called_at, replica.last_call_at = now, None
        # Those that were fenced: the order has gone out only now. That others are dead, their silence proves.
        replica.unsafe = {node: at + late_s if at >= fenced_by else at for node, at in replica.unsafe.items()}
    for pending in job.restart_decisions.values():
        if pending.opened_at >= fact.since:
            pending.due_at += late_s
    return []


def _store_data_lost(job: ControlState, fact: StoreDataLost, now: float) -> list[Decision] | None:
    """Begin again with agents that join again: facts and orders that no process has read are lost with the data."""
    if fact.generation != job.generation or job.shutdown is not None:  # what is on its end comes to it in its bounds
        return None
    bounds, decisions = job.plan.fault_tolerance, list[Decision]()
    for node in job.nodes.values():
        if node.alive:
            decisions.append(rendezvous.give_up(job, node, now))  # no death of its own: it does not count
            if node.name not in job.drained:
                job.expected.add(node.name)
        elif node.state is NodeState.LOST:
            decisions.append(rendezvous.fence(job, node, now))
    job.expected_until = max(job.expected_until, now + bounds.rendezvous.join_timeout)
    for replica in (each for each in job.replicas.values() if not each.ended):
        if replica.phase is Phase.RUNNING:
            why = "the store has lost its data"
            decisions.append(RestartOrdered(request="", by="", replica=replica.id, cycle=replica.cycle, why=why))
            decisions += rendezvous.open_rendezvous(job, replica, now, noticed=now)
        rendezvous.call_again(job, replica, now)
    return decisions


_HANDLERS: dict[type[Fact], Callable[[ControlState, Any, float], list[Decision] | None]] = {
    JobStarted: _job_started,
    NodeJoined: _node_joined,
    NodeReady: _node_ready,
    WorkersStarted: _workers_started,
    Prewarmed: _noted,
    PrewarmFailed: _noted,
    Progress: _progress,
    RestartedInProcess: _noted,
    WorkerFailed: _worker_failed,
    WorkerHung: _worker_hung,
    WorkersDone: _workers_done,
    NodeIsolated: _node_isolated,
    Learned: _learned,
    StacksDumped: _noted,
    NodeLeft: _node_left,
    NodeLost: _node_lost,
    NodeFenced: _node_fenced,
    SlurmNodeState: _recorded,
    AgentsStarted: _agents_started,
    DumpAsked: _dump_asked,
    RestartAsked: requests.answer,
    DrainAsked: requests.answer,
    UndrainAsked: requests.answer,
    CommandAsked: requests.answer,
    CommandEnded: _noted,
    Signalled: _signalled,
    Terminating: _terminating,
    Suspending: suspension.begin,
    NodeResumed: suspension.node_resumed,
    JobResumed: suspension.end,
    Attributed: _attributed,
    RecordsRefused: _recorded,
    StoreDataLost: _store_data_lost,
    Tick: _recorded,
}


# -------------------------------------------------------------------------------------------- helpers


def _follow_recovery(replica: Replica, node: str, now: float) -> list[Decision]:
    """What `node` has just reported may complete a recovery: `recovered` when all nodes run, `first_step_reached`
    when all have stepped; each once a cycle."""
    stamps, decisions = replica.stamps, list[Decision]()
    if stamps is None or replica.cycle == 0 or not replica.started.issuperset(replica.order):
        return []
    of_cycle: dict[str, Any] = {"replica": replica.id, "cycle": replica.cycle}
    is_news, stamps.spawned = stamps.spawned is None, now if stamps.spawned is None else stamps.spawned
    ends = [stamps.noticed, stamps.decided, stamps.torn_down, stamps.closed, stamps.spawned]
    names = ("decided", "torn_down", "closed", "spawned")
    phases = {name: end - start for name, start, end in zip(names, ends, ends[1:], strict=False)}
    if is_news:
        decisions.append(Recovered(**of_cycle, phases=phases, total_s=stamps.spawned - stamps.noticed))
    # Where workers do not wait for each other, nodes may have stepped before the last one has started its workers.
    if replica.first_step is not None and replica.stepped.issuperset(replica.order):
        replica.stamps = None
        of_cycle |= {"node": node, "step": replica.first_step}
        phases = {**phases, "first_step": now - stamps.spawned}
        decisions.append(FirstStepReached(**of_cycle, phases=phases, total_s=now - stamps.noticed))
    return decisions


def _running(job: ControlState, fact: FromAgent, replica_id: str, cycle: int) -> Replica | None:
    """The replica that the fact is about, if it comes from a member of its running cycle."""
    node, replica = membership.recognise(job, fact), job.replicas.get(replica_id)
    if node is None or replica is None or node.state is not NodeState.ACTIVE or node.replica != replica_id:
        return None
    return replica if replica.phase is Phase.RUNNING and replica.cycle == cycle else None


def _fail(
    job: ControlState, fact: WorkerFailed | WorkerHung | NodeIsolated, failure: Failure, now: float
) -> list[Decision] | None:
    """A failure that an agent reports: of its running cycle, or evidence about the one that has just failed."""
    if (replica := _running(job, fact, fact.replica, fact.cycle)) is not None:
        return restart.handle_failure(job, replica, failure, now) if job.shutdown is None else []
    node, replica = membership.recognise(job, fact), job.replicas.get(fact.replica)
    if node is not None and replica is not None and job.shutdown is None and replica.phase is Phase.RENDEZVOUS:
        # Its agent has been called to the next cycle, and has not reported yet that its workers are gone.
        is_member = node.state is NodeState.ACTIVE and node.replica == replica.id
        if is_member and fact.cycle == replica.cycle - 1:
            decisions = restart_decision.take_evidence(job, replica, failure, failure.noticed, now)
            if decisions is not None:
                return decisions
    return None


def _depart(
    job: ControlState,
    node: Node,
    state: NodeState,
    cause: str,
    now: float,
    noticed: float,
    step: int | None = None,
    began: float | None = None,
) -> list[Decision]:
    """A node is gone: a failure, if its workers still had work to do; or the cause of one that its peers reported.
    `began`: when it was there for the last time."""
    if state is NodeState.LOST and not node.excused:
        node.deaths += 1
    node.excused = False
    # Read before the move: afterwards the node is gone, and `forget` has taken it out of its rendezvous.
    was_active, replica = node.state is NodeState.ACTIVE, job.replicas.get(node.replica or "")
    membership.move(job, node, state)
    rendezvous.forget(job, node, now)
    if job.shutdown is not None or replica is None or not was_active or node.name in replica.done:
        return []
    failure = Failure(kind="node", cause=cause, node=node.name, noticed=noticed, step=step)
    if replica.phase is Phase.RUNNING:
        return restart.handle_failure(job, replica, failure, now)
    if replica.phase is Phase.RENDEZVOUS:
        began = noticed if began is None else began
        return restart_decision.take_evidence(job, replica, failure, began, now) or []
    return []
