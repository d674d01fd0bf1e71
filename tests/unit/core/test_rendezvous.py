"""Rounds: who gets which ranks, and when."""

from __future__ import annotations

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.rendezvous import SHORT_S
from nvrx_slurm.core.state import NodeState, Phase
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    Fence,
    NodeFenced,
    NodeLost,
    Quarantined,
    RendezvousClosed,
    RendezvousOpened,
    Shutdown,
)
from tests.unit.core.fleet import Fleet, plain, plan_of, running


def test_first_nodes_of_the_allocation_become_active_whatever_the_order_of_joining():
    """Ranks follow the allocation's order, not the race of the joins, and the rest stand by."""
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.join("n3", "n2")
    assert fleet.said(RendezvousClosed) == []
    fleet.join("n1")
    (closed,) = fleet.said(RendezvousClosed)
    assert closed.nodes == ("n1", "n2")
    assert fleet.state("n3") is NodeState.STANDBY


def test_round_closes_without_waiting_for_spares():
    """A rendezvous needs its preferred nodes only; a spare that is still on its way delays nothing."""
    fleet = Fleet(plain(nodes=2, spares=2))
    fleet.join("n1", "n2")
    assert fleet.said(RendezvousClosed)[0].nodes == ("n1", "n2")


def test_spare_stands_in_for_a_node_that_never_comes_after_the_last_call():
    """A preferred node that is merely late is waited for until the last call, then a spare takes its place."""
    fleet = Fleet(plain(nodes=2, spares=1, rendezvous__last_call=5.0))
    fleet.join("n1", "n3")
    assert fleet.later(4.9) == []
    closed = [d for d in fleet.later(0.2) if isinstance(d, RendezvousClosed)]
    assert closed[0].nodes == ("n1", "n3")
    fleet.join("n2")
    assert fleet.state("n2") is NodeState.STANDBY


def test_survivors_keep_their_ranks_and_the_spare_takes_the_dead_nodes():
    """After a node's death only its own seat changes hands."""
    fleet = running(plain(nodes=3, spares=1))
    fleet.lose("n2")
    fleet.ready("n1", "n3")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n4", "n3")
    assert fleet.said(RendezvousClosed)[-1].promoted == ("n4",)


def test_restart_with_all_nodes_alive_promotes_no_spare():
    """When every previous node is ready the rendezvous closes at once, with them."""
    fleet = running(plain(nodes=2, spares=2))
    fleet.fail("n1")
    fleet.ready("n2")
    assert len(fleet.said(RendezvousClosed)) == 1
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_late_node_is_overtaken_only_after_its_teardown_bound_and_is_fenced():
    """A spare takes no rank whose old workers may still be dying: their node is told to die, and the rendezvous waits
    for proof that it has."""
    fleet = running(plain(nodes=2, spares=1, teardown__grace=10.0, rendezvous__last_call=5.0))
    fleet.fail("n1")
    fleet.ready("n1")
    assert fleet.later(14.9) == []
    decisions = fleet.later(0.2)
    assert decisions == [Fence(node="n2", incarnation="n2.0")]
    assert fleet.state("n2") is NodeState.LOST
    fleet.tell(NodeFenced(node="n2", incarnation="n2.0", proof="seen"))
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_ranks_of_a_late_node_wait_for_the_proof_of_its_death():
    """A late node that is fenced may still run its workers: without the proof its ranks wait until its lease has
    lapsed."""
    plan = plain(nodes=2, spares=1, teardown__grace=10.0, rendezvous__last_call=5.0)
    fleet = running(plan)
    fleet.fail("n1")
    fleet.ready("n1")
    assert fleet.later(15.0) == [Fence(node="n2", incarnation="n2.0")]
    wait_s = plan.fault_tolerance.gives_away_after_s
    assert next_deadline(fleet.job) == fleet.now + wait_s
    assert fleet.later(0.001) == []
    assert fleet.later(wait_s - 0.002) == []
    (closed,) = fleet.later(0.001)
    assert (closed.cycle, closed.nodes) == (1, ("n1", "n3"))


def test_ranks_of_a_silent_node_wait_until_its_lease_has_lapsed():
    """Without proof of its death nobody gets them before its workers must be dead; then at once."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.ready("n1")
    assert next_deadline(fleet.job) == fleet.now + 20.0
    assert fleet.later(19.9) == []
    fleet.later(0.1)
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_proof_of_another_agents_death_is_none():
    """What is known of an agent that was replaced says nothing of the one that was lost."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.ready("n1")
    assert fleet.tell(NodeFenced(node="n2", incarnation="n2.9", proof="seen")) is None
    assert fleet.later(1.0) == []


def test_node_that_is_back_is_its_own_proof():
    """An agent joins only when no worker of an earlier one is left: the rendezvous need not wait any more."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.ready("n1")
    fleet.rejoin("n2")
    closed = fleet.said(RendezvousClosed)[-1]
    assert (closed.cycle, closed.nodes) == (1, ("n1", "n2"))


def test_spare_that_falls_silent_holds_nothing_up():
    """It had no worker."""
    fleet = running(plain(nodes=2, spares=2))
    fleet.tell(NodeLost(node="n3", incarnation="n3.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    assert fleet.said(RendezvousClosed)[-1].cycle == 1


def test_node_that_keeps_dying_is_quarantined():
    """After its last chance it is welcome no more, and whoever waits for a node does not get it."""
    fleet = running(plain(nodes=2, spares=1, quarantine_after=2))
    fleet.lose("n3")
    fleet.rejoin("n3")
    assert fleet.state("n3") is NodeState.STANDBY
    fleet.lose("n3")
    fleet.rejoin("n3")
    assert fleet.state("n3") is NodeState.QUARANTINED
    assert [q.node for q in fleet.said(Quarantined)] == ["n3"]
    fleet.lose("n1")
    fleet.ready("n2")
    fleet.later(SHORT_S)
    assert fleet.said(Shutdown)[-1].exit_code == 75


def test_dead_joiner_never_blocks_a_round():
    """A node that dies while a rendezvous waits for it is waited for no more."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.fail("n1")
    fleet.ready("n1")
    fleet.lose("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_rejoined_node_doubles_no_rank():
    """A node whose agent was replaced while the others got ready takes its own seat again, and holds no other."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.rejoin("n2")
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")
    assert fleet.job.standby == {"n3"}


def test_more_live_nodes_than_needed_stand_by():
    """Extras are spares, never an error."""
    fleet = Fleet(plain(nodes=1, spares=0))
    fleet.names += ("extra",)
    fleet.incarnations["extra"] = fleet.seqs["extra"] = 0
    fleet.join("n1", "extra")
    assert fleet.state("extra") is NodeState.STANDBY


def test_without_spares_a_round_goes_on_smaller_down_to_min_nodes():
    """With `min_nodes` the world shrinks, and the survivors move up in order."""
    fleet = running(plain(nodes=3, spares=0, min_nodes=2))
    fleet.lose("n1")
    fleet.ready("n2", "n3")
    closed = fleet.said(RendezvousClosed)[-1]
    assert (closed.nodes, closed.world_size) == (("n2", "n3"), 4)


def test_below_min_nodes_the_job_stops_for_a_retry():
    """No spare and too few nodes: shut down with 75, after a moment, saying what is missing."""
    fleet = running(plain(nodes=3, spares=0, min_nodes=3))
    fleet.lose("n1")
    fleet.ready("n2", "n3")
    assert fleet.said(Shutdown) == []
    fleet.later(SHORT_S)
    (shutdown,) = fleet.said(Shutdown)
    assert shutdown.exit_code == 75
    assert "main-0 needs 3 nodes and has 2" in shutdown.reason


def test_shrunk_world_grows_again_at_the_next_round():
    """A node that came back fills the empty seat when a rendezvous is opened anyway."""
    fleet = running(plain(nodes=2, spares=0, min_nodes=1))
    fleet.lose("n1")
    fleet.ready("n2")
    fleet.rejoin("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n2",)
    fleet.fail("n2")
    fleet.ready("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n2", "n1")


def test_join_timeout_names_who_never_came():
    """A rendezvous that cannot close ends the job at the join timeout, with the names of the missing."""
    fleet = Fleet(plain(nodes=2, spares=0, rendezvous__join_timeout=60.0))
    fleet.join("n1")
    assert fleet.later(59.0) == []
    (shutdown, *_) = fleet.later(1.1)
    assert isinstance(shutdown, Shutdown)
    assert "never ready: n2" in shutdown.reason


def test_replicas_share_one_pool_of_spares_and_restart_alone():
    """A rollout's death opens a rendezvous for that replica only, and it takes the shared spare."""
    policy = RolePlan(name="policy", command=("x",), nodes_per_replica=2)
    rollout = RolePlan(name="rollout", command=("x",), replicas=2)
    fleet = running(plan_of(policy, rollout, spares=1))
    assert [c.nodes for c in fleet.said(RendezvousClosed)] == [("n1", "n2"), ("n3",), ("n4",)]
    fleet.lose("n4")
    assert fleet.said(RendezvousOpened)[-1].replica == "rollout-1"
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n5",)
    assert fleet.job.replicas["policy-0"].phase is Phase.RUNNING
    assert fleet.job.replicas["policy-0"].cycle == 0


def test_replica_does_not_take_the_nodes_another_one_waits_for():
    """At the start each replica's nodes are its own, however late another replica's are."""
    rollout = RolePlan(name="rollout", command=("x",), replicas=2)
    fleet = Fleet(plan_of(rollout, spares=0, rendezvous__last_call=1.0))
    fleet.join("n2")
    assert fleet.later(2.0) == []
    fleet.join("n1")
    assert {c.replica: c.nodes for c in fleet.said(RendezvousClosed)} == {"rollout-0": ("n1",), "rollout-1": ("n2",)}
