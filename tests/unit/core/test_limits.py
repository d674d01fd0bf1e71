"""Rates of preemptions and lost nodes, and the steps that a cycle has gained."""

from __future__ import annotations

from nvrx_slurm.core import limits
from nvrx_slurm.core.state import Replica, new_job
from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import RestartDecided, Shutdown
from tests.unit.core.fleet import plain, running

HOUR_S = 3600.0


def replica() -> Replica:
    return new_job(plain()).replicas["main-0"]


def test_a_rate_of_preemptions() -> None:
    """With one an hour, a job that is preempted an hour later is requeued, and one that is preempted sooner ends."""
    fleet = running(plain(max_preemptions=Allowance(count=1, per_s=HOUR_S)))
    for _ in range(3):
        fleet.now += HOUR_S
        fleet.requeue()
        assert fleet.job.shutdown is None
    fleet.now += HOUR_S - 1.0
    fleet.requeue()
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [EXIT_FAILED]


def test_a_rate_of_lost_nodes() -> None:
    """With one an hour, the loss that follows within the hour is one too many."""
    fleet = running(plain(nodes=2, spares=3, max_node_losses=Allowance(count=1, per_s=HOUR_S)))
    for node in ("n1", "n2"):
        fleet.now += HOUR_S
        fleet.lose(node)
        fleet.ready(*fleet.job.replicas["main-0"].awaited)
        assert fleet.job.shutdown is None
    fleet.now += HOUR_S - 1.0
    fleet.lose("n3")
    fleet.ready(*fleet.job.replicas["main-0"].awaited)
    assert [shutdown.exit_code for shutdown in fleet.said(Shutdown)] == [EXIT_FAILED]


def test_what_is_left_of_the_budgets_is_never_negative() -> None:
    """The smaller of the replica's and the job's budget is left; a budget that was lowered for a requeue may be
    overdrawn."""
    job = new_job(plain(max_restarts=3, max_job_restarts=2))
    main = job.replicas["main-0"]
    left = []
    for at in range(4):
        left.append(limits.restarts_left(job, main, 0.0))
        main.restarted_at.append(float(at))
    assert left == [2, 1, 0, 0]


def test_a_first_cycle_counts_from_its_first_step() -> None:
    """The first step is the lowest that any of its workers reports as its first, in any order."""
    for firsts in ((103, 101), (101, 103)):
        main = replica()
        for step in firsts:
            limits.first_step(main, step)
        limits.reach_step(main, 110)
        limits.reach_step(main, 105)
        limits.reach_step(main, None)
        assert (main.first_step, main.reached, limits.steps_gained(main)) == (101, 110, 10)


def test_a_later_cycle_counts_from_the_best_before_it() -> None:
    """Steps that an earlier cycle had made do not count, and a cycle without steps has gained none."""
    main = replica()
    for first, reached, gained in ((1, 100, 100), (51, 90, -10), (51, 130, 30)):
        limits.first_step(main, first)
        limits.reach_step(main, reached)
        assert limits.steps_gained(main) == gained
        limits.start_cycle(main)
        assert limits.steps_gained(main) == 0


def test_a_decision_says_how_many_restarts_are_left() -> None:
    fleet = running(plain(max_restarts=2))
    for _ in range(2):
        fleet.fail("n1")
        fleet.ready("n1", "n2")
    assert [decided.restarts_left for decided in fleet.said(RestartDecided)] == [1, 0]


def test_a_rate_of_the_whole_job_forgets() -> None:
    """With each failure an hour after the one before, the job's budget of one an hour lasts, and what is left of it
    is known."""
    fleet = running(plain(max_restarts=9, max_job_restarts=Allowance(count=1, per_s=HOUR_S)))
    for _ in range(3):
        fleet.now += HOUR_S
        fleet.fail("n1")
        fleet.ready("n1", "n2")
        assert fleet.job.shutdown is None
        assert limits.restarts_left(fleet.job, fleet.job.replicas["main-0"], fleet.now) == 0
    assert limits.restarts_left(fleet.job, fleet.job.replicas["main-0"], fleet.now + HOUR_S) == 1
