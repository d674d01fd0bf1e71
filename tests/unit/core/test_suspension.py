"""A job that Slurm suspends as a whole: nobody has died, and no deadline counts the time."""

from __future__ import annotations

import math

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.journal.records import (
    JobResumed,
    JobSuspended,
    NodeFenced,
    NodeLost,
    NodeResumed,
    RendezvousClosed,
    Shutdown,
    Suspending,
    Tick,
)
from tests.unit.core.fleet import plain, running


def suspended(fleet):
    fleet.tell(Suspending(**fleet.by("n1")))
    return fleet


def lose(fleet, node):
    return fleet.tell(
        NodeLost(node=node, incarnation=f"{node}.0", cause="heartbeat_timeout", safe_after_s=20.0),
    )


def test_first_announcement_suspends_the_job_for_all_agents_that_live():
    """The other nodes announce the same suspension: they leave no trace."""
    fleet = running()
    lose(fleet, "n3")
    (order,) = suspended(fleet).said(JobSuspended)
    assert order.incarnations == ("n1.0", "n2.0")
    assert fleet.tell(Suspending(**fleet.by("n2"))) is None


def test_announcement_of_an_agent_that_was_replaced_is_stale():
    """Slurm suspended something else."""
    fleet = running()
    assert fleet.tell(Suspending(node="n1", incarnation="older", seq=99)) is None
    assert fleet.job.suspended_at is None


def test_no_deadline_is_due_while_the_job_is_suspended_and_all_move_by_that_time():
    """A rendezvous that was open goes on where it was."""
    fleet = running()
    fleet.fail("n2")
    due_at = next_deadline(fleet.job)
    suspended(fleet)
    assert next_deadline(fleet.job) is None
    fleet.now += 5000.0
    assert fleet.tell(JobResumed(stood_still_s=5000.0)) == []
    assert next_deadline(fleet.job) == due_at + 5000.0
    assert not fleet.said(Shutdown)


def test_node_lost_in_a_suspension_keeps_its_ranks_until_its_death_is_proven():
    """Its workers outlive their lease, so the clock proves nothing."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    lose(fleet, "n2")
    assert fleet.job.replicas["main-0"].unsafe == {"n2": math.inf}
    fleet.ready("n1")
    fleet.now += 25.0
    fleet.tell(Tick())
    assert len(fleet.said(RendezvousClosed)) == 1
    fleet.tell(NodeFenced(node="n2", incarnation="n2.0", proof="its kernel says so"))
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_node_whose_kernel_proves_its_death_in_a_suspension_holds_nothing_up():
    """There is nothing to wait for, whatever the clock proves."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    fleet.lose("n2")
    assert fleet.job.replicas["main-0"].unsafe == {}
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_job_ends_where_no_proof_comes():
    """The wait for it has a bound."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    lose(fleet, "n2")
    assert next_deadline(fleet.job) == fleet.now + fleet.plan.fault_tolerance.rendezvous.join_timeout
    fleet.now = next_deadline(fleet.job)
    fleet.tell(Tick())
    assert fleet.said(Shutdown) == [Shutdown(exit_code=75, reason="n2: lost in a suspension, and not proven dead")]
    assert len(fleet.said(RendezvousClosed)) == 1


def test_node_that_has_resumed_loses_its_ranks_by_the_clock_as_before():
    """Its supervisor has confirmed that the ordinary lease is in force."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    assert fleet.tell(NodeResumed(**fleet.by("n2"), stood_still_s=10.0)) == []
    lose(fleet, "n2")
    assert fleet.job.replicas["main-0"].unsafe == {"n2": fleet.now + 20.0}
    assert fleet.tell(NodeResumed(**fleet.by("n1"), stood_still_s=10.0)) == []
    assert fleet.tell(NodeResumed(**fleet.by("n1"), stood_still_s=10.0)) is None


def test_node_that_joins_again_does_not_outlive_its_lease():
    """An agent joins only when none of its workers is left, and the grant was its older incarnation's."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    fleet.incarnations["n2"] += 1
    fleet.join("n2")
    assert not fleet.job.nodes["n2"].outlives_lease


def test_resumption_of_a_job_that_is_not_suspended_is_stale():
    """It was resumed already, or by another controller."""
    assert running(plain()).tell(JobResumed(stood_still_s=1.0)) is None
