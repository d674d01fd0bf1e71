"""Workers that live but make no progress, nodes that were partitioned, and other decisions about live workers."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.state import NodeState
from nvrx_slurm.jobspec.model import HangSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    DumpAsked,
    DumpOrdered,
    NodeLeft,
    RendezvousClosed,
    RendezvousOpened,
    ReplicaEnded,
    RestartDecided,
    Shutdown,
    Signalled,
    StacksDumped,
)
from tests.unit.core.fleet import plain, plan_of, running


def test_hung_worker_restarts_its_replica_and_all_stacks_are_dumped():
    """It spends the budget as a failed worker does; only all stacks together show which rank waits for which."""
    fleet = running()
    fleet.hang("n2")
    (decided,) = fleet.said(RestartDecided)
    assert (decided.action, decided.restarts_left) == ("restart_replica", 2)
    assert decided.cause == "rank 0 on n2 hung: no step for 9 s"
    assert fleet.said(RendezvousOpened)[-1].dump == decided.cause


def test_failed_worker_asks_for_no_stacks():
    """A failed worker has ended, so nothing hangs."""
    fleet = running()
    fleet.fail("n2")
    assert fleet.said(RendezvousOpened)[-1].dump is None


def test_hang_beyond_the_budget_ends_the_job_with_stacks():
    """The stacks are the last record of why it hung."""
    fleet = running(plain(max_restarts=0))
    fleet.hang("n1")
    (shutdown,) = fleet.said(Shutdown)
    assert shutdown.exit_code == 1
    assert shutdown.dump is not None and "hung" in shutdown.dump


def test_hang_of_an_older_cycle_is_no_news():
    """Its cycle is over."""
    fleet = running()
    fleet.fail("n1")
    assert fleet.hang("n2", cycle=0) is None


def test_node_that_was_cut_off_costs_no_worker_restart():
    """Its agent has killed its workers, and the network is no fault of theirs."""
    fleet = running()
    fleet.isolate("n2")
    (decided,) = fleet.said(RestartDecided)
    assert decided.restarts_left == 3
    assert "had lost store and controller for 30 s" in decided.cause
    fleet.ready("n1", "n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_nodes_that_run_on_long_after_others_have_finished_are_hung():
    """The ranks of one node all ended with 0; those of the other node run on."""
    fleet = running(plain(hang=HangSpec(exit_skew=60.0)))
    fleet.later(500.0)
    fleet.done("n1")
    assert next_deadline(fleet.job) == fleet.now + 60.0
    assert fleet.later(59.0) == []
    fleet.later(1.0)
    assert fleet.said(RestartDecided)[-1].cause == (
        "n2 hung: n1 finished 60 s ago with exit code 0, and this still runs"
    )


def test_without_a_bound_workers_may_run_on_after_others_have_finished():
    """Evaluation on one node may take hours."""
    fleet = running()
    fleet.done("n1")
    assert next_deadline(fleet.job) is None


def test_the_longest_durations_and_the_largest_counts_are_kept():
    """They are those of the job, whichever node reported them."""
    fleet = running()
    fleet.learn("n1", step=(40, 2.0))
    fleet.learn("n2", step=(50, 1.5), save=(1, 9.0))
    assert fleet.job.seen == {"main": {"step": (50, 2.0), "save": (1, 9.0)}}


def test_request_for_stacks_becomes_an_order_and_its_answers_are_kept():
    """Nothing else follows from the request or the answers."""
    fleet = running()
    assert fleet.tell(DumpAsked(request="r", by="me@here", ranks=(1,))) == [DumpOrdered(request="r", ranks=(1,))]
    assert fleet.tell(StacksDumped(**fleet.by("n1"), why="asked for (r)", request="r")) == []


def test_node_that_kept_a_process_which_nothing_could_kill_is_quarantined_when_it_is_back():
    """The fault that kept the process may happen again."""
    fleet = running()
    fleet.tell(NodeLeft(**fleet.by("n3"), reason="processes survived SIGKILL", survivors=(7,)))
    fleet.rejoin("n3")
    assert fleet.state("n3") is NodeState.QUARANTINED


@pytest.mark.parametrize(("asks", "saves"), [(None, False), ("SIGUSR1", True)])
def test_workers_are_asked_to_save_when_time_is_up_if_a_signal_is_set(asks, saves):
    """The order asks for a checkpoint, and the job waits longer for it."""
    fleet = running(plain(teardown__checkpoint_signal=asks, teardown__checkpoint_timeout=60.0, teardown__grace=10.0))
    (shutdown,) = fleet.tell(Signalled(reason="time_limit"))
    assert (shutdown.exit_code, shutdown.checkpoint) == (124, saves)
    assert fleet.job.shutdown_deadline - fleet.now == (80.0 if saves else 20.0)


def test_cancelled_job_saves_nothing():
    """KillWait is short, and a user who cancels does not want to go on."""
    fleet = running(plain(teardown__checkpoint_signal="SIGUSR1"))
    (shutdown,) = fleet.signal("cancel")
    assert not shutdown.checkpoint


def test_hang_of_a_role_that_may_fail_ends_its_replica_alone():
    """The hang is ignored like any other failure of the role."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=1, on_failure="ignore", replicas=2)
    fleet = running(plan_of(role))
    fleet.hang("n1")
    assert fleet.said(ReplicaEnded) == [ReplicaEnded(replica="main-0", cycle=0, outcome="failed")]


def test_replicas_that_run_on_after_others_have_finished_are_judged_one_by_one():
    """The first replica is not due yet, the second and the third are: each names its own node, and has its stacks
    dumped."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=2, replicas=3)
    fleet = running(plan_of(role, hang=HangSpec(exit_skew=60.0)))
    for node, replica in (("n3", "main-1"), ("n6", "main-2")):
        fleet.done(node, replica=replica)
    fleet.later(1.0)
    fleet.done("n1", replica="main-0")
    noticed = fleet.now + 59.0
    fleet.later(59.0)
    assert [(each.replica, each.node, each.by) for each in fleet.said(RestartDecided)] == [
        ("main-1", "n4", "policy"),
        ("main-2", "n5", "policy"),
    ]
    opened = fleet.said(RendezvousOpened)[-2:]
    assert [each.dump for each in opened] == [each.cause for each in fleet.said(RestartDecided)]
    assert {fleet.job.replicas[each.replica].stamps.noticed for each in opened} == {noticed}


def test_restart_of_the_whole_job_has_every_replicas_stacks_written():
    """A hung rank may have waited for another replica."""
    role = RolePlan(name="main", command=("x",), replicas=2, on_failure="restart_job")
    fleet = running(plan_of(role))
    fleet.later(5.0)
    fleet.hang("n1")
    opened = fleet.said(RendezvousOpened)[-2:]
    assert [each.dump for each in opened] == [fleet.said(RestartDecided)[0].cause] * 2
    assert [fleet.job.replicas[each.replica].stamps.noticed for each in opened] == [fleet.now] * 2
