"""A job that Slurm suspends as a whole: no node has died, and no deadline counts the time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.rendezvous import SHORT_S
from nvrx_slurm.jobspec.model import AttributionSpec, BackoffSpec
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    JobEnded,
    JobResumed,
    JobSuspended,
    NodeFenced,
    NodeLost,
    NodeResumed,
    RendezvousClosed,
    RestartDecided,
    Shutdown,
    Suspending,
    Terminating,
    Tick,
    WorkerFailed,
)
from tests.unit.core.fleet import Fleet, plain, running


def suspended(fleet):
    fleet.tell(Suspending(**fleet.by("n1")))
    return fleet


def lose(fleet, node):
    return fleet.tell(
        NodeLost(node=node, incarnation=f"{node}.0", cause="heartbeat_timeout", safe_after_s=20.0),
    )


def test_first_announcement_suspends_the_job_for_all_agents_that_live():
    """The other nodes announce the same suspension: their announcements leave no trace."""
    fleet = running()
    lose(fleet, "n3")
    (order,) = suspended(fleet).said(JobSuspended)
    assert order.incarnations == ("n1.0", "n2.0")
    assert fleet.tell(Suspending(**fleet.by("n2"))) is None


def test_announcement_of_an_agent_that_was_replaced_is_stale():
    """The announcement is about an agent that is gone."""
    fleet = running()
    assert fleet.tell(Suspending(node="n1", incarnation="older", seq=99)) is None
    assert fleet.job.suspended_at is None


def test_no_deadline_is_due_while_the_job_is_suspended_and_all_move_by_that_time():
    """An open rendezvous continues where it was."""
    fleet = running()
    fleet.fail("n2")
    due_at = next_deadline(fleet.job)
    suspended(fleet)
    assert next_deadline(fleet.job) is None
    fleet.now += 5000.0
    assert fleet.tell(JobResumed(stood_still_s=5000.0)) == []
    assert next_deadline(fleet.job) == due_at + 5000.0
    assert not fleet.said(Shutdown)


def test_what_agents_said_while_no_suspension_came_is_taken_in_before_a_deadline():
    """The controller waited in vain for the announced suspension, past the time in which all agents had to leave."""
    fleet = running()
    fleet.signal("cancel")
    suspended(fleet)
    fleet.now = fleet.job.shutdown_deadline + 1.0
    fleet.tell(JobResumed(stood_still_s=0.0))
    fleet.leave(*fleet.names)
    assert [ended.missing for ended in fleet.said(JobEnded)] == [()]


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
    """With a proof there is nothing to wait for."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    fleet.lose("n2")
    assert fleet.job.replicas["main-0"].unsafe == {}
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_job_ends_where_no_proof_comes():
    """The wait for a proof has a bound."""
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


def test_resumption_from_an_earlier_suspension_leaves_the_grant_of_the_next():
    """Its workers outlive their lease again, at the latest when the agent has read the order."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    suspended(fleet)
    assert [order.suspension for order in fleet.said(JobSuspended)] == [0, 1]
    fleet.tell(JobResumed(stood_still_s=10.0))
    assert fleet.tell(NodeResumed(**fleet.by("n2"), stood_still_s=10.0, suspension=0)) is None
    lose(fleet, "n2")
    assert fleet.job.replicas["main-0"].unsafe == {"n2": math.inf}
    assert fleet.tell(NodeResumed(**fleet.by("n1"), stood_still_s=10.0, suspension=1)) == []


def test_node_that_joins_again_does_not_outlive_its_lease():
    """An agent joins only when none of its workers is left, and the grant belonged to its older incarnation."""
    fleet = suspended(running())
    fleet.tell(JobResumed(stood_still_s=10.0))
    fleet.incarnations["n2"] += 1
    fleet.join("n2")
    assert fleet.job.nodes["n2"].grant is None


def test_resumption_of_a_job_that_is_not_suspended_is_stale():
    """The job was resumed already, or by another controller."""
    assert running(plain()).tell(JobResumed(stood_still_s=1.0)) is None


def test_order_and_its_end_are_of_the_generation_that_runs():
    """What an older generation has announced, or still announces, changes nothing in this one."""
    fleet = running()
    fleet.requeue()
    fleet.join(*fleet.names)
    (order,) = suspended(fleet).said(JobSuspended)
    assert order.generation == 1
    assert fleet.tell(JobResumed(stood_still_s=1.0, generation=0)) is None
    assert next_deadline(fleet.job) is None
    assert fleet.tell(JobResumed(stood_still_s=1.0, generation=1)) == []
    assert fleet.job.suspended_at is None


def test_agent_that_was_replaced_does_not_say_that_its_node_has_resumed():
    """Nor does an agent of a node that does not belong to the job."""
    fleet = suspended(running())
    assert fleet.tell(NodeResumed(node="n1", incarnation="older", seq=99, stood_still_s=1.0)) is None
    assert fleet.tell(NodeResumed(node="n9", incarnation="n9.0", seq=1, stood_still_s=1.0)) is None
    assert fleet.job.nodes["n1"].grant == 0


def test_cause_that_is_reported_after_a_suspension_counts():
    """The report of a worker that lost its peer came before: the time in between does not count."""
    fleet = running()
    of_cycle = {"replica": "main-0", "cycle": 0}
    fleet.tell(WorkerFailed(**fleet.by("n1"), **of_cycle, rank=0, exit_code=1, peer_lost=True))
    suspended(fleet)
    fleet.now += 5000.0
    fleet.tell(JobResumed(stood_still_s=5000.0))
    assert fleet.tell(WorkerFailed(**fleet.by("n2"), **of_cycle, rank=2, signal=9)) == []
    fleet.ready("n1", "n2")
    assert [(each.node, each.rank) for each in fleet.said(RestartDecided)] == [("n2", 2)]


# ------------------------------------------------------------------------------------- what is moved

NO_MOMENTS = frozenset({"plan", "role", "seen", "answers", "behind_until"})
"""Fields of the core's state without moments; the last one is when the controller went on, which no time moves."""


def moments(of: object, where: str = "job") -> Iterator[tuple[str, float]]:
    """Each time in the core's state, with the fields that lead to it."""
    if isinstance(of, float):
        yield where, of
    elif isinstance(of, list):
        for index, value in enumerate(of):
            yield from moments(value, f"{where}[{index}]")
    elif isinstance(of, dict):
        for key, value in of.items():
            yield from moments(value, f"{where}[{key}]")
    elif isinstance(of, msgspec.Struct):
        for each in msgspec.structs.fields(of):
            if each.name not in NO_MOMENTS:
                yield from moments(getattr(of, each.name), f"{where}.{each.name}")


def recovering() -> Fleet:
    """n2 is late in a rendezvous that the spare could close; before that all nodes had run for a while."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.now += 7.0
    fleet.fail("n2")
    fleet.now += 1.0
    fleet.ready("n1")
    return fleet


def requeued() -> Fleet:
    """The second generation of a job that was restarted in the first."""
    fleet = recovering()
    fleet.now += 3.0
    fleet.requeue()
    fleet.join("n1")
    return fleet


def lacking_a_node() -> Fleet:
    """n2 is gone, and no spare is left."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.lose("n2")
    fleet.now += 1.0
    fleet.ready("n1")
    return fleet


def waiting_for_a_verdict() -> Fleet:
    """All nodes are ready, and the answer of a source may still end the job."""
    return ready_again(attribution=AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0))


def pausing() -> Fleet:
    """All nodes are ready, and the next cycle of a crash loop begins later."""
    return ready_again(backoff=BackoffSpec(after=1, within=60.0, initial=8.0, max=8.0))


def ready_again(**bounds: Any) -> Fleet:
    """All nodes are ready, a second after a worker has failed."""
    fleet = running(plain(nodes=2, spares=1, **bounds))
    fleet.now += 7.0
    fleet.fail("n2")
    fleet.now += 1.0
    fleet.ready("n1", "n2")
    return fleet


def with_workers_that_may_live() -> Fleet:
    """n2 is silent, and its lease has not run out yet."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.lose("n2", safe_after_s=20.0)
    return fleet


def restarted() -> Fleet:
    """The workers of cycle 1 have started, and none has stepped."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.now += 7.0
    fleet.fail("n2")
    fleet.now += 1.0
    fleet.ready("n1", "n2")
    fleet.now += 2.0
    fleet.started("n1", "n2")
    return fleet


def about_to_end() -> Fleet:
    """n1 is done, and Slurm has announced the end of n2's processes."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.now += 7.0
    fleet.done("n1")
    fleet.tell(Terminating(**fleet.by("n2")))
    return fleet


def shutting_down() -> Fleet:
    """The agents have the order to leave."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.signal("cancel")
    return fleet


@pytest.mark.parametrize(
    ("history", "sets"),
    [
        (requeued, ("requeued_at[0]", "restarted_at[0]")),
        (recovering, ("opened_at", "began_at", "last_call_at", "noticed", "decided", "due_at", "expected_until")),
        (lacking_a_node, ("short_since", "torn_down", "nodes_lost_at[0]")),
        (waiting_for_a_verdict, ("held_at", "torn_down")),
        (pausing, ("pause_until",)),
        (with_workers_that_may_live, ("unsafe[n2]",)),
        (restarted, ("torn_down", "closed", "spawned")),
        (about_to_end, ("first_done_at", "terminating_until")),
        (shutting_down, ("shutdown_deadline", "started_at")),
    ],
)
def test_suspension_moves_each_moment_of_a_jobs_state_by_its_time(history, sets):
    """The suspended job continues as if no time had passed."""
    fleet = history()
    before = dict(moments(fleet.job))
    for name in sets:
        assert any(where.endswith(name) and at for where, at in before.items()), f"this history sets no {name}"
    fleet.now += SHORT_S / 2  # less than any deadline
    suspended(fleet)
    fleet.now += 5000.0
    assert fleet.tell(JobResumed(stood_still_s=5000.0, generation=fleet.job.generation)) == []
    not_yet = {where for where, at in before.items() if where.endswith((".torn_down", ".closed")) and not at}
    assert dict(moments(fleet.job)) == {
        where: at if where in not_yet else at + 5000.0 for where, at in before.items()
    }


@pytest.mark.parametrize("stood_still_s", [0.0, 5000.0])
def test_rate_counts_no_suspension(stood_still_s):
    """Two failures within a minute of running time count as two within the minute of the rate."""
    fleet = running(plain(max_restarts=Allowance(count=1, per_s=60.0)))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    fleet.now += 10.0
    suspended(fleet)
    fleet.now += stood_still_s
    fleet.tell(JobResumed(stood_still_s=stood_still_s))
    fleet.fail("n2")
    assert [decided.by for decided in fleet.said(RestartDecided)] == ["policy", "budget"]
