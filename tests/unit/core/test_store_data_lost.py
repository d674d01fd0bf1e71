"""The store has lost its data: facts and orders that no process has read are gone, so all agents join again."""

from __future__ import annotations

from nvrx_slurm.core.state import NodeState, Phase
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    DrainAsked,
    Fence,
    NodeLost,
    NodeReady,
    RendezvousClosed,
    RendezvousOpened,
    RestartDecided,
    RestartOrdered,
    StoreDataLost,
)
from tests.unit.core.fleet import Fleet, plain, plan_of, running

LOST = StoreDataLost(entries=3)


def test_running_cycles_end_and_their_nodes_get_their_ranks_back():
    """It does not matter which node is back first; no budget and no node's count of deaths includes it."""
    fleet = running(plain(nodes=2, spares=1))
    decisions = fleet.tell(LOST) or []
    assert [each.node for each in decisions if isinstance(each, Fence)] == ["n1", "n2", "n3"]
    assert [type(each) for each in decisions[3:]] == [RestartOrdered, RendezvousOpened]
    for node in ("n3", "n2", "n1"):
        assert len(fleet.said(RendezvousClosed)) == 1
        fleet.rejoin(node)
    closed = fleet.said(RendezvousClosed)[-1]
    assert (closed.cycle, closed.nodes, closed.standby) == (1, ("n1", "n2"), 1)
    assert fleet.said(RestartDecided) == []
    assert [node.deaths for node in fleet.job.nodes.values()] == [0, 0, 0]


def test_ranks_of_a_node_that_does_not_come_back_wait_until_its_workers_are_dead():
    """A spare gets the ranks once the node's death is proven, or the lease of its workers has lapsed."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(LOST)
    fleet.rejoin("n2")
    fleet.rejoin("n3")
    fleet.later(fleet.plan.fault_tolerance.rendezvous.join_timeout / 2)
    assert len(fleet.said(RendezvousClosed)) == 1
    fleet.prove_dead("n1")
    fleet.later(fleet.plan.fault_tolerance.rendezvous.join_timeout)
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n3", "n2")


def test_node_that_was_lost_before_is_fenced_once_more():
    """It may not have read the first fence, and may renew its lease at the empty store."""
    fleet = running(plain(nodes=2, spares=1))
    gives_away_s = fleet.plan.fault_tolerance.gives_away_after_s
    lost = NodeLost(node="n1", incarnation="n1.0", cause="heartbeat_timeout", safe_after_s=gives_away_s)
    fleet.tell(lost)
    fleet.now += gives_away_s - 1.0
    decisions = fleet.tell(LOST) or []
    assert [each.node for each in decisions if isinstance(each, Fence)] == ["n1", "n2", "n3"]
    assert fleet.job.replicas["main-0"].unsafe["n1"] == fleet.now + gives_away_s


def test_node_whose_lease_had_lapsed_before_the_loss_is_not_waited_for():
    """The clock has proven its death, although no tick has said so; nothing renews a lease that has lapsed."""
    fleet = running(plain(nodes=2, spares=1))
    gives_away_s = fleet.plan.fault_tolerance.gives_away_after_s
    fleet.tell(NodeLost(node="n1", incarnation="n1.0", cause="heartbeat_timeout", safe_after_s=gives_away_s))
    fleet.now += gives_away_s + 1.0
    fleet.tell(LOST)
    assert "n1" not in fleet.job.replicas["main-0"].unsafe


def test_open_rendezvous_begins_again():
    """The lost data may include that a node is ready, or is called."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.fail("n1")
    fleet.ready("n1")
    opened = len(fleet.said(RendezvousOpened))
    fleet.tell(LOST)
    assert len(fleet.said(RendezvousOpened)) == opened
    late = {**fleet.by("n2"), "replica": "main-0", "cycle": 1, "port": 1}
    assert fleet.tell(NodeReady(**late)) is None
    fleet.rejoin("n1")
    assert fleet.job.replicas["main-0"].phase is Phase.RENDEZVOUS
    fleet.rejoin("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_what_has_ended_and_who_is_drained_stays_so():
    roles = RolePlan(name="a", command=("a",)), RolePlan(name="b", command=("b",))
    fleet = Fleet(plan_of(*roles, spares=1))
    fleet.join(*fleet.names)
    fleet.tell(DrainAsked(request="1", by="me", node="n3"))
    fleet.done("n1", replica="a-0")
    fleet.tell(LOST)
    assert [each.replica for each in fleet.said(RestartOrdered)] == ["b-0"]
    for node in fleet.names:
        fleet.rejoin(node)
    assert [fleet.state(node) for node in fleet.names] == [NodeState.STANDBY, NodeState.ACTIVE, NodeState.DRAINED]


def test_an_older_generation_s_loss_or_one_at_the_end_leaves_no_trace():
    fleet = running()
    assert fleet.tell(StoreDataLost(entries=3, generation=1)) is None
    fleet.signal("cancel")
    assert fleet.tell(LOST) is None
