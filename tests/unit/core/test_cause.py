"""The cause of a failure that its peers report first is settled when the next rendezvous could close."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nvrx_slurm.controller.controller import replay
from nvrx_slurm.core.cause import evidence_of, outranks
from nvrx_slurm.core.state import Failure, new_job
from nvrx_slurm.jobspec.model import AttributionSpec, HangSpec, ProgressSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionAsked,
    AttributionJudged,
    Fence,
    NodeFenced,
    NodeIsolated,
    RendezvousClosed,
    RendezvousOpened,
    RestartDecided,
    Shutdown,
    WorkerFailed,
)
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from tests.unit.core.fleet import Fleet, plain, plan_of

DRY = AttributionSpec(enable_lib=True)
ACTS = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)


class PeersFleet(Fleet):
    """A fleet whose workers lose their peers."""

    def ends(self, node: str, rank: int, *, replica: str = "main-0", cycle: int = 0, **how: Any) -> list[Any] | None:
        return self.tell(WorkerFailed(**self.by(node), replica=replica, cycle=cycle, rank=rank, **how))

    def loses_peer(self, node: str, rank: int, *, replica: str = "main-0", cycle: int = 0) -> list[Any] | None:
        return self.ends(node, rank, replica=replica, cycle=cycle, exit_code=1, error="R: reset", peer_lost=True)

    def decided(self) -> RestartDecided:
        [decided] = self.said(RestartDecided)
        return decided


def started(nodes: int = 2, spares: int = 1, **bounds: Any) -> PeersFleet:
    fleet = PeersFleet(plain(nodes=nodes, spares=spares, **bounds))
    fleet.join(*fleet.names)
    return fleet


def settled(fleet: PeersFleet) -> tuple[str, int | None]:
    """Node and rank of the one decision; a controller that takes over decides the same."""
    assert replay(new_job(fleet.plan), fleet.journal) == []
    return fleet.decided().node, fleet.decided().rank


def test_teardown_begins_with_the_symptom_and_the_decision_waits():
    """The rendezvous opens at once; the action and its cause are decided when it could close."""
    fleet = started()
    decisions = fleet.loses_peer("n1", 0)
    assert [type(each) for each in decisions or []] == [RendezvousOpened]
    fleet.lose("n2")
    fleet.ready("n1")
    assert settled(fleet) == ("n2", None)
    assert isinstance(fleet.journal[-1].record, RendezvousClosed)


def test_late_node_is_what_its_peers_have_lost():
    """A node without power, whose loss the failure detector has not found yet, is fenced because it is late."""
    fleet = started(teardown__grace=10.0, rendezvous__last_call=5.0, max_restarts=Allowance(count=0))
    fleet.loses_peer("n1", 0)
    fleet.ready("n1")
    assert fleet.later(15.0) == [Fence(node="n2", incarnation="n2.0")]
    fleet.later(fleet.plan.fault_tolerance.gives_away_after_s)
    assert settled(fleet) == ("n2", None)
    assert (fleet.decided().action, fleet.decided().cause) == (
        "restart_replica",
        "n2 lost: no answer to the teardown",
    )


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "fenced by its kernel"])
def test_late_node_without_a_sign_of_life_is_what_hung_workers_waited_for(answers: bool):
    """The peers of a node without power are hung before the failure detector could find it lost, and it is fenced
    because it is late. It is the cause once the clock proves it dead; if its kernel answers, it was only late."""
    hang = HangSpec(step_timeout=1.0)
    fleet = started(hang=hang, teardown__grace=1.0, rendezvous__last_call=1.0, max_restarts=Allowance(count=1))
    fleet.hang("n1", limit_s=1.0)
    fleet.ready("n1")
    assert fleet.later(2.0) == [Fence(node="n2", incarnation="n2.0")]
    if answers:
        fleet.tell(NodeFenced(node="n2", incarnation="n2.0", proof="its kernel"))
    else:
        fleet.later(fleet.plan.fault_tolerance.gives_away_after_s)
    assert settled(fleet) == (("n1", 0) if answers else ("n2", None))


def test_late_node_that_nothing_replaces_is_the_cause_of_the_end():
    """The rendezvous has timed out before the failure detector has found the loss: the job ends, and names the
    node."""
    fleet = started(spares=0, rendezvous__join_timeout=15.0)
    fleet.loses_peer("n1", 0)
    fleet.ready("n1")
    fleet.later(15.0)
    assert settled(fleet) == ("n2", None)
    assert [each.exit_code for each in fleet.said(Shutdown)] == [75]


def test_of_several_late_nodes_the_first_is_asked_about():
    """In a dry run the sources are asked once the cause is known, in the step that fences the late nodes."""
    fleet = started(nodes=3, spares=2, teardown__grace=10.0, rendezvous__last_call=5.0, attribution=DRY)
    fleet.loses_peer("n1", 0)
    fleet.ready("n1")
    about: dict[str, Any] = {"replica": "main-0", "cycle": 0, "generation": 0, "rank": None}
    assert fleet.later(15.0) == [
        Fence(node="n2", incarnation="n2.0"),
        Fence(node="n3", incarnation="n3.0"),
        AttributionAsked(**about, node="n2", sources=("lib",), holds=False),
    ]


def test_late_node_is_not_the_cause_of_what_was_reported_before():
    """The failure of another worker is known: a node that is late after that is only late."""
    fleet = started(nodes=3, teardown__grace=10.0, rendezvous__last_call=5.0)
    fleet.loses_peer("n1", 0)
    fleet.ends("n3", 2, signal=9)
    fleet.ready("n1", "n3")
    fleet.later(15.0)
    fleet.later(fleet.plan.fault_tolerance.gives_away_after_s)
    assert settled(fleet) == ("n3", 2)


def test_lost_node_spends_no_restart():
    """The budget follows the cause: without a restart left for failed workers, the job goes on after a node's
    loss."""
    fleet = started(max_restarts=Allowance(count=0))
    fleet.loses_peer("n1", 0)
    fleet.lose("n2")
    fleet.ready("n1")
    assert fleet.decided().action == "restart_replica"
    assert fleet.job.replicas["main-0"].restarted_at == []
    assert len(fleet.job.nodes_lost_at) == 1
    assert fleet.said(Shutdown) == []


def test_symptom_alone_is_a_failed_worker():
    """If no better cause is reported, the first report is the cause, and the budget counts it."""
    fleet = started(max_restarts=Allowance(count=0))
    fleet.loses_peer("n1", 0)
    fleet.ready("n1", "n2")
    assert settled(fleet) == ("n1", 0)
    assert [each.exit_code for each in fleet.said(Shutdown)] == [1]


@pytest.mark.parametrize("how", [{"signal": 9}, {"signal": 11}, {"exit_code": 1, "error": "ValueError: bad"}])
def test_worker_that_failed_by_itself_outranks_a_lost_peer(how):
    """Its report comes after the teardown began, and before its node is ready."""
    fleet = started()
    fleet.loses_peer("n1", 0)
    fleet.ends("n2", 3, **how)
    fleet.ready("n1", "n2")
    assert settled(fleet) == ("n2", 3)
    assert len(fleet.job.replicas["main-0"].restarted_at) == 1


@pytest.mark.parametrize("first", ["n2", None])
def test_cause_before_its_symptoms_is_decided_at_once(first):
    """The peers' reports after it leave no trace."""
    fleet = started()
    assert isinstance((fleet.ends("n2", 3, signal=9) if first else fleet.lose("n2") or [])[-1], RendezvousOpened)
    assert fleet.loses_peer("n1", 0) is None
    fleet.ready("n1", "n2") if first else fleet.ready("n1")
    assert settled(fleet) == ("n2", 3 if first else None)


def test_other_symptoms_leave_no_trace():
    """A thousand ranks may report the same: each node counts its own in `node_ready`."""
    fleet = started(nodes=3)
    fleet.loses_peer("n1", 0)
    before = len(fleet.journal)
    assert fleet.loses_peer("n1", 1) is None
    assert fleet.loses_peer("n2", 2) is None
    assert len(fleet.journal) == before


def test_node_whose_loss_is_noticed_when_all_others_are_ready():
    """The rendezvous waits for that node anyway."""
    fleet = started(nodes=3)
    fleet.loses_peer("n1", 0)
    fleet.ready("n1", "n2")
    assert fleet.said(RestartDecided) == []
    fleet.now += 4.0
    fleet.lose("n3", safe_after_s=fleet.plan.fault_tolerance.gives_away_after_s - 4.0)
    fleet.prove_dead("n3")
    assert settled(fleet) == ("n3", None)


def test_node_that_is_ready_and_lost_then_is_not_the_cause():
    """The node had reported that its workers were gone, so no peer had lost it before."""
    fleet = started(nodes=2, spares=2)
    fleet.loses_peer("n1", 0)
    fleet.ready("n2")
    fleet.lose("n2")
    fleet.ready("n1")
    assert settled(fleet) == ("n1", 0)


@pytest.mark.parametrize(("after_s", "rank"), [(9.0, None), (10.0, None), (10.1, 0)])
def test_node_that_dies_long_after_the_symptom_is_another_failure(after_s, rank):
    """After that time the node has taken part in the teardown, so the first report was not about it."""
    fleet = started()
    fleet.loses_peer("n1", 0)
    fleet.now += after_s
    fleet.lose("n2")
    fleet.ready("n1")
    assert settled(fleet)[1] == rank


def test_silence_counts_from_the_last_sign_of_life():
    """A partitioned node is given up long after its last heartbeat, and is still the cause."""
    fleet = started()
    fleet.loses_peer("n1", 0)
    fleet.now += 20.0
    fleet.lose("n2", safe_after_s=max(0.1, fleet.plan.fault_tolerance.gives_away_after_s - 20.0))
    fleet.prove_dead("n2")
    fleet.ready("n1")
    assert settled(fleet) == ("n2", None)


def test_of_two_causes_the_first_counts():
    """Of two independent failures the one that happened first counts, not the one that was reported first."""
    fleet = started(nodes=3)
    fleet.now += 1.0
    fleet.loses_peer("n1", 0)
    fleet.ends("n2", 2, exit_code=1, error="ValueError: bad")
    fleet.ends("n3", 4, signal=9, ago_s=0.4)
    assert fleet.ends("n3", 5, signal=9, ago_s=0.1) is None
    fleet.ready("n1", "n2", "n3")
    assert settled(fleet) == ("n3", 4)


def test_facts_of_an_older_cycle_and_after_the_close_are_stale():
    """Once the rendezvous has closed the cause is settled."""
    fleet = started()
    fleet.loses_peer("n1", 0)
    fleet.ready("n1", "n2")
    assert fleet.ends("n2", 3, signal=9) is None
    fleet.loses_peer("n1", 0, cycle=1)
    assert fleet.ends("n2", 3, signal=9, cycle=0) is None
    assert fleet.ends("n2", 3, signal=9, cycle=1) is not None


def test_node_that_left_or_came_back_is_the_cause():
    """A node is drained or preempted, or has a new agent: its peers noticed that first."""
    for gone in (Fleet.leave, Fleet.rejoin):
        fleet = started()
        fleet.loses_peer("n1", 0)
        gone(fleet, "n2")
        fleet.ready("n1")
        assert settled(fleet) == ("n2", None)


def test_node_that_was_partitioned_for_long_is_the_cause():
    """The node killed its own workers, and reports that before it is given up."""
    fleet = started()
    fleet.loses_peer("n1", 0)
    fleet.tell(NodeIsolated(**fleet.by("n2"), replica="main-0", cycle=0, for_s=30.0))
    fleet.ready("n1", "n2")
    assert settled(fleet) == ("n2", None)


def test_sources_of_a_dry_run_are_asked_once_about_the_cause():
    """Nothing waits for them, so they are not asked about the symptom."""
    fleet = started(attribution=DRY)
    fleet.loses_peer("n1", 0)
    assert fleet.said(AttributionAsked) == []
    fleet.lose("n2")
    fleet.ready("n1")
    assert [(each.node, each.rank) for each in fleet.said(AttributionAsked)] == [("n2", None)]
    assert settled(fleet) == ("n2", None)
    fleet.later(DRY.timeout)
    assert [(each.rank, each.verdict) for each in fleet.said(AttributionJudged)] == [(None, Verdict.TIMEOUT)]


def test_sources_that_may_stop_the_job_are_asked_again():
    """They are asked at once about the symptom, and again about the cause; answers about the symptom do not count."""
    fleet = started(attribution=ACTS)
    fleet.loses_peer("n1", 0)
    stop = Attribution(source="lib", verdict=Verdict.STOP)
    fleet.ends("n2", 3, signal=9)
    assert [(each.node, each.rank) for each in fleet.said(AttributionAsked)] == [("n1", 0), ("n2", 3)]
    assert fleet.tell(Attributed(replica="main-0", cycle=0, rank=0, attribution=stop)) is None
    fleet.ready("n1", "n2")
    assert fleet.said(RestartDecided) == []
    again = replace_verdict(stop, Verdict.RESTART)
    fleet.tell(Attributed(replica="main-0", cycle=0, rank=3, attribution=again))
    assert settled(fleet) == ("n2", 3)


def test_sources_of_a_dry_run_are_asked_about_a_symptom_that_is_all_there_is():
    """They are asked at the decision, and their time counts from there."""
    fleet = started(attribution=DRY)
    fleet.loses_peer("n1", 0)
    fleet.now += 5.0
    fleet.ready("n1", "n2")
    about: dict[str, Any] = {"replica": "main-0", "cycle": 0, "generation": 0, "rank": 0}
    assert fleet.said(AttributionAsked) == [AttributionAsked(**about, node="n1", sources=("lib",), holds=False)]
    assert settled(fleet) == ("n1", 0)
    fleet.later(DRY.timeout - 0.1)
    assert fleet.said(AttributionJudged) == []
    fleet.later(0.1)
    assert [(each.rank, each.verdict) for each in fleet.said(AttributionJudged)] == [(0, Verdict.TIMEOUT)]


def test_step_that_the_cause_reports_is_the_steps_of_its_cycle():
    """The cause may be the only worker that reports a step: its cycle then counts as one that made progress."""
    fleet = started(progress=ProgressSpec(max_no_progress_cycles=1))
    fleet.loses_peer("n1", 0)
    fleet.ends("n2", 3, signal=9, step=7)
    fleet.ready("n1", "n2")
    assert (fleet.decided().step, fleet.decided().no_progress, fleet.decided().by) == (7, 0, "policy")


def replace_verdict(attribution: Attribution, verdict: Verdict) -> Attribution:
    return Attribution(source=attribution.source, verdict=verdict)


def test_job_that_ends_meanwhile_has_its_failure_judged():
    """If the job is cancelled while the cause is open, the sources have their record, and nothing waits."""
    fleet = started(attribution=DRY)
    fleet.loses_peer("n1", 0)
    fleet.signal("cancel")
    assert fleet.ends("n2", 3, signal=9) is None
    fleet.leave(*fleet.names)
    assert len(fleet.said(AttributionAsked)) == len(fleet.said(AttributionJudged)) == 1
    assert replay(new_job(fleet.plan), fleet.journal) == []


def test_other_replica_of_a_job_that_restarts_as_a_whole():
    """A rollout loses the policy as its peer: the failure is the policy's, in the policy's cycle and budget."""
    plan = plan_of(
        RolePlan(name="policy", command=("x",), on_failure="restart_job"),
        RolePlan(name="rollout", command=("x",), on_failure="restart_job"),
        attribution=DRY,
    )
    fleet = PeersFleet(plan)
    fleet.join(*fleet.names)
    fleet.loses_peer("n2", 0, replica="rollout-0")
    fleet.ends("n1", 0, replica="policy-0", signal=9)
    fleet.ready("n1", replica="policy-0")
    fleet.ready("n2", replica="rollout-0")
    assert settled(fleet) == ("n1", 0)
    assert (fleet.decided().replica, fleet.decided().cycle) == ("policy-0", 0)
    assert [(each.replica, each.cycle) for each in fleet.said(AttributionAsked)] == [("policy-0", 0)]
    assert [len(each.restarted_at) for each in fleet.job.replicas.values()] == [1, 0]
    assert fleet.job.replicas["rollout-0"].phase == "running"


def test_another_replica_that_is_ready_first_settles_no_symptom():
    """A report about the node that the policy has lost may still come."""
    plan = plan_of(
        RolePlan(name="policy", command=("x",), nodes_per_replica=2, on_failure="restart_job"),
        RolePlan(name="rollout", command=("x",)),
        spares=1,
    )
    fleet = PeersFleet(plan)
    fleet.join(*fleet.names)
    fleet.loses_peer("n1", 0, replica="policy-0")
    assert fleet.ready("n3", replica="rollout-0") == []
    fleet.ready("n1", replica="policy-0")
    assert fleet.said(RestartDecided) == []
    fleet.lose("n2")
    assert settled(fleet) == ("n2", None)
    assert [replica.phase for replica in fleet.job.replicas.values()] == ["running"] * 2


@pytest.fixture
def together():
    """Two replicas that restart together, a spare, and a rollout that has lost a peer, a node of the policy."""
    plan = plan_of(
        RolePlan(name="policy", command=("x",), nodes_per_replica=2, on_failure="restart_job"),
        RolePlan(name="rollout", command=("x",), on_failure="restart_job"),
        spares=1,
    )
    fleet = PeersFleet(plan)
    fleet.join(*fleet.names)
    fleet.loses_peer("n3", 0, replica="rollout-0")
    fleet.ready("n1", replica="policy-0")
    fleet.ready("n3", replica="rollout-0")
    assert fleet.said(RestartDecided) == []
    return fleet


def test_the_failed_replica_waits_for_nodes_of_the_others(together):
    """The lost peer may be one of those nodes."""
    together.lose("n2")
    assert settled(together) == ("n2", None)
    assert [replica.phase for replica in together.job.replicas.values()] == ["running"] * 2


def test_a_node_of_another_replica_that_does_not_answer_is_the_cause(together):
    together.later(100.0)
    assert settled(together) == ("n2", None)
    together.later(100.0)
    assert [replica.phase for replica in together.job.replicas.values()] == ["running"] * 2


def test_replicas_that_lack_nodes_do_not_wait_for_each_other():
    """Neither node answers, and no spare is left."""
    plan = plan_of(
        *(RolePlan(name=each, command=("x",), on_failure="restart_job", nodes_per_replica=2) for each in "ab")
    )
    fleet = PeersFleet(plan)
    fleet.join(*fleet.names)
    fleet.loses_peer("n1", 0, replica="a-0")
    fleet.ready("n1", replica="a-0")
    fleet.ready("n3", replica="b-0")
    fleet.later(plan.fault_tolerance.rendezvous.join_timeout)
    assert fleet.said(Shutdown)[0].exit_code == 75


def test_restart_of_all_stays_one_with_a_cause_in_the_other_replica():
    """All rendezvous are open by then."""
    plan = plan_of(
        RolePlan(name="policy", command=("x",), on_failure="ignore"),
        RolePlan(name="rollout", command=("x",), on_failure="restart_job"),
    )
    fleet = PeersFleet(plan)
    fleet.join(*fleet.names)
    fleet.loses_peer("n2", 0, replica="rollout-0")
    fleet.ends("n1", 0, replica="policy-0", signal=9)
    fleet.ready("n1", replica="policy-0")
    fleet.ready("n2", replica="rollout-0")
    assert settled(fleet) == ("n1", 0)
    assert fleet.decided().action == "restart_job"


def test_replicas_that_restart_alone_have_causes_of_their_own():
    """The lost node of one replica is no cause of the other's failure."""
    plan = plan_of(RolePlan(name="main", command=("x",), replicas=2), spares=1)
    fleet = PeersFleet(plan)
    fleet.join(*fleet.names)
    fleet.loses_peer("n1", 0)
    fleet.lose("n2")
    fleet.ready("n1")
    assert {(each.replica, each.node) for each in fleet.said(RestartDecided)} == {("main-0", "n1"), ("main-1", "n2")}


def test_journal_without_the_field_decides_as_it_did():
    """Older agents do not report lost peers as such: the first report is the cause, at once."""
    fleet = started()
    decisions = fleet.ends("n1", 0, exit_code=1, error="ConnectionResetError: peer")
    assert [type(each) for each in decisions or []] == [RestartDecided, RendezvousOpened]
    fleet.lose("n2")
    fleet.ready("n1")
    assert settled(fleet) == ("n1", 0)


def hung(*, step_timeout: float, silent_s: float, limit_s: float | None = None) -> PeersFleet:
    """n1 hangs, past a deadline of `limit_s`; 5 s later n2 is given up, after it was silent for `silent_s`."""
    fleet = started(hang__step_timeout=step_timeout, max_restarts=Allowance(count=1))
    fleet.hang("n1", limit_s=limit_s)
    fleet.now += 5.0
    gives_away_s = fleet.plan.fault_tolerance.gives_away_after_s
    fleet.lose("n2", safe_after_s=gives_away_s - silent_s)
    fleet.prove_dead("n2")
    fleet.ready("n1")
    return fleet


def test_a_node_that_was_silent_is_the_cause_of_its_peers_hang():
    """A hang may be found before the loss of a node without power. It spends no restart."""
    fleet = hung(step_timeout=10.0, silent_s=12.0)
    assert settled(fleet) == ("n2", None)
    assert (fleet.job.replicas["main-0"].restarted_at, len(fleet.job.nodes_lost_at)) == ([], 1)


def test_the_deadline_that_has_passed_says_whether_a_hang_may_be_a_symptom():
    """A section may have a short deadline in a job with long ones, and the other way round."""
    assert settled(hung(step_timeout=600.0, silent_s=12.0, limit_s=10.0)) == ("n2", None)
    assert settled(hung(step_timeout=10.0, silent_s=12.0, limit_s=600.0)) == ("n1", 0)
    assert settled(hung(step_timeout=600.0, silent_s=12.0)) == ("n1", 0)


def test_a_node_with_a_heartbeat_after_the_hang_is_not_its_cause():
    assert settled(hung(step_timeout=10.0, silent_s=4.0)) == ("n1", 0)


def test_a_node_that_was_silent_is_the_cause_of_a_late_exit():
    """n1 has finished; n2 and n3 have not, since n3 has no power."""
    fleet = started(nodes=3, hang__exit_skew=10.0, max_restarts=Allowance(count=1))
    fleet.done("n1")
    fleet.later(10.0)
    fleet.now += 5.0
    fleet.lose("n3", safe_after_s=fleet.plan.fault_tolerance.gives_away_after_s - 12.0)
    fleet.prove_dead("n3")
    fleet.ready("n1", "n2")
    assert settled(fleet) == ("n3", None)
    assert (fleet.job.replicas["main-0"].restarted_at, len(fleet.job.nodes_lost_at)) == ([], 1)


def test_a_hang_that_is_found_later_than_a_silent_node_is_decided_at_once():
    fleet = started(hang__step_timeout=60.0)
    assert [type(each) for each in fleet.hang("n1") or []] == [RestartDecided, RendezvousOpened]


FAILURES = [
    Failure(kind="node", cause="n1 lost", node="n1", noticed=5.0),
    Failure(kind="worker", cause="killed", node="n2", noticed=5.0, rank=1, signal=9),
    Failure(kind="worker", cause="hung", node="n2", noticed=5.0, rank=2, hung=True),
    Failure(kind="worker", cause="failed", node="n2", noticed=5.0, rank=3),
    Failure(kind="worker", cause="reset", node="n3", noticed=5.0, rank=4, peer_lost=True),
    Failure(kind="worker", cause="aborted", node="n3", noticed=5.0, rank=5, signal=6, peer_lost=True),
]


def test_each_kind_of_evidence():
    assert [evidence_of(each) for each in FAILURES] == ["node_lost", "killed", "hung", "failed", *["peer_lost"] * 2]


@given(st.lists(st.tuples(st.sampled_from(FAILURES), st.integers(0, 9)), min_size=1, max_size=6))
def test_cause_does_not_depend_on_the_order_of_the_reports(reports):
    """The first failure that is no consequence wins, in whichever order the reports arrive."""
    failures = [replace(each, noticed=float(at)) for each, at in reports]

    def best(order: list[Failure]) -> tuple[bool, float]:
        known = order[0]
        for each in order[1:]:
            known = each if outranks(each, known) else known
        return known.peer_lost, known.noticed

    assert best(failures) == best(failures[::-1]) == min((each.peer_lost, each.noticed) for each in failures)
