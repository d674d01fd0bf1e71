"""What follows from a failure: which sources are asked, what they answer, and whether there is a restart.

A decision is opened by the first failure of a cycle, at the same moment as the next rendezvous. The sources answer
while its nodes tear down and get ready. Where a verdict may stop the job, the rendezvous waits for it at its end,
and only there: `rendezvous.py` asks for the decision when the rendezvous could close.

    attribution ─▶ progress ─▶ budget ─▶ restart, or the job's end

A first report that may be a symptom (`cause.py`) is not decided at once: the decision waits for the end of the
rendezvous too, and `take_evidence` replaces the failure when its cause is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from nvrx_slurm.core import cause, limits
from nvrx_slurm.core.state import ControlState, Failure, NodeState, Phase, Replica, RestartDecision
from nvrx_slurm.errors import EXIT_FAILED, EXIT_NO_RESTART
from nvrx_slurm.jobspec.model import Aggregation
from nvrx_slurm.journal.records import (
    AttributionAsked,
    AttributionJudged,
    Decision,
    RestartDecided,
    Shutdown,
)
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict

# A node is passed over from this confidence on.
BLAME_CONFIDENCE = 0.5

# How many of a replica's last cycles an answer may still be about.
KEPT = 8

# The policies with which there is something to decide.
RESTARTS = ("restart_replica", "restart_job")


class AggregatedVerdict(msgspec.Struct, frozen=True):
    """All answers as one verdict; `why` names each source's answer."""

    verdict: Verdict
    why: str
    blamed: tuple[str, ...]


# ------------------------------------------------------------------------------------------- opening


def open_decision(
    job: ControlState, replica: Replica, failure: Failure, now: float
) -> tuple[RestartDecision, list[Decision]]:
    """Ask about the failure of a running cycle."""
    bounds = job.plan.fault_tolerance
    settings, restarts = bounds.attribution, replica.role.on_failure in RESTARTS
    waits = restarts and settings.acts
    is_symptom = cause.is_symptom(failure, bounds)
    pending = RestartDecision(
        replica=replica.id,
        cycle=replica.cycle,
        policy=replica.role.on_failure,
        failure=failure,
        members=replica.order,
        sources=settings.sources,
        opened_at=now,
        due_at=now + settings.decision_timeout,  # where nothing waits, `_ask` sets it
        waits=waits,
        holds=restarted_with(job, replica)
        if waits or (restarts and (is_symptom or limits.judges_progress(job)))
        else frozenset(),
        noticed=failure.noticed,
        is_symptom=is_symptom,
    )
    # Forget old decisions: a job of weeks may fail thousands of times. A late answer about the others still counts.
    for key, old in list(job.restart_decisions.items()):
        over = old.decided and (old.judged or not old.sources)
        if old.replica == replica.id and old.cycle <= replica.cycle - KEPT and over:
            del job.restart_decisions[key]
    job.restart_decisions[pending.replica, pending.cycle] = pending
    if pending.is_symptom and pending.holds and not waits:
        return pending, []  # nothing waits for the answers: the sources are asked once the cause is known
    return pending, _ask(job, pending, now)


def take_evidence(
    job: ControlState, replica: Replica, failure: Failure, began: float, now: float
) -> list[Decision] | None:
    """A failure of the cycle before, reported while the next rendezvous is open. `began`: it did not happen before.
    None: the cause is known, and this is not it."""
    pending = next((each for each in holding(job, replica) if each.is_symptom), None)
    if pending is None or not cause.explains(failure, began, pending.failure, pending.noticed):
        return None
    limits.reach_step(replica, failure.step)
    before, pending.failure = pending.failure, failure
    if pending.replica != replica.id:  # of another replica of a job that restarts as a whole
        del job.restart_decisions[pending.replica, pending.cycle]
        pending.replica, pending.cycle, pending.members = replica.id, replica.cycle - 1, replica.order
        job.restart_decisions[pending.replica, pending.cycle] = pending
    elif pending.asked and before.rank == failure.rank:
        # Both are of lost nodes, which have no rank. The sources' key is replica, cycle and rank: it stays the same.
        return []
    return _ask(job, pending, now)


def _ask(job: ControlState, pending: RestartDecision, now: float) -> list[Decision]:
    """Have the sources asked about the cause as it is known now. Answers about another one do not count."""
    pending.asked = True
    pending.answers.clear()
    if not pending.sources:
        return []
    if not pending.waits:
        pending.due_at = now + job.plan.fault_tolerance.attribution.timeout
    asked = AttributionAsked(
        replica=pending.replica,
        cycle=pending.cycle,
        generation=job.generation,
        rank=pending.failure.rank,
        node=pending.failure.node,
        sources=pending.sources,
        holds=pending.waits,
    )
    return [asked]


def restarted_with(job: ControlState, replica: Replica) -> frozenset[str]:
    """The replicas that are restarted when this one is: with a failure, or for a user."""
    if replica.role.on_failure != "restart_job":
        return frozenset({replica.id})
    return frozenset(other.id for other in job.replicas.values() if other.phase is Phase.RUNNING)


def holding(job: ControlState, replica: Replica) -> list[RestartDecision]:
    """The decisions that the replica's open rendezvous cannot close before."""
    return [each for each in job.restart_decisions.values() if not each.decided and replica.id in each.holds]


def is_open(job: ControlState, replica: Replica) -> bool:
    """Whether the replica's open rendezvous follows a failure that is not decided yet."""
    pending = job.restart_decisions.get((replica.id, replica.cycle - 1))
    return pending is not None and not pending.decided


def waits_for(job: ControlState, pending: RestartDecision, replica: Replica) -> list[Replica]:
    """The other replicas whose nodes are heard first: one of these may be the cause of a symptom, and those of the
    replica that failed report how far they had come."""
    found: list[Replica] = []
    others = pending.holds if pending.is_symptom else {pending.replica} if limits.judges_progress(job) else set()
    for other in (job.replicas[each] for each in sorted(others - {replica.id})):
        # Not for one that waits for this replica: neither would close.
        if other.phase is not Phase.RENDEZVOUS or replica.id in other.waits_for:
            continue
        reports = other.id == pending.replica and limits.judges_progress(job)
        # A node that is only expected to join again is no cause that is yet unknown.
        if any(reports or job.nodes[name].state is NodeState.ACTIVE for name in other.awaited):
            found.append(other)
    return found


# ----------------------------------------------------------------------------------------- answering


def take(pending: RestartDecision, attribution: Attribution) -> bool:
    """Take in a source's answer; False: it is not news. One that is too late is news, and changes nothing."""
    if attribution.source not in pending.sources or attribution.source in pending.answers:
        return False
    pending.answers[attribution.source] = attribution
    return True


def is_settled(job: ControlState, pending: RestartDecision, now: float) -> bool:
    """Whether the answers can be read: none that is still to come could change the verdict, or their time is up."""
    if not pending.waits or job.is_over(pending.due_at, now) or len(pending.answers) == len(pending.sources):
        return True
    said = {answer.verdict for answer in pending.answers.values()}
    how = job.plan.fault_tolerance.attribution.aggregation
    return Verdict.STOP in said if how == "any" else bool(said - {Verdict.STOP})


def stops(job: ControlState, pending: RestartDecision, now: float) -> bool:
    """Whether the answers end the job, however long its rendezvous will yet be open."""
    if pending.decided or not pending.waits or not is_settled(job, pending, now):
        return False
    return _read(job, pending, now).verdict is Verdict.STOP


def read(
    sources: Sequence[str], answers: Mapping[str, Attribution], how: Aggregation, *, over: bool = True
) -> AggregatedVerdict:
    """All answers as one verdict. A source that has not answered counts as TIMEOUT; `over`: their time is up."""
    verdicts = [answers[name].verdict if name in answers else Verdict.TIMEOUT for name in sources]
    stopping = verdicts.count(Verdict.STOP)
    if stopping and (how == "any" or stopping == len(verdicts)):
        verdict = Verdict.STOP
    elif stopping or Verdict.RESTART in verdicts:
        verdict = Verdict.RESTART
    else:
        verdict = Verdict.TIMEOUT if Verdict.TIMEOUT in verdicts else Verdict.UNKNOWN
    silent = "no answer in time" if over else "not waited for"
    reasons: list[str] = []
    blamed: set[str] = set()
    for name in sources:
        reason = silent
        if (answer := answers.get(name)) is not None:
            reason = ", ".join(filter(None, (answer.verdict, (answer.problem or answer.explanation).rstrip("."))))
        reasons.append(f"{name}: {reason}")
    for answer in answers.values():
        if answer.scope is Scope.NODE and answer.confidence >= BLAME_CONFIDENCE:
            blamed.update(answer.nodes)
    return AggregatedVerdict(verdict, "; ".join(reasons), tuple(sorted(blamed)))


def _read(job: ControlState, pending: RestartDecision, now: float) -> AggregatedVerdict:
    how = job.plan.fault_tolerance.attribution.aggregation
    return read(pending.sources, pending.answers, how, over=job.is_over(pending.due_at, now))


# ------------------------------------------------------------------------------------------ deciding


def judge_what_can(job: ControlState, now: float) -> list[Decision]:
    """Read the answers that no rendezvous waits for (of a dry run, or of a job that ends already), once all have
    arrived or their time is up."""
    decisions: list[Decision] = []
    for pending in job.restart_decisions.values():
        complete = len(pending.answers) == len(pending.sources) or job.is_over(pending.due_at, now)
        awaited = pending.waits and not pending.decided and job.shutdown is None
        if pending.sources and pending.asked and complete and not (awaited or pending.judged):
            decisions += _judge(job, pending, now)
    return decisions


def judge_rest(job: ControlState, now: float) -> list[Decision]:
    """The job ends: open answers are not waited for, and each failure still gets its record."""
    decisions: list[Decision] = []
    for pending in job.restart_decisions.values():
        if pending.sources and not pending.judged:
            # A symptom's sources wait for its cause. There will be none: ask about what is known, for the record.
            decisions += [] if pending.asked else _ask(job, pending, now)
            decisions += _judge(job, pending, now)
    return decisions


def due_at(job: ControlState) -> float | None:
    """When the time of the answers that no rendezvous waits for is up; None: there are none."""
    return min(
        (
            each.due_at
            for each in job.restart_decisions.values()
            if each.sources and each.asked and not (each.judged or each.waits)
        ),
        default=None,
    )


def decide(job: ControlState, pending: RestartDecision, now: float) -> list[Decision]:
    """What is done about the failure, on all evidence: a restart, or the job's end."""
    pending.decided = True
    judged = [] if pending.asked else _ask(job, pending, now)
    judged += _judge(job, pending, now) if pending.waits else []
    replica, failure = job.replicas[pending.replica], pending.failure
    decided = RestartDecided(
        replica=pending.replica,
        cycle=pending.cycle,
        action=pending.policy,
        cause=failure.cause,
        node=failure.node,
        rank=failure.rank,
        step=failure.step,
        restarts_left=limits.restarts_left(job, replica, now),
    )
    if decided.action not in RESTARTS:
        return [*judged, decided]
    # Attribution before progress before budget: the first that speaks against a restart is the reason in the result.
    if pending.waits and (aggregated := _read(job, pending, now)).verdict is Verdict.STOP:
        return [
            *judged,
            replace(decided, action="stop", by="attribution"),
            _no_restart(aggregated.why, pending),
        ]
    if limits.judges_progress(job):
        limits.count_cycle(job, replica)
        decided = replace(decided, no_progress=replica.no_progress)
        if stuck := limits.is_stuck(job, replica):
            return [*judged, replace(decided, action="stop", by="progress"), _no_restart(stuck, pending)]
    if failure.misconfigured:
        why = "an option of its in-process wrapper is wrong"
        return [*judged, replace(decided, action="stop"), _no_restart(why, pending)]
    if failure.unrunnable and not replica.has_run:
        # The same nodes would fail in the same way. A spare may have what this node lacks: so one of them is tried.
        tried, replica.unrunnable = replica.unrunnable, True
        job.blamed.add(failure.node)
        if tried or not any(not job.is_suspect(name) for name in job.standby):
            return [*judged, replace(decided, action="stop"), _no_restart("its program cannot be executed", pending)]
    is_node = failure.kind == "node"
    spent = limits.node_budget_spent(job, now) if is_node else limits.worker_budget_spent(job, replica, now)
    if spent:
        return [*judged, replace(decided, action="stop", by="budget"), _over(EXIT_FAILED, spent, pending)]
    # Counted only now: a failure that ends the job spends nothing.
    times = job.nodes_lost_at if is_node else replica.restarted_at
    times.append(now)
    decided = replace(decided, restarts_left=limits.restarts_left(job, replica, now))
    if delay_s := limits.count_crash(job, replica, failure):
        # The pause counts from the failure: nodes tear down and get ready meanwhile.
        for identity in pending.holds or restarted_with(job, replica):
            job.replicas[identity].pause_until = pending.opened_at + delay_s
        decided = replace(decided, delay_s=delay_s, crashes=replica.crashes)
    return [*judged, decided]


def _judge(job: ControlState, pending: RestartDecision, now: float) -> list[Decision]:
    pending.judged = True
    aggregated = _read(job, pending, now)
    blamed = tuple(node for node in aggregated.blamed if node in pending.members)
    if len(blamed) == len(pending.members) > 1:  # what all nodes have in common is no node's fault
        blamed = ()
    job.blamed.update(blamed)
    stop = aggregated.verdict is Verdict.STOP
    acted = stop and pending.waits and job.shutdown is None
    ignored = ""
    if stop and job.shutdown is not None:
        ignored = "the job ends already; "
    elif stop and not acted:
        ignored = "dry run; " if job.plan.fault_tolerance.attribution.dry_run else "nothing is restarted; "
    judged = AttributionJudged(
        replica=pending.replica,
        cycle=pending.cycle,
        generation=job.generation,
        rank=pending.failure.rank,
        verdict=aggregated.verdict,
        acted=acted,
        why=ignored + aggregated.why,
        blamed=blamed,
        waited_s=0.0 if pending.held_at is None else now - pending.held_at,
    )
    return [judged]


def _no_restart(why: str, pending: RestartDecision) -> Shutdown:
    return _over(EXIT_NO_RESTART, f"{pending.replica}: a restart cannot help: {why}", pending)


def _over(exit_code: int, why: str, pending: RestartDecision) -> Shutdown:
    """The job ends. Where a rendezvous is open its nodes have written down their stacks already."""
    dump = pending.failure.cause if pending.failure.hung and not pending.holds else None
    return Shutdown(exit_code=exit_code, reason=f"{why}; last: {pending.failure.cause}", dump=dump)
