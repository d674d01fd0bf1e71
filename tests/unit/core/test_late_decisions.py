"""Decisions that reached the store late, since the controller or the store stood still: nodes that must act on them
have their full time from when the decisions are known."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.state import NodeState
from nvrx_slurm.jobspec.model import RendezvousSpec
from nvrx_slurm.journal.records import DecisionsLate, Fence, JobEnded, RendezvousClosed, RendezvousOpened, Shutdown
from tests.unit.core.fleet import Fleet, plain, running

LATE_S = 60.0
"""More than the teardown's grace and the last call."""


def commit_late(fleet: Fleet) -> None:
    since = fleet.now
    fleet.now += LATE_S
    assert fleet.tell(DecisionsLate(since=since)) == []


@pytest.fixture
def failed() -> Fleet:
    """There are as many spares as nodes, so the last call runs from the opening on."""
    fleet = running(plain(2, 2))
    fleet.fail("n1")
    return fleet


def test_nodes_that_learn_late_of_a_rendezvous_are_not_late(failed: Fleet) -> None:
    commit_late(failed)
    failed.later(0.1)
    assert failed.said(Fence) == []
    failed.ready("n1", "n2")
    assert failed.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_one_that_does_not_answer_then_is(failed: Fleet) -> None:
    commit_late(failed)
    bounds = failed.job.plan.fault_tolerance
    failed.ready("n1")
    failed.later(bounds.teardown.grace + bounds.rendezvous.last_call - 0.1)
    assert failed.said(Fence) == []
    failed.later(0.1)
    assert [each.node for each in failed.said(Fence)] == ["n2"]


def test_a_rendezvous_that_was_opened_before_gets_no_more_time(failed: Fleet) -> None:
    failed.now += 1.0
    commit_late(failed)
    failed.later(0.0)
    assert [each.node for each in failed.said(Fence)] == ["n1", "n2"]


def test_the_join_timeout_counts_from_then_too() -> None:
    fleet = running(plain(2, 0, rendezvous=RendezvousSpec(join_timeout=30.0)))
    fleet.fail("n1")
    commit_late(fleet)
    fleet.later(29.9)
    assert fleet.said(Shutdown) == []
    fleet.later(0.1)
    assert "n1" in fleet.said(Shutdown)[0].reason


def test_a_late_fence_proves_nothing_before(failed: Fleet) -> None:
    """The lease of the node may have been renewed until the fence was sent."""
    bounds = failed.job.plan.fault_tolerance
    failed.later(bounds.teardown.grace + bounds.rendezvous.last_call)
    assert [failed.state(node) for node in ("n1", "n2")] == [NodeState.LOST] * 2
    commit_late(failed)
    failed.later(bounds.gives_away_after_s - 0.1)
    assert len(failed.said(RendezvousClosed)) == 1
    failed.later(0.1)
    assert failed.said(RendezvousClosed)[-1].nodes == ("n3", "n4")


def test_silence_proves_a_death_as_before() -> None:
    fleet = running(plain(2, 1))
    fleet.lose("n2", safe_after_s=3.0)
    commit_late(fleet)
    fleet.ready("n1")
    fleet.later(0.0)
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_the_end_waits_for_those_who_learn_late_of_it() -> None:
    fleet = running(plain(2, 0))
    fleet.signal("cancel")
    commit_late(fleet)
    fleet.later(1.0)
    assert fleet.said(JobEnded) == []
    fleet.leave("n1", "n2")
    assert fleet.said(JobEnded)[0].missing == ()


def test_what_arrived_meanwhile_comes_before_any_deadline() -> None:
    """The time of the second rendezvous was up, but a fact that arrived in time closes it."""
    fleet = running(plain(2, 0, rendezvous=RendezvousSpec(join_timeout=30.0)))
    fleet.fail("n1")
    fleet.ready("n1")
    fleet.now += 1.0
    commit_late(fleet)
    fleet.ready("n2")
    assert fleet.said(Shutdown) == []
    assert len(fleet.said(RendezvousOpened)) == len(fleet.said(RendezvousClosed)) == 2
    assert next_deadline(fleet.job) is None
