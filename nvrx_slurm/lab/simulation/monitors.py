"""Monitors of the journal: each compares what the controller has decided with the second model (`job_history.py`).

`JournalMonitors` takes every entry that the store has accepted. A monitor sees each record of its `watched` kinds
before the model takes it in (`check`), and each fact with all of its decisions once they are complete (`step_over`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from nvrx_slurm.controller.controller import LATE_S
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO_RESTART, EXIT_RETRY
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionJudged,
    ControllerStarted,
    DecisionsLate,
    DrainAsked,
    Entry,
    Fact,
    Fence,
    FirstStepReached,
    FromAgent,
    JobEnded,
    JobStarted,
    NodeDrained,
    NodeFenced,
    NodeIsolated,
    NodeJoined,
    NodeUndrained,
    Progress,
    Quarantined,
    Record,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    RequestRefused,
    RestartAsked,
    RestartDecided,
    RestartOrdered,
    Shutdown,
    Signalled,
    UndrainAsked,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.lab.simulation.job_history import (
    RESTARTS,
    FailureHistory,
    HistoryStep,
    JobHistory,
    ReplicaHistory,
    is_settled,
    verdict_of,
)

OF_A_CYCLE = (WorkersStarted, Progress, WorkerFailed, WorkerHung, WorkersDone, NodeIsolated)
# How long beyond its teardown an agent may take to report that it has left.
LEAVE_S = 10.0

MOST_DOUBLINGS = 30
# How much later than its deadline a decision may be, while the controller decides.
SLACK_S = 1.0
# How much later than it was decided an order may be known, without more time for it: what the controller does not
# take for late, and the way of the commit.
UNKNOWN_S = LATE_S + 0.5


class Promise(StrEnum):
    """What the product promises, in short."""

    DECIDER = "one decider"
    JOURNAL = "one journal, in order"
    JOURNAL_FIRST = "the journal first, ranks before the close"
    RANKS = "no rank is held twice"
    LEASE = "workers start only under a lease that lasts"
    OLDER = "an agent acts on its ranks after all older orders, and only as who has got them"
    TOUCH = "a lease is renewed only by contact"
    FRESH = "a stale record leaves no trace"
    ARRIVAL = "a fact counts from its arrival, and before each deadline after that"
    SIGNED = "nothing is believed without the job's key"
    FAILURES = "each failure is answered at once, and nothing else stops workers"
    FENCED = "an agent that is given up is fenced"
    REGISTERED = "only an agent that has registered is given up"
    SILENT = "no node is given up that was in touch"
    GUARD = "a new controller listens for a full timeout first"
    PROMPTLY = "a silent node is given up within its timeout"
    PROVEN = "a proof of death is true"
    GIVEN_AWAY = "ranks are given away only on proof of death"
    LATE = "a late node has its grace and the last call"
    SIZE = "a rendezvous has all its nodes, or min_nodes when no more can come"
    QUARANTINE = "a node that was lost too often gets no ranks"
    PROMPT = "a rendezvous closes as soon as it can"
    BOUND = "a rendezvous ends within its bound"
    SHUTDOWN = "the first shutdown is the only one"
    BUDGET = "restarts are decided by budget, progress and back-off"
    REQUESTS = "a user's request is answered once, by its rules, and a drained node gets no ranks"
    CAUSE = "the cause is settled on all evidence, and a symptom is none while there is better"
    RECOVERY = "a recovery is recorded when all nodes run, and when all have stepped"
    VERDICT = "a verdict is read once, in time, and for its own failure"
    ENDING = "the job ends when all have left, or their time is up"
    LEAVING = "every process that waits leaves"
    REPLAY = "a journal replayed decides the same"
    ACCOUNTS = "the parts of the nodes' time add up to all of it"
    FINISH = "with nodes enough a job finishes"
    UNTOUCHED = "control plane down, workload up"
    SUSPENDED = "a suspension of all stops no worker and counts nothing"
    SOUND = "nothing crashes"


R = TypeVar("R", bound=Record)


class JournalMonitor(Generic[R]):
    """One promise about the journal, by records of the kinds R. Says in one sentence what breaks it, each time that
    it is broken."""

    promise: ClassVar[Promise]
    watched: ClassVar[tuple[type[Record], ...]] = ()
    outage_s: Callable[[], float]
    """For how long no controller may have decided."""

    def __init__(self, history: JobHistory) -> None:
        self.history = history

    def check(self, record: R, t: float) -> Iterator[str]:
        """A record, before the model takes it in, and its time."""
        yield from ()

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        """A fact and all its decisions, after the model has taken them in."""
        yield from ()


class FreshFacts(JournalMonitor[Record]):
    """What the journal has taken was new: of this generation, of the node's present agent, of the present cycle."""

    promise = Promise.FRESH

    def __init__(self, history: JobHistory) -> None:
        super().__init__(history)
        self._fenced: set[str] = set()
        self._joined: set[str] = set()

    watched = (FromAgent, NodeFenced, Fence, Attributed, Signalled)

    def check(self, record: Record, t: float) -> Iterator[str]:
        history = self.history
        if isinstance(record, Fence):
            self._fenced.add(record.incarnation)
        elif isinstance(record, NodeFenced):
            if history.nodes[record.node].incarnation != record.incarnation:
                yield f"the node has another agent by now, and this was taken: {record}"
        elif isinstance(record, Signalled):
            if record.generation != history.generation:
                yield f"generation {history.generation} runs, and this was taken: {record}"
        elif isinstance(record, Attributed):
            failure = history.failures.get((record.replica, record.cycle))
            asked = failure is not None and failure.rank == record.rank and record.generation == history.generation
            source, sources = record.attribution.source, history.bounds.attribution.sources
            if failure is None or not asked or source not in sources or source in failure.answers:
                yield f"no failure waited for this decision: {record}"
        elif isinstance(record, FromAgent):
            yield from self._check_sender(record)

    def _check_sender(self, fact: FromAgent) -> Iterator[str]:
        history = self.history
        node = history.nodes.get(fact.node)
        if fact.generation != history.generation:
            yield f"generation {history.generation} runs, and this was taken: {fact}"
        if isinstance(fact, NodeJoined):
            if fact.incarnation in self._joined:
                yield f"this agent had joined before: {fact}"
            self._joined.add(fact.incarnation)
            return
        if node is None or node.incarnation != fact.incarnation or fact.seq <= node.seq:
            yield f"the journal has taken this, which is old: {fact}"
        if isinstance(fact, OF_A_CYCLE) and fact.incarnation not in self._fenced:  # a fenced agent is only answered
            replica = history.replicas[fact.replica]
            # How a worker ended, or that it hangs, shows what failed, until the next rendezvous closes.
            may_show = isinstance(fact, WorkerFailed | WorkerHung | NodeIsolated)
            shows = may_show and history.open_symptom(fact.replica) is not None
            if (fact.cycle, replica.state) != ((replica.cycle - 1, "open") if shows else (replica.cycle, "running")):
                yield f"cycle {replica.cycle} is {replica.state}, and this was taken: {fact}"


class FailuresAnswered(JournalMonitor[WorkersDone]):
    """The first failure of a cycle opens the next rendezvous, or ends the replica or the job, in the same commit; no
    rendezvous opens otherwise. Some nodes done for `exit_skew`, and others not, is a failure too, when it is due."""

    promise = Promise.FAILURES
    watched = (WorkersDone,)

    def check(self, done: WorkersDone, t: float) -> Iterator[str]:
        skew_s = self.history.bounds.hang.exit_skew
        begun = self.history.replicas[done.replica].first_done_at
        if skew_s is None or begun is None or self.history.shutdown is not None:
            return
        late_s = t - begun - skew_s
        if late_s > SLACK_S and late_s > SLACK_S + self.outage_s():
            yield f"{done.node} was done {late_s:.3f} s after exit_skew was over, and had not failed: {done}"

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        opened = {record.replica for record in step.decisions if isinstance(record, RendezvousOpened)}
        ends = (record for record in step.decisions if isinstance(record, ReplicaEnded))
        ended, failed = {record.replica for record in ends if record.outcome == "failed"}, set[str]()
        expected = set(self.history.replicas if isinstance(step.fact, JobStarted) else step.begin_again)
        if step.request is not None and not step.request.refused:
            expected |= step.request.restarts
        for failure in step.failures:
            if failure.replica in expected:
                continue  # it restarts already, with another
            expected |= failure.held
            if failure.policy == "ignore":
                failed.add(failure.replica)
        if any(isinstance(record, Shutdown) for record in step.decisions):
            return
        if opened != expected:
            yield f"{sorted(expected)} had to restart, and {sorted(opened)} did, after {step.fact}"
        if ended != failed:
            yield f"{sorted(failed)} had to end as failed, and {sorted(ended)} did, after {step.fact}"
        if any(failure.policy == "fail_job" for failure in step.failures):
            yield f"the job had to end with this failure: {step.fact}"


class RestartsDecided(JournalMonitor[RestartDecided]):
    """Each failure is decided once; the decision and the budget left are those that the plan's limits give, counted
    from the journal."""

    promise = Promise.BUDGET
    watched = (RestartDecided,)

    def check(self, decided: RestartDecided, t: float) -> Iterator[str]:
        history = self.history
        failure = history.failures.get((decided.replica, decided.cycle))
        if failure is None or failure.decided:
            yield f"no failure was open that this decides: {decided}"
            return
        replica = history.replicas[decided.replica]
        action, by, restarts_left = self._expected(replica, failure, t)
        if (decided.action, decided.by) != (action, by):
            yield f"{action} by {by} had to be decided, and this was: {decided}"
        elif decided.restarts_left != restarts_left:
            yield f"{restarts_left} restarts were left, and this was decided: {decided}"
        elif action in RESTARTS and decided.delay_s != (delay_s := self._delay_s(replica, failure)):
            yield f"a pause of {delay_s:g} s was due, and this was decided: {decided}"

    def _expected(self, replica: ReplicaHistory, failure: FailureHistory, now: float) -> tuple[str, str, int]:
        history, bounds = self.history, self.history.bounds
        own = replica.restarted_at
        everyone = [at for each in history.replicas.values() for at in each.restarted_at]
        budgets = [(own, bounds.max_restarts)]
        if bounds.max_job_restarts is not None:
            budgets.append((everyone, bounds.max_job_restarts))
        workers_left = min(count_left(times, allowance, now) for times, allowance in budgets)
        if failure.policy not in RESTARTS:
            return failure.policy, "policy", workers_left
        if failure.waits and verdict_of(history, failure) is Verdict.STOP:
            return "stop", "attribution", workers_left
        stuck = 0 if history.makes_progress(replica) else replica.stuck_cycles + 1
        if bounds.progress.max_no_progress_cycles is not None and stuck >= bounds.progress.max_no_progress_cycles:
            return "stop", "progress", workers_left
        if failure.kind == "worker":
            return (failure.policy, "policy", workers_left - 1) if workers_left else ("stop", "budget", 0)
        losses = bounds.max_node_losses
        if losses is not None and not count_left(history.nodes_lost_at, losses, now):
            return "stop", "budget", workers_left
        return failure.policy, "policy", workers_left

    def _delay_s(self, replica: ReplicaHistory, failure: FailureHistory) -> float:
        plan, crashes = self.history.bounds.backoff, self.history.crashes(replica, failure)
        if not plan.max or failure.kind == "node" or crashes < plan.after:
            return 0.0
        return float(min(plan.max, plan.initial * 2 ** min(crashes - plan.after, MOST_DOUBLINGS)))


class CausesSettled(JournalMonitor[RestartDecided | RendezvousClosed]):
    """A decision names the best evidence: of what is no lost connection to a peer, the first that happened."""

    promise = Promise.CAUSE
    watched = (RestartDecided, RendezvousClosed)

    def check(self, record: RestartDecided | RendezvousClosed, t: float) -> Iterator[str]:
        failures = self.history.failures
        if isinstance(record, RendezvousClosed):
            for failure in failures.values():
                if record.replica in failure.held and failure.settles and not failure.decided:
                    yield f"{record.replica} closed before the failure of {failure.replica} was decided"
            return
        about = failures.get((record.replica, record.cycle))
        if about is not None and about.node and (record.node, record.rank) != (about.node, about.rank):
            yield f"{about.node} (rank {about.rank}) was the cause, and this was decided: {record}"


class UserRequests(JournalMonitor[NodeUndrained | RendezvousClosed | Shutdown]):
    """A user's request is refused where its rules say so, and only there; a drained node gets no ranks; a drain is
    taken back only for a rendezvous that lacks nodes, and before the job ends for want of them."""

    promise = Promise.REQUESTS
    watched = (NodeUndrained, RendezvousClosed, Shutdown)

    def check(self, record: NodeUndrained | RendezvousClosed | Shutdown, t: float) -> Iterator[str]:
        history = self.history
        if isinstance(record, RendezvousClosed):
            if drained := history.drained.intersection(record.nodes):
                yield f"{sorted(drained)} had been drained, and got ranks: {record}"
        elif isinstance(record, NodeUndrained):
            owner = history.leaving.get(record.node)
            if record.why and (owner is None or self._has_enough(owner)):
                yield f"nothing lacked the node, and this was decided: {record}"
        elif isinstance(record, Shutdown) and record.exit_code == EXIT_RETRY:
            if isinstance(history.step.fact, Signalled):
                return
            for name, owner in history.leaving.items():
                # Another replica may lack nodes that this drain could not give it.
                stops = record.reason.startswith(f"{owner} needs ")
                if stops and history.nodes[name].place == "drained" and not self._has_enough(owner):
                    yield f"{owner} could have {name} back, whose drain was not over, and the job ended: {record}"

    def _has_enough(self, replica_id: str) -> bool:
        replica = self.history.replicas[replica_id]
        return replica.state != "open" or self.history.have(replica) >= replica.role.nodes_per_replica

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        if (request := step.request) is None:
            return
        fact = step.fact
        assert isinstance(fact, RestartAsked | DrainAsked | UndrainAsked)
        if request.is_copy:
            yield f"this was answered before, and was taken again: {fact}"
            return
        kinds = {RestartAsked: RestartOrdered, DrainAsked: NodeDrained, UndrainAsked: NodeUndrained}
        expected = RequestRefused if request.refused else kinds[type(fact)]
        of_it = [each for each in step.decisions if getattr(each, "request", None) == fact.request]
        if not of_it or not isinstance(of_it[0], expected):
            yield f"{expected.__name__} had to answer, and this did: {of_it}, to {fact}"
        ordered = {each.replica for each in of_it if isinstance(each, RestartOrdered)}
        if not request.refused and ordered != request.restarts:
            yield f"{sorted(request.restarts)} had to restart, and {sorted(ordered)} did, for {fact}"


class Preemptions(JournalMonitor[Record]):
    """A job that was requeued more often than `max_preemptions` ends at once."""

    promise = Promise.BUDGET

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        history, allowance = self.history, self.history.bounds.max_preemptions
        if not isinstance(step.fact, JobStarted) or allowance is None or not step.fact.generation:
            return
        too_many = count_used(history.requeued_at, allowance, step.t) > allowance.count
        if too_many != (history.shutdown is not None):
            yield f"requeued {len(history.requeued_at)} times, {allowance}, and this followed: {step.decisions}"


class Verdicts(JournalMonitor[AttributionJudged | RestartDecided | RendezvousClosed]):
    """The answers about a failure are read once, all or in time, by the plan's aggregation; a STOP acts only if the
    run is not dry and nothing has been decided before."""

    promise = Promise.VERDICT
    watched = (AttributionJudged, RestartDecided, RendezvousClosed)

    def check(self, record: AttributionJudged | RestartDecided | RendezvousClosed, t: float) -> Iterator[str]:
        history = self.history
        if isinstance(record, RendezvousClosed):
            for failure in history.failures.values():
                if record.replica in failure.held and failure.waits and not failure.decided:
                    yield f"{record.replica} closed before the failure of {failure.replica} was decided"
            return
        about = history.failures.get((record.replica, record.cycle))
        if about is None:
            yield f"no failure was open that this is about: {record}"
        elif isinstance(record, RestartDecided):
            if about.waits and not is_settled(history, about, t):
                yield f"answers were to be waited for until {about.due_at}, and this was decided: {record}"
        else:
            if about.judged:
                yield f"the answers about {record.replica} cycle {record.cycle} were read twice"
            verdict = verdict_of(history, about)
            over = t >= about.due_at or len(about.answers) == len(history.bounds.attribution.sources)
            if record.verdict != verdict:
                yield f"the answers come to {verdict}, and were read as this: {record}"
            acts = verdict is Verdict.STOP and about.waits and not about.decided and history.shutdown is None
            if record.acted != acts:
                yield f"a verdict {'had to act' if acts else 'acted'}: {record}"
            if not about.waits and not over and history.shutdown is None:
                yield f"answers were still to come: {record}"


class LateNodes(JournalMonitor[Fence]):
    """A node that is late for its rendezvous keeps its ranks until its teardown's grace and the last call are over,
    or the join timeout has passed."""

    promise = Promise.LATE
    watched = (Fence,)

    def check(self, fence: Fence, t: float) -> Iterator[str]:
        history = self.history
        node = history.nodes.get(fence.node)
        if node is None or not node.is_here or (replica_id := history.wanted.get(fence.node)) is None:
            return
        replica, bounds = history.replicas[replica_id], history.bounds
        torn_down_s = bounds.teardown.grace if replica.cycle else 0.0
        has_s = min(bounds.rendezvous.join_timeout, torn_down_s + bounds.rendezvous.last_call)
        earliest, known_s = replica.called_at + has_s, history.committed_at - replica.committed_at
        if known_s < has_s - UNKNOWN_S:
            yield f"{fence.node} could read for {known_s:.3f} s that {replica_id} waits for it, and was fenced"
        elif t < earliest:
            yield f"{fence.node} had {earliest - t:.3f} s left to be ready for {replica_id}, and was fenced"


class RanksGivenAway(JournalMonitor[RendezvousClosed]):
    """No rendezvous closes while workers of a lost node of its last cycle may live: their death is proven, the node
    has joined again, or the bound for a node that is out of touch has passed."""

    promise = Promise.GIVEN_AWAY
    watched = (RendezvousClosed,)

    def check(self, closed: RendezvousClosed, t: float) -> Iterator[str]:
        for name, until in self.history.replicas[closed.replica].unproven.items():
            if t < until:
                yield f"{closed.replica} cycle {closed.cycle} closed, and workers on {name} may live"


class Sizes(JournalMonitor[RendezvousClosed | Shutdown]):
    """A rendezvous closes with all of its nodes, or with at least `min_nodes` once no more can come; survivors keep
    their seats; the job stops for want of nodes only if they are too few."""

    promise = Promise.SIZE
    watched = (RendezvousClosed, Shutdown)

    def check(self, record: RendezvousClosed | Shutdown, t: float) -> Iterator[str]:
        history = self.history
        if isinstance(record, RendezvousClosed):
            replica = history.replicas[record.replica]
            if replica.state != "open" or replica.cycle != record.cycle:
                yield f"{record.replica} cycle {record.cycle} was closed and not open"
                return
            yield from self._check_closed(replica, record, t)
        elif isinstance(record, Shutdown) and record.exit_code == EXIT_RETRY:
            if isinstance(history.step.fact, Signalled):
                return
            if any(math.inf in replica.unproven.values() for replica in history.replicas.values()):
                return  # a node that was lost in a suspension, and that nothing proves dead
            short = (
                replica
                for replica in history.replicas.values()
                if replica.state == "open"
                and history.have(replica) < (replica.role.min_nodes or replica.role.nodes_per_replica)
                and not self._may_grow(replica, t)
            )
            if next(short, None) is None:
                yield f"every rendezvous had nodes enough, or more could come: {record}"

    def _may_grow(self, replica: ReplicaHistory, now: float) -> bool:
        history, join_s = self.history, self.history.bounds.rendezvous.join_timeout
        expected = any(
            node.place == "expected" and name not in history.drained for name, node in history.nodes.items()
        )
        more = replica.awaited or (expected and now < history.started_at + join_s)
        return bool(more) and now < replica.called_at + join_s

    def _check_closed(self, replica: ReplicaHistory, closed: RendezvousClosed, now: float) -> Iterator[str]:
        history, role = self.history, replica.role
        what, have, size = f"{replica.id} cycle {closed.cycle}", history.have(replica), len(closed.nodes)
        if len(set(closed.nodes)) < size or closed.world_size != size * role.workers_per_node:
            yield f"{what}: a world of {closed.world_size} ranks on {closed.nodes}"
        for name in closed.nodes:
            node = history.nodes[name]
            if node.place != "spare" and name not in replica.ready:
                yield f"{what} has {name}, which is {node.place}"
        if size != min(have, role.nodes_per_replica):
            yield f"{what} has {size} of {have} nodes, of {role.nodes_per_replica} that it wants"
        if size < role.nodes_per_replica:
            if role.min_nodes is None or size < role.min_nodes:
                yield f"{what} has {size} nodes, fewer than {role.min_nodes or role.nodes_per_replica}"
            if self._may_grow(replica, now):
                yield f"{what} closed with {size} nodes, and more could come"
        if replica.not_before > now:
            yield f"{what} closed {replica.not_before - now:.3f} s before the pause was over"
        if not any(map(history.is_evidence_against, history.nodes)):
            for seat, name in enumerate(replica.nodes[: role.nodes_per_replica]):
                keeps = name in replica.ready or history.nodes[name].place == "spare"
                if keeps and size == role.nodes_per_replica and closed.nodes[seat] != name:
                    yield f"{what}: {name} was here, and {closed.nodes[seat]} has got its ranks"


class ClosesAtOnce(JournalMonitor[Record]):
    """A rendezvous with nodes enough closes in the very commit in which nothing is left to wait for: no preferred
    node, no proof of a death, no decision on a failure, no pause."""

    promise = Promise.PROMPT

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        history = self.history
        # A controller that is behind looks at no deadline before it has taken in the facts that arrived meanwhile.
        if (
            history.shutdown is not None
            or history.suspended
            or isinstance(step.fact, ControllerStarted | DecisionsLate)
        ):
            return
        undecided = {name for each in history.failures.values() if not each.decided for name in each.held}
        for replica in history.replicas.values():
            if replica.state != "open" or replica.awaited or replica.id in undecided or step.t < replica.not_before:
                continue
            proven = all(step.t >= until for until in replica.unproven.values())
            if proven and history.have(replica) >= replica.role.nodes_per_replica:
                yield f"{replica.id} cycle {replica.cycle} had all it waited for, and stays open after {step.fact}"


class QuarantinedNodes(JournalMonitor[Record]):
    """A node that comes back after `quarantine_after` losses is quarantined, and no other."""

    promise = Promise.QUARANTINE

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        decided = {record.node for record in step.decisions if isinstance(record, Quarantined)}
        joined = step.fact.node if isinstance(step.fact, NodeJoined) else ""
        due = {joined} if joined and self.history.nodes[joined].place == "quarantined" else set()
        if decided != due:
            yield f"{sorted(due)} had to be quarantined, and {sorted(decided)} was, after {step.fact}"


class RendezvousBounds(JournalMonitor[RendezvousClosed]):
    """An open rendezvous closes, or the job ends, within the bounds that the plan gives it."""

    promise = Promise.BOUND
    watched = (RendezvousClosed,)

    def check(self, closed: RendezvousClosed, t: float) -> Iterator[str]:
        bounds = self.history.bounds
        late_s = max(bounds.rendezvous.join_timeout, bounds.teardown.grace + bounds.rendezvous.last_call)
        decided_s = bounds.attribution.decision_timeout if bounds.attribution.acts else 0.0
        most_s = late_s + bounds.gives_away_after_s + max(decided_s, bounds.backoff.max) + SLACK_S
        took_s = t - self.history.replicas[closed.replica].called_at  # again, where the store has lost its data
        if took_s > most_s and took_s > (most_s := most_s + self.outage_s()):
            yield f"{closed.replica} cycle {closed.cycle} was open for {took_s:.3f} s, of {most_s:.3f} s"


class RecoveriesRecorded(JournalMonitor[Recovered | FirstStepReached]):
    """A recovery is recorded in the commit in which the last node reports that its workers run, and again with the
    last node's first step; each once a cycle. Its phases add up to the time since the failure was noticed."""

    promise = Promise.RECOVERY
    watched = (Recovered, FirstStepReached)

    def check(self, record: Recovered | FirstStepReached, t: float) -> Iterator[str]:
        replica, phases = self.history.replicas[record.replica], record.phases
        # From here on the model has each moment; how long before the failure was noticed only its reporter knows.
        took_s = record.total_s - phases["decided"]
        is_sum = near(sum(phases.values()), record.total_s) and min(phases.values()) >= 0.0
        if not is_sum or not near(took_s, t - replica.opened_at):
            yield f"{t - replica.opened_at:g} s after its rendezvous opened this was recorded: {record}"
        elif isinstance(record, FirstStepReached) and not near(phases["first_step"], t - replica.recovered_at):
            yield f"{t - replica.recovered_at:g} s after all ran this was recorded: {record}"

    def step_over(self, step: HistoryStep) -> Iterator[str]:
        if not isinstance(step.fact, WorkersStarted | Progress):
            return
        replica, due = self.history.replicas[step.fact.replica], list[type[Record]]()
        if replica.cycle and replica.started.issuperset(replica.nodes):
            due = [Recovered, FirstStepReached] if replica.stepped.issuperset(replica.nodes) else [Recovered]
        if replica.recorded != due:
            names = [[kind.__name__ for kind in kinds] for kinds in (due, replica.recorded)]
            yield f"{replica.id} cycle {replica.cycle} has to have {names[0]}, and has {names[1]}, after {step.fact}"


def near(one_s: float, other_s: float) -> bool:
    """Whether two durations are equal, but for what a float of seconds since the epoch cannot hold."""
    return math.isclose(one_s, other_s, abs_tol=1e-5)


class Endings(JournalMonitor[ReplicaEnded | Shutdown | JobEnded]):
    """A replica is done when all of its nodes are; the job is when all replicas have ended; it ends when every node
    has left, or the time for that is up."""

    promise = Promise.ENDING
    watched = (ReplicaEnded, Shutdown, JobEnded)

    def check(self, record: ReplicaEnded | Shutdown | JobEnded, t: float) -> Iterator[str]:
        history = self.history
        match record:
            case ReplicaEnded(outcome="done"):
                replica = history.replicas[record.replica]
                if not replica.done.issuperset(replica.nodes):
                    yield f"{record.replica} is done, and of {replica.nodes} only {sorted(replica.done)} are"
            case Shutdown():
                if history.shutdown is not None:
                    return
                running = [replica.id for replica in history.replicas.values() if replica.state != "ended"]
                fact, code = history.step.fact, record.exit_code
                if code == EXIT_DONE and running:
                    yield f"the job is done, and {running} have not ended"
                decided = [each for each in history.step.decisions if isinstance(each, RestartDecided)]
                stopped_by = decided[-1].by if decided and decided[-1].action == "stop" else None
                if stopped_by is not None and code != (EXIT_FAILED if stopped_by == "budget" else EXIT_NO_RESTART):
                    yield f"the restart was refused by {stopped_by}, and the job ends with {code}"
                if isinstance(fact, Signalled) and code in (EXIT_DONE, EXIT_FAILED):
                    yield f"{fact} ends the job with {code}"
            case JobEnded():
                bounds, shutdown = history.bounds, history.shutdown
                saves = shutdown is not None and shutdown.checkpoint
                within_s = bounds.teardown.grace + (bounds.teardown.checkpoint_timeout if saves else 0.0) + LEAVE_S
                here = [name for name, node in history.nodes.items() if node.is_here]
                if sorted(record.missing) != sorted(here):
                    yield f"{sorted(here)} had not left, and the end names {sorted(record.missing)}"
                if here and t < history.shut_down_at + within_s:
                    yield f"the job ended {t - history.shut_down_at:.3f} s after its shutdown without {here}"


def count_used(times: list[float], allowance: Allowance, now: float) -> int:
    """How many of what has happened still count: a rate forgets."""
    return sum(allowance.per_s is None or at > now - allowance.per_s for at in times)


def count_left(times: list[float], allowance: Allowance, now: float) -> int:
    return max(0, allowance.count - count_used(times, allowance, now))


class JournalMonitors:
    """All monitors, over one journal. `broken` gets each promise that is broken, with a sentence."""

    def __init__(
        self, plan: Plan, broken: Callable[[Promise, str], None], outage_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.history = JobHistory(plan)
        self._broken = broken
        # In the order in which they are defined: of several that see one defect the first is named.
        self.monitors = [kind(self.history) for kind in JournalMonitor.__subclasses__()]
        for monitor in self.monitors:
            monitor.outage_s = outage_s
        self._of_steps = [each for each in self.monitors if type(each).step_over is not JournalMonitor.step_over]
        self._of_records: dict[type[Record], list[JournalMonitor[Any]]] = {}
        self._begun = self._is_broken = False
        self.broken_by: str | None = None  # the monitor that has seen a broken promise

    def enter(self, entry: Entry, committed_at: float = -math.inf) -> None:
        """The next entry of the journal. After a broken promise none is looked at: the model is off."""
        # A fact ends the decisions on the one before. The last fact of a commit is completed by the caller.
        if isinstance(entry.record, Fact):
            self.complete()
            self._begun = True
        if self._is_broken:
            return
        self.history.committed_at = committed_at
        try:
            for monitor in self._watching(type(entry.record)):
                self._report(monitor, monitor.check(entry.record, entry.t))
            self.history.apply(entry)
        except KeyError as error:  # of a node, replica or failure that the model does not have
            self._is_broken = True
            self._broken(Promise.JOURNAL, f"{error} is unknown, and this names it: {entry.record}")

    def _watching(self, kind: type[Record]) -> list[JournalMonitor[Any]]:
        if (watching := self._of_records.get(kind)) is None:
            watching = self._of_records[kind] = [each for each in self.monitors if issubclass(kind, each.watched)]
        return watching

    def complete(self) -> None:
        """A commit is over: no decision of its last fact is still to come."""
        if self._begun and not self._is_broken:
            for monitor in self._of_steps:
                self._report(monitor, monitor.step_over(self.history.step))
        self._begun = False

    def _report(self, monitor: JournalMonitor[Any], sentences: Iterable[str]) -> None:
        for sentence in sentences:
            self._is_broken, self.broken_by = True, type(monitor).__name__
            self._broken(monitor.promise, sentence)
