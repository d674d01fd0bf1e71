"""A new controller takes in all facts that arrived while none ran, before it judges a deadline that passed meanwhile.

The journal's time never goes back, so these facts have the time of the controller's start: the first one does not
prove that another one came too late.
"""

from __future__ import annotations

import pytest

from nvrx_slurm.core.state import NodeState, Phase
from nvrx_slurm.jobspec.model import HangSpec, RendezvousSpec
from nvrx_slurm.journal.records import (
    AgentsStarted,
    ControllerStarted,
    Fence,
    JobEnded,
    RendezvousClosed,
    ReplicaEnded,
    RestartDecided,
    Shutdown,
)
from tests.unit.core.fleet import Fleet, plain, running


def take_over(fleet: Fleet, after_s: float) -> None:
    fleet.now += after_s
    assert fleet.tell(ControllerStarted(epoch=2, host="head", pid=1)) == []


def skewed() -> Fleet:
    fleet = running(plain(hang=HangSpec(exit_skew=60.0)))
    fleet.done("n1")
    take_over(fleet, 70.0)
    return fleet


def test_workers_that_had_finished_in_time_are_not_held_for_hung() -> None:
    fleet = skewed()
    fleet.learn("n3", step=(1, 1.0))
    assert [type(each) for each in fleet.done("n2")] == [ReplicaEnded, Shutdown]
    assert fleet.said(RestartDecided) == []


@pytest.mark.parametrize("later_s", [0.0, 0.1])
def test_those_of_which_nothing_had_arrived_are(later_s: float) -> None:
    """When a deadline is due by itself, all facts that had arrived have been taken in."""
    fleet = skewed()
    fleet.learn("n3", step=(1, 1.0))
    fleet.later(later_s)
    assert [each.node for each in fleet.said(RestartDecided)] == ["n2"]


def test_a_fact_that_arrives_later_shows_that_the_time_is_up() -> None:
    fleet = skewed()
    fleet.now += 0.1
    fleet.learn("n3", step=(1, 1.0))
    assert [each.node for each in fleet.said(RestartDecided)] == ["n2"]


def test_nodes_that_were_ready_in_time_are_not_late() -> None:
    fleet = running(plain(3, 0, rendezvous=RendezvousSpec(join_timeout=30.0)))
    fleet.fail("n2")
    take_over(fleet, 40.0)
    fleet.ready("n1", "n3", "n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2", "n3")
    assert fleet.said(Fence) == fleet.said(Shutdown) == []


def test_a_node_that_had_joined_keeps_the_job_from_its_end() -> None:
    """The job lacked a node, and would have stopped a moment later."""
    fleet = running(plain(2, 0))
    fleet.lose("n2")
    fleet.ready("n1")
    assert fleet.job.replicas["main-0"].short_since is not None
    take_over(fleet, 60.0)
    fleet.learn("n1", step=(1, 1.0))
    fleet.rejoin("n2")
    assert fleet.said(Shutdown) == []
    assert fleet.job.replicas["main-0"].phase is Phase.RUNNING


def test_a_node_whose_agent_was_started_again_is_waited_for_no_less() -> None:
    fleet = running(plain(2, 0, rendezvous=RendezvousSpec(join_timeout=30.0)))
    fleet.lose("n2")
    fleet.tell(AgentsStarted(generation=0, nodes=("n2",)))
    take_over(fleet, 40.0)
    fleet.ready("n1")
    assert fleet.job.replicas["main-0"].short_since is None
    fleet.rejoin("n2")
    assert fleet.said(Shutdown) == []
    assert fleet.state("n2") is NodeState.ACTIVE


def test_a_node_that_had_left_is_not_missing_at_the_end() -> None:
    fleet = running(plain(2, 0))
    fleet.signal("cancel")
    take_over(fleet, 600.0)
    fleet.leave("n1", "n2")
    assert fleet.said(JobEnded)[0].missing == ()
