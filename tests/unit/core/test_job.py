"""Failures, ends, and stale facts."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm.core.job import TERMINATING_S, next_deadline
from nvrx_slurm.core.state import NodeState
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    Fence,
    JobEnded,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    RestartDecided,
    Shutdown,
    Signalled,
    Terminating,
    WorkerFailed,
    WorkersDone,
    WorkersStarted,
)
from tests.unit.core.fleet import Fleet, plain, plan_of, running


def test_worker_failure_is_decided_once_and_spends_the_budget():
    """The first failure of a cycle opens the next rendezvous; the failures that it causes change nothing."""
    fleet = running(plain(max_restarts=2))
    fleet.fail("n1")
    assert fleet.fail("n2", cycle=0) is None
    (decided,) = fleet.said(RestartDecided)
    assert (decided.action, decided.restarts_left) == ("restart_replica", 1)


def test_spent_budget_ends_the_job_with_1():
    """A worker failure beyond `max_restarts` stops the job, and the reason names the failure."""
    fleet = running(plain(max_restarts=1))
    for _ in range(2):
        fleet.fail("n1")
        fleet.ready("n1", "n2")
    (shutdown,) = fleet.said(Shutdown)
    assert shutdown.exit_code == 1
    assert "rank 0 on n1 exited with code 1" in shutdown.reason


def test_lost_nodes_spend_spares_and_not_the_budget():
    """With no restart allowed, a spare still replaces a lost node."""
    fleet = running(plain(nodes=2, spares=1, max_restarts=0))
    fleet.lose("n1")
    fleet.ready("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n3", "n2")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("connection_closed", "connection to its agent closed"),
        ("tether_lost", "tether lost"),  # an older journal's: its replay must give these words
        ("heartbeat_timeout", "heartbeat timeout"),
    ],
)
def test_cause_of_a_lost_node_is_in_the_decision(cause, words):
    """The cause is in words; those of an older journal stay as they were, so that its replay gives the same
    decisions."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n1", incarnation="n1.0", cause=cause))
    (decided,) = fleet.said(RestartDecided)
    assert decided.cause == f"n1 lost: {words}"


def test_lost_spare_restarts_no_replica():
    """The death of a standby node is recorded and changes no running cycle."""
    fleet = running(plain(nodes=2, spares=1))
    decisions = fleet.lose("n3")
    assert decisions == [Fence(node="n3", incarnation="n3.0")]
    assert len(fleet.said(RendezvousOpened)) == 1


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        ("restart_replica", [RestartDecided, RendezvousOpened]),
        ("restart_job", [RestartDecided, RendezvousOpened, RendezvousOpened]),
        ("ignore", [RestartDecided, ReplicaEnded]),
        ("fail_job", [RestartDecided, Shutdown]),
    ],
)
def test_each_failure_policy_does_what_it_says(policy, kinds):
    """`on_failure` of the role decides what follows from a failure."""
    roles = [RolePlan(name=name, command=("x",), on_failure=policy) for name in ("a", "b")]
    fleet = running(plan_of(*roles))
    assert [type(d) for d in fleet.fail("n1", replica="a-0")] == kinds


def test_ignored_replica_gives_its_node_back_as_a_spare():
    """The node first stops what is left of its workers; then it is standby."""
    roles = [RolePlan(name=name, command=("x",), on_failure="ignore") for name in ("a", "b")]
    fleet = running(plan_of(*roles))
    fleet.fail("n1", replica="a-0")
    assert fleet.state("n1") is NodeState.ACTIVE
    fleet.ready("n1", replica="a-0", cycle=1)
    assert fleet.state("n1") is NodeState.STANDBY


def test_success_ends_the_job_and_releases_the_spares():
    """When all ranks are done the job shuts down with 0, and ends when spares too have left."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.done("n1")
    assert fleet.said(Shutdown) == []
    fleet.done("n2")
    assert fleet.said(Shutdown) == [Shutdown(exit_code=0, reason="done")]
    fleet.leave("n1", "n2")
    assert fleet.said(JobEnded) == []
    fleet.leave("n3")
    assert fleet.said(JobEnded) == [JobEnded(exit_code=0, reason="done")]


def test_node_lost_after_its_workers_were_done_is_no_failure():
    """A node whose ranks have all exited 0 may die: nothing of its work is lost."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.done("n1")
    fleet.lose("n1")
    fleet.done("n2")
    assert fleet.said(RestartDecided) == []
    assert fleet.said(Shutdown)[0].exit_code == 0


def test_first_shutdown_wins():
    """A later reason changes neither the exit code nor the reason."""
    fleet = running()
    fleet.signal("time_limit")
    assert fleet.signal("cancel") is None
    assert fleet.lose("n1") is not None
    assert [s.exit_code for s in fleet.said(Shutdown)] == [124]
    assert fleet.said(RestartDecided) == []


def test_late_joiner_after_the_end_changes_nothing_but_is_counted():
    """An agent that joins during the shutdown is waited for like the others, so that it leaves with the job's exit
    code."""
    fleet = Fleet(plain(nodes=1, spares=1))
    fleet.join("n1")
    fleet.done("n1")
    fleet.join("n2")
    fleet.leave("n1")
    assert fleet.said(JobEnded) == []
    fleet.leave("n2")
    assert len(fleet.said(JobEnded)) == 1


def test_end_does_not_wait_for_ever_for_the_silent():
    """A node that does not report that it left is named as missing when the bound has passed."""
    fleet = running(plain(nodes=1, spares=1))
    fleet.done("n1")
    fleet.leave("n1")
    fleet.later(60.0)
    assert fleet.said(JobEnded) == [JobEnded(exit_code=0, reason="done", missing=("n2",))]


def test_nothing_comes_after_the_end():
    """A fact that arrives once the job has ended leaves no trace."""
    fleet = running(plain(nodes=1, spares=1))
    fleet.done("n1")
    fleet.later(60.0)
    before = len(fleet.journal)
    assert fleet.isolate("n1") is None
    assert fleet.leave("n2") == []
    assert fleet.lose("n2") is None
    assert len(fleet.journal) == before


def test_facts_of_an_older_cycle_are_refused():
    """Late facts of a cycle that is over leave no trace."""
    fleet = running()
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    before = len(fleet.journal)
    assert fleet.fail("n2", cycle=0) is None
    assert len(fleet.journal) == before


def test_facts_of_a_replaced_agent_are_refused():
    """Facts that an older incarnation still had in flight do not count."""
    fleet = running()
    old = {"node": "n1", "incarnation": "n1.0", "seq": 99}
    fleet.rejoin("n1")
    assert fleet.tell(WorkerFailed(**old, replica="main-0", cycle=0, rank=0, exit_code=1)) is None


def test_fact_that_arrives_twice_counts_once():
    """A message that was sent again is recognised by its sequence number."""
    fleet = running()
    fact = WorkerFailed(**fleet.by("n1"), replica="main-0", cycle=0, rank=0, exit_code=1)
    assert fleet.tell(fact)
    assert fleet.tell(fact) is None


def test_facts_of_another_generation_are_refused():
    """Nor does one of a generation that this job has not reached."""
    fleet = running()
    assert fleet.tell(NodeReady(**{**fleet.by("n1"), "generation": 7}, replica="main-0", cycle=0, port=1)) is None


def test_nothing_of_an_older_generation_is_believed():
    """After a requeue no fact of the generation before counts: no join, no failure, no report of workers, no signal.
    Node, incarnation, sequence number and cycle are the ones that this generation has."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.requeue()
    fleet.join(*fleet.names)
    before = len(fleet.journal)
    late = {**fleet.by("n1"), "generation": 0, "seq": 99}
    of_cycle = {"replica": "main-0", "cycle": 0}
    stale = [
        NodeJoined(node="n1", incarnation="n1.9", seq=1, generation=0, addr="a", port=1),
        WorkersStarted(**late, **of_cycle, pids={0: 1}),
        WorkerFailed(**late, **of_cycle, rank=0, exit_code=1),
        WorkersDone(**late, **of_cycle),
        NodeLeft(**late, reason="left"),
        Signalled(reason="cancel", generation=0),
    ]
    for fact in stale:
        assert fleet.tell(fact) is None, fact
    assert len(fleet.journal) == before
    assert fleet.fail("n1") is not None  # the fleet's own facts count


def test_a_join_that_was_overtaken_by_a_newer_one_is_refused():
    """An agent that was replaced does not become the node's agent again."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.rejoin("n3")
    for old in ("n3.0", "n3.1"):
        assert fleet.tell(NodeJoined(node="n3", incarnation=old, seq=50, addr="addr-n3", port=1)) is None
    assert fleet.job.nodes["n3"].incarnation == "n3.1"


def test_each_replica_has_a_restart_budget_of_its_own():
    """One replica's failures do not count for the others' budgets."""
    roles = RolePlan(name="main", command=("x",), nodes_per_replica=1, workers_per_node=1, replicas=2)
    fleet = running(plan_of(roles, max_restarts=1))
    (first,) = fleet.said(RendezvousClosed)[0].nodes
    (second,) = fleet.said(RendezvousClosed)[1].nodes
    fleet.fail(first, replica="main-0")
    fleet.ready(first, replica="main-0")
    fleet.fail(second, replica="main-1")
    fleet.ready(second, replica="main-1")
    assert [(each.replica, each.action, each.restarts_left) for each in fleet.said(RestartDecided)] == [
        ("main-0", "restart_replica", 0),
        ("main-1", "restart_replica", 0),
    ]
    assert [(each.replica, each.cycle) for each in fleet.said(RendezvousClosed)[2:]] == [("main-0", 1), ("main-1", 1)]
    assert fleet.job.shutdown is None
    fleet.fail(second, replica="main-1")
    assert fleet.job.shutdown is not None


def test_node_given_up_by_mistake_is_fenced_and_may_come_back():
    """A node that was declared lost but lives was fenced; its agent joins again, as a spare."""
    fleet = running(plain(nodes=2, spares=1))
    assert Fence(node="n2", incarnation="n2.0") in fleet.lose("n2")
    assert fleet.fail("n2", cycle=0) is None
    fleet.rejoin("n2")
    assert fleet.state("n2") is NodeState.STANDBY


def test_recovery_phases_add_up_to_the_total():
    """Every second between the death and the last worker's start belongs to exactly one phase."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.now += 1.0
    fleet.lose("n2")
    fleet.now += 0.25
    fleet.ready("n1")
    fleet.now += 0.5
    fleet.started("n1")
    (recovered,) = fleet.started("n3")
    assert isinstance(recovered, Recovered)
    assert recovered.phases == pytest.approx({"decided": 0.0, "torn_down": 0.25, "closed": 0.0, "spawned": 0.5})
    assert sum(recovered.phases.values()) == pytest.approx(recovered.total_s)


def test_requeued_job_starts_afresh():
    """A new generation forgets the nodes of the old allocation, and its shutdown."""
    from nvrx_slurm.journal.records import JobStarted

    fleet = running(plain(nodes=1, spares=0))
    fleet.signal("cancel")
    fleet.tell(JobStarted(job="1", name="t", expected=("m1",), generation=1))
    assert fleet.job.shutdown is None
    assert set(fleet.job.nodes) == {"m1"}


@pytest.mark.parametrize("saves", [False, True])
def test_preempted_job_is_worth_a_retry_and_saves_in_its_grace_time(saves):
    """The exit code asks for another attempt; without a GraceTime there is no time for a checkpoint."""
    fleet = running(plain(teardown__checkpoint_signal="SIGUSR1", teardown__checkpoint_timeout=5.0))
    (shutdown,) = fleet.tell(Signalled(reason="preempted", saves=saves))
    assert (shutdown.exit_code, shutdown.checkpoint) == (75, saves)


def test_first_node_that_slurm_terminates_is_recorded():
    """The other nodes got the same signal."""
    fleet = running()
    assert fleet.tell(Terminating(**fleet.by("n1"))) == []
    assert fleet.tell(Terminating(**fleet.by("n2"))) is None


def test_each_signal_of_slurms_is_recorded() -> None:
    """A signal that ended only one agent says nothing about a preemption hours later, which begins with the same
    signal."""
    fleet = running()
    assert fleet.tell(Terminating(**fleet.by("n3"))) == []
    fleet.later(3600.0)
    assert fleet.tell(Terminating(**fleet.by("n1"))) == []
    fleet.done("n1", "n2")
    assert fleet.said(Shutdown) == [], "the batch host says why in the next moment"


@pytest.mark.parametrize(("reason", "code"), [("cancel", 143), ("preempted", 75)])
def test_workers_that_end_with_0_at_slurms_sigterm_are_not_done(reason: Any, code: int) -> None:
    """The workers have saved. Slurm signals all processes at once, and the batch host gives the reason a moment
    later."""
    fleet = running()
    assert fleet.tell(Terminating(**fleet.by("n1"))) == []
    assert fleet.tell(Terminating(**fleet.by("n2"))) is None
    assert [type(each) for each in fleet.done("n1", "n2")] == [ReplicaEnded]
    fleet.signal(reason)
    fleet.leave(*fleet.names)
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [code]
    assert [ended.exit_code for ended in fleet.said(JobEnded)] == [code]


def test_workers_that_end_without_a_reason_for_slurms_signal_are_done_in_a_moment() -> None:
    """The core waits for the reason, but not for long, and only once all workers have ended."""
    fleet = running()
    fleet.tell(Terminating(**fleet.by("n1")))
    assert next_deadline(fleet.job) is None
    fleet.done("n1", "n2")
    assert next_deadline(fleet.job) == fleet.now + TERMINATING_S
    assert fleet.later(TERMINATING_S - 0.1) == []
    fleet.later(0.1)
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [0]
