"""Rendezvous: which nodes get which ranks, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.core.rendezvous import SHORT_S
from nvrx_slurm.core.state import NodeState, Phase
from nvrx_slurm.jobspec.model import AttributionSpec, BackoffSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    AgentsStarted,
    Attributed,
    DrainAsked,
    Fence,
    NodeFenced,
    NodeJoined,
    NodeLost,
    NodeReady,
    Quarantined,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    Shutdown,
)
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from tests.unit.core.fleet import Fleet, plain, plan_of, running


def test_first_nodes_of_the_allocation_become_active_in_any_order_of_joining():
    """Ranks follow the allocation's order, not that of the joins, and the other nodes are standby."""
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.join("n3", "n2")
    assert fleet.said(RendezvousClosed) == []
    fleet.join("n1")
    (closed,) = fleet.said(RendezvousClosed)
    assert closed.nodes == ("n1", "n2")
    assert fleet.state("n3") is NodeState.STANDBY


def test_one_record_has_the_whole_world_of_a_rendezvous():
    """Agents start their workers by it: which nodes, in which order, and where rank 0 listens. Each generation has
    its own."""
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.requeue()
    assert fleet.said(RendezvousOpened) == [
        RendezvousOpened(replica="main-0", cycle=0, generation=generation) for generation in (0, 1)
    ]
    fleet.join("n2", "n3")
    fleet.tell(NodeJoined(**fleet.by("n1"), addr="10.0.0.1", port=29501))
    assert fleet.said(RendezvousClosed) == [
        RendezvousClosed(
            replica="main-0",
            cycle=0,
            nodes=("n1", "n2"),
            promoted=(),
            active=2,
            standby=1,
            world_size=4,
            master_addr="10.0.0.1",
            master_port=29501,
            generation=1,
        )
    ]
    assert [fleet.job.nodes[name].replica for name in fleet.names] == ["main-0", "main-0", None]


def test_rendezvous_closes_without_waiting_for_spares():
    """A rendezvous needs its preferred nodes only; a spare that is still on its way delays nothing."""
    fleet = Fleet(plain(nodes=2, spares=2))
    fleet.join("n1", "n2")
    assert fleet.said(RendezvousClosed)[0].nodes == ("n1", "n2")


def test_spare_stands_in_for_a_node_that_never_comes_after_the_last_call():
    """A preferred node that is only late is waited for until the last call; then a spare takes its place."""
    fleet = Fleet(plain(nodes=2, spares=1, rendezvous__last_call=5.0))
    fleet.join("n1", "n3")
    assert fleet.later(4.9) == []
    closed = [d for d in fleet.later(0.2) if isinstance(d, RendezvousClosed)]
    assert closed[0].nodes == ("n1", "n3")
    fleet.join("n2")
    assert fleet.state("n2") is NodeState.STANDBY


def test_survivors_keep_their_ranks_and_the_spare_takes_the_dead_nodes():
    """After a node's death only that node's seat changes."""
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
    """A spare takes no rank whose old workers may still be dying: their node is fenced, and the rendezvous waits for
    the proof of its death."""
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
    """A fenced late node may still run its workers: without the proof its ranks wait until its lease has lapsed."""
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
    """Without proof of the node's death, its ranks are assigned once its workers must be dead, and not before."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.ready("n1")
    assert next_deadline(fleet.job) == fleet.now + 20.0
    assert fleet.later(19.9) == []
    fleet.later(0.1)
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_proof_of_another_agents_death_is_none():
    """Proof about an agent that was replaced says nothing about the agent that was lost."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.ready("n1")
    assert fleet.tell(NodeFenced(node="n2", incarnation="n2.9", proof="seen")) is None
    assert fleet.later(1.0) == []


def test_node_that_is_back_is_its_own_proof():
    """An agent joins only when no worker of an earlier one is left, so the rendezvous need not wait any more."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.ready("n1")
    fleet.rejoin("n2")
    closed = fleet.said(RendezvousClosed)[-1]
    assert (closed.cycle, closed.nodes) == (1, ("n1", "n2"))


def test_spare_that_falls_silent_holds_nothing_up():
    """A spare has no workers."""
    fleet = running(plain(nodes=2, spares=2))
    fleet.tell(NodeLost(node="n3", incarnation="n3.0", cause="heartbeat_timeout", safe_after_s=20.0))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    assert fleet.said(RendezvousClosed)[-1].cycle == 1


def test_node_that_keeps_dying_is_quarantined():
    """After its last chance the node gets no ranks, even if a rendezvous lacks a node."""
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


def test_dead_joiner_never_blocks_a_rendezvous():
    """A rendezvous stops waiting for a node that dies."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.fail("n1")
    fleet.ready("n1")
    fleet.lose("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_rejoined_node_doubles_no_rank():
    """A node whose agent was replaced while the others got ready takes its own seat again, and no other."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.rejoin("n2")
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")
    assert fleet.job.standby == {"n3"}


def test_more_live_nodes_than_needed_are_standby():
    """A node beyond those needed is a spare, never an error."""
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
    """Without a spare and with too few nodes the job shuts down with 75, after a moment, and says what is missing."""
    fleet = running(plain(nodes=3, spares=0, min_nodes=3))
    fleet.lose("n1")
    fleet.ready("n2", "n3")
    assert fleet.said(Shutdown) == []
    fleet.later(SHORT_S)
    (shutdown,) = fleet.said(Shutdown)
    assert shutdown.exit_code == 75
    assert "main-0 needs 3 nodes and has 2" in shutdown.reason


@pytest.mark.parametrize("spares", [0, 1])
def test_spares_count_for_min_nodes(spares):
    """Two of three nodes are lost, and two are enough: with the spare the job goes on."""
    fleet = running(plain(nodes=3, spares=spares, min_nodes=2))
    fleet.lose("n1")
    fleet.lose("n2")
    fleet.ready("n3")
    fleet.later(SHORT_S)
    nodes = [closed.nodes for closed in fleet.said(RendezvousClosed)]
    assert nodes[1:] == ([("n4", "n3")] if spares else [])
    assert [each.exit_code for each in fleet.said(Shutdown)] == ([] if spares else [75])


def test_want_of_nodes_is_reported_with_all_that_are_ready():
    """The reason counts the ready nodes and the spares, and names the nodes that never came."""
    fleet = Fleet(plain(nodes=3, spares=1, rendezvous__join_timeout=60.0))
    fleet.join("n2", "n4")
    (shutdown, *_) = fleet.later(60.0)
    reason = "main-0 needs 3 nodes and has 2, no spare is left; never ready: n1, n3"
    assert shutdown == Shutdown(exit_code=75, reason=reason)


def test_want_of_nodes_names_those_that_were_called_and_did_not_answer():
    fleet = running(plain(nodes=2, spares=0, rendezvous__join_timeout=60.0))
    fleet.fail("n1")
    fleet.ready("n1")
    (shutdown, *_) = fleet.later(60.0)
    reason = "main-0 needs 2 nodes and has 1, no spare is left; never ready: n2"
    assert shutdown == Shutdown(exit_code=75, reason=reason)


def test_node_that_had_finished_and_is_back_is_ready_for_the_next_round_at_once():
    """It was lost after its work was done, which is no failure, and has joined again: nothing has to be torn down."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.done("n1")
    fleet.lose("n1")
    fleet.rejoin("n1")
    assert fleet.state("n1") is NodeState.STANDBY
    fleet.fail("n2")
    replica = fleet.job.replicas["main-0"]
    assert (replica.awaited, replica.ready, fleet.job.nodes["n1"].replica) == ({"n2"}, {"n1"}, "main-0")
    fleet.ready("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_late_node_is_fenced_once():
    """A later report of the node causes no second fence."""
    fleet = running(plain(nodes=2, spares=1, teardown__grace=10.0, rendezvous__last_call=5.0))
    fleet.fail("n1")
    fleet.ready("n1")
    assert fleet.later(15.0) == [Fence(node="n2", incarnation="n2.0")]
    assert fleet.tell(NodeReady(**fleet.by("n2"), replica="main-0", cycle=1, port=1)) is None
    assert len(fleet.said(Fence)) == 1


# ------------------------------------------------------------------------- how long each phase took


def last_ready(fleet: Fleet) -> None:
    fleet.ready("n2")


def last_lost(fleet: Fleet) -> None:
    fleet.lose("n2")


def last_drained(fleet: Fleet) -> None:
    fleet.tell(DrainAsked(request="d", by="ada", node="n2"))
    fleet.ready("n2")


@pytest.mark.parametrize("last", [last_ready, last_lost, last_drained])
def test_teardown_ends_with_the_last_node_that_is_awaited(last: Callable[[Fleet], None]) -> None:
    """That node gets ready, is lost, or is drained; what the rendezvous waits for after that is no teardown."""
    acting = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)
    fleet = running(plain(nodes=2, spares=1, attribution=acting))
    fleet.fail("n1")
    fleet.now += 0.5
    fleet.ready("n1")
    fleet.now += 0.5
    last(fleet)
    fleet.now += 2.0
    answer = Attribution(source="lib", verdict=Verdict.RESTART)
    fleet.tell(Attributed(replica="main-0", cycle=0, rank=0, attribution=answer))
    fleet.now += 4.0
    fleet.started(*fleet.said(RendezvousClosed)[-1].nodes)
    phases = {"decided": 0.0, "torn_down": 1.0, "closed": 2.0, "spawned": 4.0}
    assert fleet.said(Recovered) == [Recovered(replica="main-0", cycle=1, phases=phases, total_s=7.0)]


def lost_later(fleet: Fleet) -> None:
    fleet.lose("n2")


def drained_later(fleet: Fleet) -> None:
    fleet.tell(DrainAsked(request="d", by="ada", node="n2"))


@pytest.mark.parametrize("later", [lost_later, drained_later])
def test_what_becomes_of_a_node_that_was_ready_does_not_prolong_the_teardown(later: Callable[[Fleet], None]) -> None:
    """Its old workers were gone before."""
    acting = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)
    fleet = running(plain(nodes=2, spares=1, attribution=acting))
    fleet.fail("n1")
    fleet.now += 1.0
    fleet.ready("n1", "n2")
    fleet.now += 2.0
    later(fleet)
    fleet.now += 2.0
    answer = Attribution(source="lib", verdict=Verdict.RESTART)
    fleet.tell(Attributed(replica="main-0", cycle=0, rank=0, attribution=answer))
    fleet.started("n1", "n3")
    phases = {"decided": 0.0, "torn_down": 1.0, "closed": 4.0, "spawned": 0.0}
    assert fleet.said(Recovered) == [Recovered(replica="main-0", cycle=1, phases=phases, total_s=5.0)]


def test_teardown_of_a_late_node_ends_with_its_fence() -> None:
    """The wait for the proof of its death belongs to the rendezvous."""
    fleet = running(plain(nodes=2, spares=1, teardown__grace=10.0, rendezvous__last_call=5.0))
    fleet.fail("n1")
    fleet.ready("n1")
    fleet.later(15.0)
    fleet.now += 2.0
    fleet.prove_dead("n2")
    fleet.started("n1", "n3")
    phases = {"decided": 0.0, "torn_down": 15.0, "closed": 2.0, "spawned": 0.0}
    assert fleet.said(Recovered) == [Recovered(replica="main-0", cycle=1, phases=phases, total_s=17.0)]


def test_where_all_that_is_awaited_is_here_already_the_teardown_takes_no_time() -> None:
    """One node had finished and is back; the other one is lost, and is back too."""
    fleet = running(plain(nodes=2, spares=0))
    fleet.done("n1")
    fleet.lose("n1")
    fleet.rejoin("n1")
    fleet.lose("n2")
    fleet.now += SHORT_S / 2
    fleet.rejoin("n2")
    fleet.started("n1", "n2")
    [recovered] = fleet.said(Recovered)
    assert recovered.phases == {"decided": 0.0, "torn_down": 0.0, "closed": SHORT_S / 2, "spawned": 0.0}


def test_where_a_node_never_comes_the_teardown_ends_with_the_round() -> None:
    """A spare gets its place after the last call, and from then on the cycle counts."""
    fleet = Fleet(plain(nodes=2, spares=1, rendezvous__last_call=5.0))
    fleet.join("n1")
    fleet.now += 1.0
    fleet.join("n3")
    fleet.later(5.0)
    replica = fleet.job.replicas["main-0"]
    assert replica.stamps is not None
    assert (replica.stamps.torn_down, replica.stamps.closed, replica.began_at) == (fleet.now,) * 3


def test_a_cycle_with_fewer_nodes_counts_from_its_close_too() -> None:
    fleet = running(plain(nodes=2, spares=0, min_nodes=1))
    fleet.lose("n1")
    fleet.now += 3.0
    fleet.ready("n2")
    assert fleet.job.replicas["main-0"].began_at == fleet.now


# ------------------------------------------------------------------------------- when it is due


def test_nodes_that_have_not_joined_are_expected_up_to_a_moment() -> None:
    """A spare that never came is waited for as long as it may come, counted from the start of the job."""
    plan = plain(nodes=2, spares=1, rendezvous__join_timeout=600.0)
    fleet = Fleet(plan)
    fleet.join("n1", "n2")
    fleet.now += 100.0
    fleet.lose("n1")
    fleet.ready("n2")
    assert fleet.later(499.9) == []
    assert fleet.later(0.1) == []
    assert next_deadline(fleet.job) == fleet.now + SHORT_S
    assert [each.exit_code for each in fleet.later(SHORT_S) if isinstance(each, Shutdown)] == [75]


def test_a_round_is_overdue_later_where_agents_have_been_started_for_it() -> None:
    """The bound is later while one of the agents is expected; once all have joined, the rendezvous' own bound
    counts."""
    fleet = running(plain(nodes=3, spares=0, rendezvous__join_timeout=600.0))
    opened_at = fleet.now
    fleet.lose("n3")
    fleet.now += 10.0
    fleet.tell(AgentsStarted(nodes=("n3",)))
    fleet.ready("n1")
    assert next_deadline(fleet.job) == opened_at + 610.0
    fleet.rejoin("n3")
    assert next_deadline(fleet.job) == opened_at + 600.0


def test_a_round_that_waits_for_anothers_verdict_is_looked_at_when_that_is_due() -> None:
    policy = RolePlan(name="policy", command=("x",), on_failure="restart_job")
    acting = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)
    fleet = Fleet(plan_of(policy, RolePlan(name="rollout", command=("x",)), attribution=acting))
    fleet.join("n1", "n2")
    fleet.fail("n1", replica="policy-0")
    fleet.ready("n2", replica="rollout-0")
    assert next_deadline(fleet.job) == fleet.now + 10.0


def test_the_pause_of_a_crash_loop_is_no_deadline_while_nodes_are_awaited() -> None:
    backoff = BackoffSpec(after=1, initial=2.0, max=64.0)
    fleet = running(plain(nodes=2, backoff=backoff, rendezvous__last_call=5.0, rendezvous__join_timeout=600.0))
    fleet.fail("n1")
    fleet.ready("n1")
    assert next_deadline(fleet.job) == fleet.job.replicas["main-0"].last_call_at
    fleet.ready("n2")
    assert next_deadline(fleet.job) == fleet.now + 2.0


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


def test_join_timeout_names_the_nodes_that_never_came():
    """A rendezvous that cannot close ends the job at the join timeout, and names the missing nodes."""
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
    """At the start each replica has its own nodes, however late those of another replica are."""
    rollout = RolePlan(name="rollout", command=("x",), replicas=2)
    fleet = Fleet(plan_of(rollout, spares=0, rendezvous__last_call=1.0))
    fleet.join("n2")
    assert fleet.later(2.0) == []
    fleet.join("n1")
    assert {c.replica: c.nodes for c in fleet.said(RendezvousClosed)} == {"rollout-0": ("n1",), "rollout-1": ("n2",)}
