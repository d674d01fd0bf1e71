"""The core records restarts in process, and nothing follows from them."""

from __future__ import annotations

import copy

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.journal.records import Fence, RendezvousOpened, RestartDecided, RestartedInProcess
from nvrx_slurm.journal.restarts import InProcessRestart
from tests.unit.core.fleet import Fleet, plain

RESTART = InProcessRestart(cause="c", iteration=1, world_size=4, active_world_size=4, total_s=0.1)


def running() -> Fleet:
    fleet = Fleet(plain())
    fleet.join("n1", "n2", "n3")
    fleet.started("n1", "n2")
    return fleet


def restart(fleet: Fleet, node: str, cycle: int = 0) -> RestartedInProcess:
    return RestartedInProcess(**fleet.by(node), replica="main-0", cycle=cycle, restart=RESTART)


def test_nothing_follows_and_no_budget_is_spent() -> None:
    """However many there are, no decision and no deadline follows, and the state changes only in the agent's sequence
    number."""
    fleet = running()
    fleet.job.nodes["n1"].seq += 50
    fleet.seqs["n1"] += 50
    before = copy.deepcopy(fleet.job)
    for _ in range(50):
        assert fleet.tell(restart(fleet, "n1")) == []
    before.nodes["n1"].seq += 50
    assert fleet.job == before
    assert next_deadline(fleet.job) == next_deadline(before)


def test_one_that_comes_while_its_replica_restarts_is_kept() -> None:
    """It happened before its node was asked to stop; the rendezvous goes on."""
    fleet = running()
    fleet.fail("n2")
    assert fleet.tell(restart(fleet, "n1")) == []
    assert [opened.cycle for opened in fleet.said(RendezvousOpened)] == [0, 1]
    assert len(fleet.said(RestartDecided)) == 1


def test_one_that_arrives_twice_leaves_no_trace() -> None:
    """This is so for any fact of an agent."""
    fleet = running()
    fact = restart(fleet, "n1")
    assert fleet.tell(fact) == []
    assert fleet.tell(fact) is None


def test_a_node_that_was_given_up_has_no_say() -> None:
    """The node is fenced when it is lost, and its later facts change nothing."""
    fleet = running()
    fleet.lose("n2")
    assert [fence.node for fence in fleet.said(Fence)] == ["n2"]
    before = copy.deepcopy(fleet.job)
    assert fleet.tell(restart(fleet, "n2")) == []
    before.nodes["n2"].seq += 1
    assert fleet.job == before
