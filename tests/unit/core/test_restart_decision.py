"""Whether to restart: the answers of the sources, when they are read, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm.core import restart_decision
from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.jobspec.model import AttributionSpec, HangSpec, ProgressSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionAsked,
    AttributionJudged,
    ControllerStarted,
    JobEnded,
    NodeReady,
    Progress,
    RendezvousClosed,
    RendezvousOpened,
    RestartDecided,
    Shutdown,
    WorkerFailed,
)
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict
from tests.unit.core.fleet import Fleet, plain, plan_of

RESTART, STOP, UNKNOWN, TIMEOUT = Verdict.RESTART, Verdict.STOP, Verdict.UNKNOWN, Verdict.TIMEOUT
TWO = ("lib", "mcp")


def acting(**more: Any) -> AttributionSpec:
    return AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0, **more)


def fleet_of(attribution: AttributionSpec, *, plan: Plan | None = None, **bounds: Any) -> Fleet:
    """Two nodes that run cycle 0, and a spare."""
    fleet = Fleet(plan or plain(nodes=2, spares=1, attribution=attribution, **bounds))
    fleet.join(*fleet.names)
    fleet.started(*fleet.names[:2])
    return fleet


def says(fleet: Fleet, verdict: Verdict, source: str = "lib", *, cycle: int = 0, **more: Any) -> Any:
    """A source answers about the failure of rank 0 in a cycle."""
    answer = Attribution(source=source, verdict=verdict, **more)
    return fleet.tell(Attributed(replica="main-0", cycle=cycle, rank=0, attribution=answer))


def kinds(decisions: Any) -> list[type]:
    return [type(decision) for decision in decisions]


# --------------------------------------------------------------------------------------- what is read

# the sources' answers, how they are aggregated → the verdict
READINGS = [
    ({"lib": RESTART, "mcp": STOP}, "any", STOP),
    ({"lib": RESTART, "mcp": STOP}, "all", RESTART),
    ({"lib": STOP, "mcp": STOP}, "all", STOP),
    ({"lib": STOP}, "all", RESTART),
    ({"lib": STOP}, "any", STOP),
    ({"lib": UNKNOWN, "mcp": UNKNOWN}, "any", UNKNOWN),
    ({"lib": UNKNOWN}, "any", TIMEOUT),
    ({"lib": TIMEOUT, "mcp": RESTART}, "any", RESTART),
    ({"lib": UNKNOWN, "mcp": STOP}, "all", RESTART),
    ({}, "all", TIMEOUT),
]


@pytest.mark.parametrize(("said", "how", "verdict"), READINGS)
def test_answers_add_up(said: dict[str, Verdict], how: Any, verdict: Verdict) -> None:
    """One STOP is enough with `any`; with `all` every source must say it; a source without an answer counts as
    TIMEOUT."""
    answers = {name: Attribution(source=name, verdict=each) for name, each in said.items()}
    assert restart_decision.read(TWO, answers, how).verdict is verdict


# --------------------------------------------------------------------------------------- when it acts


def test_a_failure_is_asked_about_and_the_rendezvous_opens_at_once() -> None:
    """Teardown and rendezvous begin with the failure, not with the verdict; the decision waits."""
    fleet = fleet_of(acting())
    assert kinds(fleet.fail("n1")) == [AttributionAsked, RendezvousOpened]
    asked = fleet.said(AttributionAsked)[0]
    assert (asked.rank, asked.node, asked.sources, asked.holds) == (0, "n1", ("lib",), True)


def test_restart_is_decided_when_the_rendezvous_could_close() -> None:
    """A verdict that has arrived by then costs no time."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    assert says(fleet, RESTART) == []
    fleet.ready("n1")
    assert kinds(fleet.ready("n2")) == [AttributionJudged, RestartDecided, RendezvousClosed]
    assert fleet.said(AttributionJudged)[0].waited_s == 0.0
    assert fleet.said(RestartDecided)[0].by == "policy"


def test_the_rendezvous_waits_for_a_late_verdict() -> None:
    """All nodes are ready, and the last answer closes the rendezvous."""
    fleet = fleet_of(acting(enable_mcp=True))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    fleet.now += 3.0
    assert says(fleet, RESTART) == []
    fleet.now += 1.0
    assert kinds(says(fleet, UNKNOWN, "mcp")) == [AttributionJudged, RestartDecided, RendezvousClosed]
    assert fleet.said(AttributionJudged)[0].waited_s == 4.0


@pytest.mark.parametrize("verdict", [UNKNOWN, TIMEOUT, RESTART])
def test_each_verdict_but_stop_restarts(verdict: Verdict) -> None:
    """A source that fails never stops a job."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    assert kinds(says(fleet, verdict, problem="connection refused")) == [
        AttributionJudged,
        RestartDecided,
        RendezvousClosed,
    ]
    assert fleet.said(RestartDecided)[0].action == "restart_replica"


def test_without_an_answer_the_job_restarts_after_the_decision_timeout() -> None:
    """The wait is bounded from the failure on, and its end is a deadline of the controller's."""
    fleet = fleet_of(acting())
    failed_at = fleet.now
    fleet.fail("n1")
    fleet.now += 4.0
    fleet.ready("n1", "n2")
    assert next_deadline(fleet.job) == failed_at + 10.0
    assert fleet.said(RestartDecided) == []
    fleet.later(6.0)
    assert fleet.said(AttributionJudged)[0].verdict is TIMEOUT
    assert len(fleet.said(RendezvousClosed)) == 2


def test_stop_ends_the_job_before_the_rendezvous_is_ready() -> None:
    """A STOP does not wait for nodes: the job shuts down with 93, once."""
    fleet = fleet_of(acting(enable_mcp=True))
    fleet.fail("n1")
    assert kinds(says(fleet, STOP, explanation="no module named x")) == [AttributionJudged, RestartDecided, Shutdown]
    assert fleet.said(AttributionJudged)[0].acted
    assert (fleet.said(RestartDecided)[0].action, fleet.said(RestartDecided)[0].by) == ("stop", "attribution")
    assert fleet.said(Shutdown)[0].exit_code == 93
    assert "no module named x" in fleet.said(Shutdown)[0].reason
    fleet.ready("n1", "n2")
    assert len(fleet.said(RendezvousClosed)) == 1


def test_stop_after_the_rendezvous_is_recorded_and_dropped() -> None:
    """A late STOP is in the journal, and nothing follows from it, at once or later."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    fleet.later(10.0)
    assert says(fleet, STOP) == []
    assert len(fleet.said(Attributed)) == 1
    fleet.fail("n1")
    assert fleet.said(Shutdown) == []


def test_stale_keys_never_match() -> None:
    """An answer about another cycle, rank, replica or generation, from an unknown source, or given twice, is no
    fact."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    answer = Attribution(source="lib", verdict=STOP)
    about = {"replica": "main-0", "cycle": 0, "rank": 0, "generation": 0, "attribution": answer}
    for wrong in ({"cycle": 1}, {"rank": 1}, {"rank": None}, {"replica": "x-0"}, {"generation": 1}):
        assert fleet.tell(Attributed(**{**about, **wrong})) is None
    assert says(fleet, STOP, "who") is None
    assert says(fleet, RESTART) == []
    assert says(fleet, STOP) is None


def test_dry_run_waits_for_no_source() -> None:
    """The restart begins at once; the verdict is recorded when it arrives, with what it would have done."""
    fleet = fleet_of(AttributionSpec(enable_lib=True, dry_run=True))
    assert kinds(fleet.fail("n1")) == [AttributionAsked, RestartDecided, RendezvousOpened]
    assert kinds(fleet.ready("n1", "n2"))[-1] is RendezvousClosed
    assert kinds(says(fleet, STOP, explanation="no module named x")) == [AttributionJudged]
    judged = fleet.said(AttributionJudged)[0]
    assert (judged.verdict, judged.acted, judged.why) == (STOP, False, "dry run; lib: STOP, no module named x")


def test_dry_run_judges_without_an_answer_once_its_time_is_up() -> None:
    """A source that never answers leaves a record too."""
    fleet = fleet_of(AttributionSpec(enable_lib=True, dry_run=True, timeout=60.0))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    assert next_deadline(fleet.job) == fleet.now + 60.0
    fleet.later(60.0)
    assert fleet.said(AttributionJudged)[0].verdict is TIMEOUT
    assert next_deadline(fleet.job) is None


def test_a_job_that_ends_first_is_judged_by_what_is_there() -> None:
    """The failure is judged right before the end, with or without an answer."""
    fleet = fleet_of(AttributionSpec(enable_lib=True, dry_run=True), max_restarts=0)
    fleet.fail("n1")
    fleet.leave("n1", "n2", "n3")
    assert [type(entry.record) for entry in fleet.journal[-2:]] == [AttributionJudged, JobEnded]
    assert fleet.said(AttributionJudged)[0].verdict is TIMEOUT


def test_without_sources_nothing_is_asked() -> None:
    """There is no record and no wait."""
    fleet = fleet_of(AttributionSpec(dry_run=False, enable_lib=False))
    assert kinds(fleet.fail("n1")) == [RestartDecided, RendezvousOpened]


def test_a_new_controller_comes_to_the_same_outcome() -> None:
    """The answers are in the journal: a controller that replays it has them, and the deadline, too."""
    from nvrx_slurm.controller.controller import replay
    from nvrx_slurm.core.state import new_job

    fleet = fleet_of(acting(enable_mcp=True))
    fleet.fail("n1")
    says(fleet, RESTART)
    fleet.ready("n1", "n2")
    again = new_job(fleet.plan)
    assert replay(again, fleet.journal) == []
    assert next_deadline(again) == next_deadline(fleet.job)
    fleet.job = again
    assert kinds(says(fleet, STOP, "mcp")) == [AttributionJudged, RestartDecided, Shutdown]


@pytest.mark.parametrize("policy", ["ignore", "fail_job"])
def test_what_restarts_nothing_waits_for_nothing(policy: Any) -> None:
    """If the policy ends the replica or the job anyway, a verdict is recorded and not awaited."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=2, workers_per_node=2, on_failure=policy)
    fleet = fleet_of(acting(), plan=plan_of(role, spares=1, attribution=acting()))
    assert kinds(fleet.fail("n1"))[:2] == [AttributionAsked, RestartDecided]
    assert says(fleet, STOP) is not None
    assert not fleet.said(AttributionJudged)[0].acted


def test_restart_job_holds_every_rendezvous_that_it_opens() -> None:
    """The other replicas' rendezvous wait for the verdict, too."""
    policy = RolePlan(name="policy", command=("x",), on_failure="restart_job")
    rollout = RolePlan(name="rollout", command=("x",))
    fleet = Fleet(plan_of(policy, rollout, spares=1, attribution=acting()))
    fleet.join(*fleet.names)
    fleet.fail("n1", replica="policy-0")
    fleet.ready("n2", replica="rollout-0")
    assert len(fleet.said(RendezvousClosed)) == 2
    fleet.ready("n1", replica="policy-0")
    answer = Attribution(source="lib", verdict=RESTART)
    closed = fleet.tell(Attributed(replica="policy-0", cycle=0, rank=0, attribution=answer))
    assert kinds(closed) == [AttributionJudged, RestartDecided, RendezvousClosed, RendezvousClosed]


@pytest.mark.parametrize("attribution", [AttributionSpec(enable_lib=False), acting()])
def test_a_job_that_may_not_restart_does_not_come_back_for_more_nodes(attribution: AttributionSpec) -> None:
    """If too few nodes are left for the rendezvous, the core first decides whether to restart at all, and counts
    that."""
    for allowed, code in ((1, 75), (0, 1)):
        losses = Allowance(count=allowed)
        plan = plain(
            spares=0, attribution=attribution, progress=ProgressSpec(max_no_progress_cycles=9), max_node_losses=losses
        )
        fleet = Fleet(plan)
        fleet.join("n1", "n2")
        fleet.lose("n1")
        fleet.ready("n2")
        assert next_deadline(fleet.job) is not None
        fleet.later(10.0)
        assert [each.exit_code for each in fleet.said(Shutdown)] == [code]
        assert [each.cycle for each in fleet.said(RestartDecided)] == [0]
        assert len(fleet.job.nodes_lost_at) == allowed


def test_a_stop_wins_over_too_few_nodes() -> None:
    """With 75 Slurm would start the job again, and it would fail again."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    fleet.lose("n1")
    fleet.lose("n3")
    assert fleet.ready("n2") == []
    says(fleet, STOP)
    assert [each.exit_code for each in fleet.said(Shutdown)] == [93]


def test_old_cases_are_forgotten() -> None:
    """A job may fail thousands of times; an answer that arrives a few cycles later still finds its failure."""
    fleet = fleet_of(acting(), max_restarts=99)
    for cycle in range(3 * restart_decision.KEPT):
        fleet.fail("n1")
        says(fleet, RESTART, cycle=cycle)
        fleet.ready("n1", "n2")
    assert len(fleet.job.restart_decisions) == restart_decision.KEPT
    assert says(fleet, STOP, cycle=0) is None


@pytest.mark.parametrize(
    ("attribution", "why"), [(acting(), "nothing is restarted; "), (AttributionSpec(enable_lib=True), "dry run; ")]
)
def test_what_is_not_acted_on_says_why(attribution: AttributionSpec, why: str) -> None:
    """The reason for a role whose failures are ignored is not a dry run."""
    ignored = RolePlan(name="main", command=("x",), on_failure="ignore")
    fleet = Fleet(plan_of(ignored, RolePlan(name="other", command=("x",)), attribution=attribution))
    fleet.join(*fleet.names)
    fleet.fail("n1")
    says(fleet, STOP)
    assert fleet.said(AttributionJudged)[0].why.startswith(why)


# --------------------------------------------------------------------------------------- blamed nodes


def blame(fleet: Fleet, *nodes: str, confidence: float = 0.9) -> Any:
    return says(fleet, RESTART, scope=Scope.NODE, nodes=nodes, confidence=confidence)


def test_a_blamed_node_is_not_chosen_while_another_can_be() -> None:
    """The spare takes its ranks, and the blamed node becomes the spare of last resort."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    blame(fleet, "n1")
    fleet.ready("n1", "n2")
    assert fleet.said(AttributionJudged)[0].blamed == ("n1",)
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n3", "n2")
    fleet.lose("n3")
    fleet.ready("n2")
    fleet.later(10.0)
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


@pytest.mark.parametrize(("nodes", "confidence"), [(("n1",), 0.4), (("n1", "n2"), 0.9), (("n3",), 0.9)])
def test_blame_needs_reason(nodes: tuple[str, ...], confidence: float) -> None:
    """Low confidence, all nodes at once, or a node that was no member are no reason."""
    fleet = fleet_of(acting())
    fleet.fail("n1")
    blame(fleet, *nodes, confidence=confidence)
    fleet.ready("n1", "n2")
    assert fleet.said(AttributionJudged)[0].blamed == ()
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_suspects_of_other_jobs_are_standby() -> None:
    """A job begins on clean nodes if it can."""
    fleet = Fleet(plain(nodes=2, spares=1), suspects=("n1",))
    fleet.join("n1", "n2", "n3")
    assert fleet.said(RendezvousClosed)[0].nodes == ("n2", "n3")


# ------------------------------------------------------------------------------------------- progress


def stepping(**more: Any) -> Fleet:
    return fleet_of(
        AttributionSpec(enable_lib=False), max_restarts=9, progress=ProgressSpec(max_no_progress_cycles=2, **more)
    )


def run_to(fleet: Fleet, first: int, last: int) -> Any:
    """A cycle reports its first step and fails at its last one, and its nodes get ready."""
    cycle = fleet.job.replicas["main-0"].cycle
    fleet.tell(Progress(**fleet.by("n1"), replica="main-0", cycle=cycle, rank=0, step=first))
    fleet.tell(WorkerFailed(**fleet.by("n1"), replica="main-0", cycle=cycle, rank=0, exit_code=1, step=last))
    return fleet.ready("n1", "n2")


def test_a_job_that_gets_nowhere_stops() -> None:
    """Two cycles in a row that end where the one before had ended are enough: 93."""
    fleet = stepping()
    run_to(fleet, 101, 150)
    run_to(fleet, 101, 150)
    assert fleet.said(Shutdown) == []
    assert kinds(run_to(fleet, 101, 149)) == [RestartDecided, Shutdown]
    assert [each.no_progress for each in fleet.said(RestartDecided)] == [0, 1, 2]
    assert fleet.said(Shutdown)[0].exit_code == 93
    assert fleet.said(RestartDecided)[-1].by == "progress"


def test_one_new_step_is_progress() -> None:
    """The count starts again once a cycle gets further than all before it."""
    fleet = stepping()
    for last in (150, 150, 151, 151, 152):
        run_to(fleet, 101, last)
    assert [each.no_progress for each in fleet.said(RestartDecided)] == [0, 1, 0, 1, 0]


def test_fewer_steps_than_asked_for_are_none() -> None:
    """`min_progress_steps` is what a cycle must add."""
    fleet = stepping(min_progress_steps=10)
    for last in (150, 159, 169):
        run_to(fleet, 101, last)
    assert [each.no_progress for each in fleet.said(RestartDecided)] == [0, 1, 0]


def test_steps_that_nodes_find_in_files_count() -> None:
    """What a node reads after the teardown counts for the decision."""
    fleet = stepping()
    for step in (100, 200):
        fleet.fail("n1")
        cycle = fleet.job.replicas["main-0"].cycle
        for node in ("n1", "n2"):
            fleet.tell(NodeReady(**fleet.by(node), replica="main-0", cycle=cycle, port=1, step=step))
    assert [each.no_progress for each in fleet.said(RestartDecided)] == [0, 0]


def test_a_first_cycle_without_a_first_step_counts_in_full() -> None:
    """An iteration file shows only where the cycle ended: a needless stop is worse than one more cycle."""
    fleet = fleet_of(
        AttributionSpec(enable_lib=False), progress=ProgressSpec(max_no_progress_cycles=1, min_progress_steps=10)
    )
    for cycle, reached in ((1, 500), (2, 505)):
        fleet.fail("n1")
        for node in ("n1", "n2"):
            fleet.tell(NodeReady(**fleet.by(node), replica="main-0", cycle=cycle, port=1, step=reached))
    assert [each.no_progress for each in fleet.said(RestartDecided)] == [0, 1]


def test_progress_is_judged_once_the_failed_replica_has_reported_its_steps() -> None:
    """With restart_job another replica may be ready first; what the failed replica's nodes find in files still
    counts."""
    policy = RolePlan(name="policy", command=("x",), on_failure="restart_job")
    rollouts = RolePlan(name="arollout", command=("x",))
    for roles, ours in (((policy, rollouts), "n1"), ((rollouts, policy), "n2")):
        fleet = Fleet(plan_of(*roles, max_restarts=9, progress=ProgressSpec(max_no_progress_cycles=2)))
        fleet.join(*fleet.names)
        other = {"n1": "n2", "n2": "n1"}[ours]
        for cycle in range(1, 4):
            fleet.fail(ours, replica="policy-0")
            assert fleet.ready(other, replica="arollout-0") == []
            assert next_deadline(fleet.job) == fleet.now + fleet.plan.fault_tolerance.rendezvous.join_timeout
            ready = NodeReady(**fleet.by(ours), replica="policy-0", cycle=cycle, port=1, step=100 * cycle)
            decided, *closed = fleet.tell(ready) or []
            assert kinds([decided, *closed]) == [RestartDecided, RendezvousClosed, RendezvousClosed]
            assert [each.replica for each in closed] == ["policy-0", "arollout-0"], "the one that failed comes first"
        assert [each.no_progress for each in fleet.said(RestartDecided)] == [0, 0, 0]


# --------------------------------------------------------------------------------------------- budget


def test_budget_is_the_last_to_be_asked() -> None:
    """A spent budget ends the job with 1, unless a verdict ends it with 93 first."""
    for verdict, code in ((RESTART, 1), (STOP, 93)):
        fleet = fleet_of(acting(), max_restarts=0)
        fleet.fail("n1")
        says(fleet, verdict)
        fleet.ready("n1", "n2")
        assert fleet.said(Shutdown)[0].exit_code == code


def test_a_rate_forgets() -> None:
    """With two an hour, the third failure within the hour is one too many, and the one after that hour is not."""
    fleet = fleet_of(AttributionSpec(enable_lib=False), max_restarts=Allowance(count=2, per_s=3600.0))
    for pause_s in (0.0, 1800.0, 1801.0, 1800.0):
        fleet.now += pause_s
        fleet.fail("n1")
        fleet.ready("n1", "n2")
    assert fleet.said(Shutdown) == []
    fleet.fail("n1")
    assert fleet.said(Shutdown)[0].reason.startswith("restart budget spent (2 of 2 per 1h)")


def test_the_job_has_a_budget_of_its_own() -> None:
    """Replicas share it, however much each has left."""
    role = RolePlan(name="main", command=("x",), replicas=2)
    fleet = Fleet(plan_of(role, max_job_restarts=Allowance(count=1)))
    fleet.join("n1", "n2")
    fleet.fail("n1", replica="main-0")
    fleet.ready("n1", replica="main-0")
    fleet.fail("n2", replica="main-1")
    assert fleet.said(Shutdown)[0].reason.startswith("the job's restart budget is spent (1 of 1)")


def test_lost_nodes_and_failed_workers_are_counted_apart() -> None:
    """Neither spends the other's budget."""
    fleet = fleet_of(AttributionSpec(enable_lib=False), max_restarts=1, max_node_losses=Allowance(count=1))
    fleet.lose("n1")
    fleet.ready("n2")
    fleet.fail("n3")
    fleet.ready("n2", "n3")
    assert fleet.said(Shutdown) == []
    fleet.lose("n2")
    assert fleet.said(Shutdown)[0].reason.startswith("budget for lost nodes spent (1 of 1)")


def test_budgets_live_across_generations() -> None:
    """A requeued job has spent what it spent before."""
    fleet = fleet_of(AttributionSpec(enable_lib=False), max_restarts=1, max_preemptions=Allowance(count=1))
    fleet.fail("n1")
    fleet.requeue()
    fleet.join("n1", "n2")
    fleet.fail("n1")
    assert fleet.said(Shutdown)[-1].exit_code == 1
    fleet.requeue()
    assert fleet.said(Shutdown)[-1].reason == "preempted or requeued too often (2 of 1)"


# ------------------------------------------------------------------------------- one end, one controller


def test_the_first_failure_that_ends_the_job_is_the_last_that_is_decided() -> None:
    """Two replicas are found hung in the same moment, and there is no budget: there is one shutdown."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=2, replicas=2)
    fleet = Fleet(plan_of(role, max_restarts=0, hang=HangSpec(exit_skew=60.0)))
    fleet.join(*fleet.names)
    fleet.done("n1", replica="main-0")
    fleet.done("n3", replica="main-1")
    assert kinds(fleet.later(60.0)) == [RestartDecided, Shutdown]


def test_nothing_of_an_older_generation_is_decided() -> None:
    """A rendezvous that was open when the job was preempted is long overdue when the job is back."""
    fleet = fleet_of(acting(), rendezvous__join_timeout=60.0)
    fleet.fail("n1")
    fleet.now += 3600.0
    assert fleet.tell(ControllerStarted(epoch=2, host="head", pid=1)) == []
    assert kinds(fleet.requeue()) == [RendezvousOpened]


# ------------------------------------------------------------------------------------ whole records


def requeued(**bounds: Any) -> Fleet:
    """Generation 1 of a job; rank 3 is the second of n2."""
    fleet = fleet_of(**bounds) if "attribution" in bounds else fleet_of(acting(), **bounds)
    fleet.requeue()
    fleet.join(*fleet.names)
    return fleet


def crash(fleet: Fleet, *, step: int | None = 7) -> Any:
    cycle = fleet.job.replicas["main-0"].cycle
    about: Any = {"replica": "main-0", "cycle": cycle, "rank": 3, "exit_code": 1, "step": step}
    return fleet.tell(WorkerFailed(**fleet.by("n2"), **about))


def answers(fleet: Fleet, verdict: Verdict, **more: Any) -> Any:
    about = Attribution(source="lib", verdict=verdict, **more)
    return fleet.tell(Attributed(replica="main-0", cycle=0, rank=3, generation=1, attribution=about))


def test_each_record_says_which_failure_it_is_about() -> None:
    fleet = requeued()
    failure = {"replica": "main-0", "cycle": 0, "rank": 3}
    asked = AttributionAsked(**failure, generation=1, node="n2", sources=("lib",), holds=True)
    assert (crash(fleet) or [None])[0] == asked
    judged, decided, _ = answers(fleet, STOP)
    assert judged == AttributionJudged(**failure, generation=1, verdict=STOP, acted=True, why="lib: STOP")
    cause = decided.cause
    left = fleet.plan.fault_tolerance.max_restarts.count
    told: dict[str, Any] = {**failure, "node": "n2", "cause": cause, "step": 7, "restarts_left": left}
    assert decided == RestartDecided(**told, action="stop", by="attribution")


def test_a_spent_budget_and_a_lack_of_progress_are_named_as_what_stopped_the_job() -> None:
    for by, left, bounds in (
        ("budget", 0, {"max_restarts": 0}),
        ("progress", 5, {"max_restarts": 5, "progress": ProgressSpec(max_no_progress_cycles=1)}),
    ):
        fleet = requeued(attribution=AttributionSpec(enable_lib=False), **bounds)
        crash(fleet, step=None)
        fleet.ready("n1", "n2")
        [decided], [shutdown] = fleet.said(RestartDecided), fleet.said(Shutdown)
        assert (decided.action, decided.by, decided.restarts_left) == ("stop", by, left)
        assert decided.cause in shutdown.reason


@pytest.mark.parametrize(("hangs", "waits"), [(True, False), (True, True), (False, False)])
def test_stacks_are_written_down_at_the_end_unless_a_rendezvous_has_had_them_written(
    hangs: bool, waits: bool
) -> None:
    fleet = fleet_of(acting() if waits else AttributionSpec(enable_lib=False), max_restarts=0)
    (fleet.hang if hangs else fleet.fail)("n1")
    if waits:
        says(fleet, STOP)
    [shutdown] = fleet.said(Shutdown)
    assert shutdown.dump == (fleet.said(RestartDecided)[0].cause if hangs and not waits else None)


def test_a_dry_runs_open_question_is_not_forgotten() -> None:
    """Only a decided and judged one is forgotten: each failure has its verdict on record."""
    fleet = fleet_of(AttributionSpec(enable_lib=True, dry_run=True, timeout=600.0), max_restarts=99)
    for _ in range(3 * restart_decision.KEPT):
        fleet.fail("n1")
        fleet.ready("n1", "n2")
    fleet.later(600.0)
    assert len(fleet.said(AttributionJudged)) == 3 * restart_decision.KEPT


def test_replicas_that_restart_alone_wait_for_their_own_verdict_alone() -> None:
    role = RolePlan(name="main", command=("x",), replicas=2)
    fleet = Fleet(plan_of(role, attribution=acting()))
    fleet.join("n1", "n2")
    fleet.fail("n1", replica="main-0")
    fleet.fail("n2", replica="main-1")
    fleet.ready("n1", replica="main-0")
    fleet.ready("n2", replica="main-1")
    answer = Attribution(source="lib", verdict=RESTART)
    [*_, closed] = fleet.tell(Attributed(replica="main-1", cycle=0, rank=0, attribution=answer)) or []
    assert isinstance(closed, RendezvousClosed)
    assert closed.replica == "main-1"


def test_with_all_a_source_that_does_not_say_stop_settles_it() -> None:
    """The other answer could not change the verdict, and is not waited for; a first STOP leaves the verdict open."""
    for first, closed in ((RESTART, 2), (UNKNOWN, 2), (STOP, 1)):
        fleet = fleet_of(acting(enable_mcp=True, aggregation="all"))
        fleet.fail("n1")
        fleet.ready("n1", "n2")
        says(fleet, first)
        assert len(fleet.said(RendezvousClosed)) == closed
        for judged in fleet.said(AttributionJudged):
            assert judged.why.endswith("; mcp: not waited for")


def test_what_is_not_answered_in_time_is_reported_as_such() -> None:
    fleet = fleet_of(acting(enable_mcp=True))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    says(fleet, RESTART)
    fleet.later(10.0)
    assert fleet.said(AttributionJudged)[0].why == "lib: RESTART; mcp: no answer in time"


def test_a_source_that_has_not_answered_is_named_with_what_that_means() -> None:
    """By default the source's time is up."""
    silent = restart_decision.AggregatedVerdict(TIMEOUT, "lib: no answer in time", ())
    assert restart_decision.read(("lib",), {}, "any") == silent
    assert restart_decision.read(("lib",), {}, "any", over=False).why == "lib: not waited for"


def test_a_dry_runs_stop_is_judged_at_once_and_ends_nothing_while_the_steps_are_awaited() -> None:
    """The rendezvous waits for the steps of its nodes, not for the verdict."""
    dry = AttributionSpec(enable_lib=True, dry_run=True)
    fleet = fleet_of(dry, progress=ProgressSpec(max_no_progress_cycles=2))
    assert kinds(fleet.fail("n1")) == [AttributionAsked, RendezvousOpened]
    assert kinds(says(fleet, STOP)) == [AttributionJudged]
    assert kinds(fleet.ready("n1", "n2")) == [RestartDecided, RendezvousClosed]


def test_a_stop_in_a_job_that_ends_already_is_recorded_as_that() -> None:
    fleet = fleet_of(acting())
    fleet.fail("n1")
    fleet.signal("cancel")
    [judged] = says(fleet, STOP)
    assert (judged.acted, judged.why) == (False, "the job ends already; lib: STOP")


def test_without_a_bound_on_progress_no_replica_waits_for_anothers_steps() -> None:
    """The rendezvous waits for the verdict, which has arrived."""
    policy = RolePlan(name="policy", command=("x",), on_failure="restart_job")
    fleet = Fleet(plan_of(policy, RolePlan(name="rollout", command=("x",)), attribution=acting()))
    fleet.join("n1", "n2")
    fleet.fail("n1", replica="policy-0")
    answer = Attribution(source="lib", verdict=RESTART)
    assert fleet.tell(Attributed(replica="policy-0", cycle=0, rank=0, attribution=answer)) == []
    decisions = fleet.ready("n2", replica="rollout-0")
    assert kinds(decisions) == [AttributionJudged, RestartDecided, RendezvousClosed]


def test_the_end_of_a_job_that_no_restart_can_help_says_why() -> None:
    fleet = fleet_of(AttributionSpec(enable_lib=False), progress=ProgressSpec(max_no_progress_cycles=1))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    [decided], [shutdown] = fleet.said(RestartDecided), fleet.said(Shutdown)
    stuck = "no progress: 1 cycles in a row have made no new step (limit 1)"
    assert shutdown == Shutdown(
        exit_code=93, reason=f"main-0: a restart cannot help: {stuck}; last: {decided.cause}", dump=None
    )


def test_blame_of_a_node_counts_from_half_a_chance_on() -> None:
    """It counts for the only node, too: one node of one is no sign of a common cause."""
    answer = Attribution(
        source="lib", verdict=RESTART, scope=Scope.NODE, nodes=("n1",), confidence=restart_decision.BLAME_CONFIDENCE
    )
    assert restart_decision.read(("lib",), {"lib": answer}, "any").blamed == ("n1",)
    fleet = Fleet(plain(nodes=1, spares=1, attribution=acting()))
    fleet.join("n1", "n2")
    fleet.fail("n1")
    blame(fleet, "n1")
    fleet.ready("n1")
    assert fleet.said(AttributionJudged)[0].blamed == ("n1",)


def test_every_open_question_is_judged_when_the_job_ends() -> None:
    """Each failure has one verdict: those that were judged before get no second one."""
    fleet = fleet_of(AttributionSpec(enable_lib=True, dry_run=True), max_restarts=9)
    for _ in range(3):
        fleet.fail("n1")
        fleet.ready("n1", "n2")
    says(fleet, UNKNOWN, cycle=0)
    fleet.signal("cancel")
    fleet.leave("n1", "n2", "n3")
    assert [judged.cycle for judged in fleet.said(AttributionJudged)] == [0, 1, 2]
    assert [asked.cycle for asked in fleet.said(AttributionAsked)] == [0, 1, 2]
    assert isinstance(fleet.journal[-1].record, JobEnded)


def test_questions_of_one_moment_are_judged_in_one_moment() -> None:
    """No answer about either has arrived: their time is up together."""
    role = RolePlan(name="main", command=("x",), replicas=2)
    dry = AttributionSpec(enable_lib=True, dry_run=True, timeout=60.0)
    fleet = Fleet(plan_of(role, attribution=dry))
    fleet.join("n1", "n2")
    for number, node in enumerate(("n1", "n2")):
        fleet.fail(node, replica=f"main-{number}")
        fleet.ready(node, replica=f"main-{number}")
    assert kinds(fleet.later(60.0)) == [AttributionJudged, AttributionJudged]
