"""What users ask for, restarts, drains and undrains, and what prevents it."""

from __future__ import annotations

from nvrx_slurm.core import limits
from nvrx_slurm.core.rendezvous import SHORT_S
from nvrx_slurm.core.state import NodeState, Phase
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    Attributed,
    CommandAsked,
    CommandOrdered,
    Decision,
    DrainAsked,
    NodeDrained,
    NodeUndrained,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    RequestRefused,
    RestartAsked,
    RestartDecided,
    RestartOrdered,
    Shutdown,
    UndrainAsked,
)
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from tests.unit.core.fleet import Fleet, plain, plan_of, running

BY = "ada@login1"


def ask(fleet: Fleet, request: str = "r1", generation: int = 0, **cycles: int) -> list[Decision] | None:
    """Ask for a restart of the replicas, each in the cycle given."""
    named = {name.replace("_", "-"): cycle for name, cycle in cycles.items()}
    return fleet.tell(RestartAsked(request=request, by=BY, cycles=named, generation=generation))


def drain(
    fleet: Fleet, node: str, *, force: bool = False, request: str = "", generation: int = 0
) -> list[Decision] | None:
    request = request or f"d-{node}"
    return fleet.tell(DrainAsked(request=request, by=BY, node=node, force=force, generation=generation))


def undrain(fleet: Fleet, node: str, request: str = "") -> list[Decision] | None:
    return fleet.tell(UndrainAsked(request=request or f"u-{node}", by=BY, node=node))


def refused(decisions: list[Decision] | None) -> str | None:
    """The reason, if a refusal is all that follows."""
    if decisions is None or len(decisions) != 1 or not isinstance(decisions[0], RequestRefused):
        return None
    return decisions[0].why


# ------------------------------------------------------------------------------------------- restarts


def test_users_restart_opens_the_next_rendezvous_and_spends_nothing():
    """No budget, no attribution and no count of cycles without progress changes: the workers are only started
    again."""
    fleet = running(plain(nodes=2, spares=1, max_restarts=0, progress__max_no_progress_cycles=1))
    assert ask(fleet, main_0=0) == [
        RestartOrdered(request="r1", by=BY, replica="main-0", cycle=0),
        RendezvousOpened(replica="main-0", cycle=1),
    ]
    fleet.ready("n1", "n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")
    replica = fleet.job.replicas["main-0"]
    assert (replica.restarted_at, replica.no_progress, replica.crashes) == ([], 0, 0)
    assert fleet.said(RestartDecided) == []
    assert limits.worker_budget_spent(fleet.job, replica, fleet.now) is not None, "the budget of 0 stays one of 0"


def test_workers_that_end_by_a_users_restart_are_no_failure():
    """What they report while they are stopped comes too late to be a failure."""
    fleet = running(plain(nodes=2, max_restarts=0))
    ask(fleet, main_0=0)
    assert fleet.fail("n2", cycle=0) is None
    fleet.ready("n1", "n2")
    assert fleet.job.shutdown is None


def test_restart_that_arrives_in_a_later_cycle_is_refused():
    """The job has restarted since the user looked."""
    fleet = running()
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    assert "cycle 1" in (refused(ask(fleet, main_0=0)) or "")
    assert len(fleet.said(RendezvousOpened)) == 2


def test_restart_that_meets_a_recovery_is_refused():
    """The workers start anyway; a second rendezvous would only stop them again."""
    fleet = running()
    fleet.fail("n1")
    assert refused(ask(fleet, main_0=1)) is not None


def test_request_that_comes_twice_is_answered_once():
    """A copy of the record in the inbox, or a request that was sent again, leaves no trace."""
    fleet = running()
    assert ask(fleet, main_0=0)
    fleet.ready("n1", "n2")
    assert ask(fleet, main_0=1) is None, "the same request"
    assert drain(fleet, "n1", request="r1") is None
    assert fleet.job.replicas["main-0"].cycle == 1


def test_requests_of_an_older_generation_are_refused():
    """Slurm has requeued the job since: what the user saw does not exist any more."""
    fleet = running()
    fleet.requeue()
    fleet.join(*fleet.names)
    assert "generation 1" in (refused(ask(fleet, main_0=0)) or "")
    assert "generation 1" in (refused(drain(fleet, "n1")) or "")


def test_requests_to_a_job_that_ends_are_refused():
    fleet = running()
    fleet.signal("cancel")
    assert "cancelled" in (refused(ask(fleet, main_0=0)) or "")


def test_one_replica_restarts_alone_unless_its_role_says_otherwise():
    """As after a failure, `restart_job` restarts all of them."""
    alone = RolePlan(name="a", command=("x",), replicas=2, nodes_per_replica=1, workers_per_node=1)
    fleet = running(plan_of(alone))
    ask(fleet, a_1=0)
    assert [each.replica for each in fleet.said(RestartOrdered)] == ["a-1"]
    together = RolePlan(
        name="a", command=("x",), replicas=2, nodes_per_replica=1, workers_per_node=1, on_failure="restart_job"
    )
    fleet = running(plan_of(together))
    ask(fleet, a_1=0)
    assert [each.replica for each in fleet.said(RestartOrdered)] == ["a-0", "a-1"]


def test_one_request_restarts_several_replicas():
    role = RolePlan(name="a", command=("x",), replicas=3, nodes_per_replica=1, workers_per_node=1)
    fleet = running(plan_of(role))
    ask(fleet, a_0=0, a_2=0)
    assert [each.replica for each in fleet.said(RestartOrdered)] == ["a-0", "a-2"]


def test_replica_that_is_done_is_not_restarted():
    role = RolePlan(name="b", command=("x",), replicas=2, nodes_per_replica=1, workers_per_node=1)
    fleet = running(plan_of(role))
    fleet.done("n1", replica="b-0")
    assert "done" in (refused(ask(fleet, b_0=0)) or "")


def test_failure_after_a_users_restart_is_counted_as_ever():
    fleet = running(plain(nodes=2, max_restarts=1))
    ask(fleet, main_0=0)
    fleet.ready("n1", "n2")
    fleet.fail("n1")
    assert fleet.said(RestartDecided)[-1].restarts_left == 0


def test_recovery_after_a_users_restart_counts_from_the_request():
    """No failure was noticed before the request."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.now += 7.0
    ask(fleet, main_0=0)
    fleet.now += 1.0
    fleet.ready("n1", "n2")
    fleet.now += 2.0
    fleet.started("n1", "n2")
    phases = {"decided": 0.0, "torn_down": 1.0, "closed": 0.0, "spawned": 2.0}
    assert fleet.said(Recovered) == [Recovered(replica="main-0", cycle=1, phases=phases, total_s=3.0)]


# --------------------------------------------------------------------------------------------- drains


def test_drain_moves_the_ranks_of_a_node_to_a_spare():
    """It is an orderly restart: the node tears down as the others do, and stays, without ranks."""
    fleet = running(plain(nodes=2, spares=1))
    assert drain(fleet, "n1") == [
        NodeDrained(request="d-n1", by=BY, node="n1"),
        RestartOrdered(request="d-n1", by=BY, replica="main-0", cycle=0, node="n1"),
        RendezvousOpened(replica="main-0", cycle=1),
    ]
    fleet.ready("n2")
    assert len(fleet.said(RendezvousClosed)) == 1, "n1 may still have workers"
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n3", "n2")
    assert fleet.state("n1") is NodeState.DRAINED
    fleet.lose("n2")
    fleet.ready("n3")
    fleet.later(SHORT_S)
    assert fleet.said(Shutdown)[-1].exit_code == 75, "a drained node is no spare"
    assert "drained: n1" in fleet.said(Shutdown)[-1].reason


def test_drain_without_a_spare_is_refused_also_with_force():
    fleet = running(plain(nodes=2, spares=0))
    assert refused(drain(fleet, "n1")) == "no spare is left for the ranks of n1"
    assert refused(drain(fleet, "n1", force=True, request="f")) == "no spare is left for the ranks of n1"
    assert fleet.job.replicas["main-0"].phase is Phase.RUNNING


def test_drain_counts_on_nodes_that_have_yet_to_join():
    """It does not count on those that another rendezvous waits for, but on one that was undrained again."""
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.join("n1", "n2")
    assert refused(drain(fleet, "n1")) is None
    fleet = Fleet(plain(nodes=2, spares=0))
    fleet.join("n1")
    assert drain(fleet, "n1") == [RequestRefused(request="d-n1", why="no spare is left for the ranks of n1")]
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.join("n1", "n3")
    drain(fleet, "n2")
    undrain(fleet, "n2")
    assert refused(drain(fleet, "n1")) is None


def test_drain_of_a_node_that_is_lost_costs_nothing():
    """This is so while the rendezvous lacks a node, too: the lost node could not have come."""
    fleet = running(plain(nodes=2, spares=1))
    fleet.lose("n3")
    fleet.lose("n2")
    assert drain(fleet, "n3") == [NodeDrained(request="d-n3", by=BY, node="n3")]


def test_drain_of_a_lost_node_whose_ranks_a_spare_has_restarts_no_replica():
    """The node's former replica runs without it."""
    fleet = running(plain(nodes=2, spares=2))
    fleet.lose("n2")
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")
    assert drain(fleet, "n2") == [NodeDrained(request="d-n2", by=BY, node="n2")]
    assert fleet.job.replicas["main-0"].phase is Phase.RUNNING


def test_spare_that_no_open_rendezvous_lacks_can_be_drained():
    role = RolePlan(name="r", command=("x",), replicas=2, nodes_per_replica=1, workers_per_node=1)
    fleet = running(plan_of(role, spares=1))
    fleet.fail("n1", replica="r-0")
    assert drain(fleet, "n3") == [NodeDrained(request="d-n3", by=BY, node="n3")]


def test_drain_takes_other_replicas_along_where_a_failure_would():
    role = RolePlan(
        name="r", command=("x",), replicas=2, nodes_per_replica=1, workers_per_node=1, on_failure="restart_job"
    )
    fleet = running(plan_of(role, spares=1))
    drain(fleet, "n1")
    assert [each.replica for each in fleet.said(RestartOrdered)] == ["r-0", "r-1"]


def test_forced_drain_of_a_recovery_or_a_start_leaves_min_nodes():
    fleet = running(plain(nodes=3, spares=0, min_nodes=2))
    fleet.fail("n1")
    assert refused(drain(fleet, "n1", force=True)) is None
    assert refused(drain(fleet, "n2", force=True)) is not None
    fleet = Fleet(plain(nodes=3, spares=0, min_nodes=2))
    fleet.join("n1", "n2")
    assert refused(drain(fleet, "n3", force=True)) is None


def test_forced_drain_goes_on_with_fewer_nodes_down_to_min_nodes():
    fleet = running(plain(nodes=3, spares=0, min_nodes=2))
    assert "--force" in (refused(drain(fleet, "n1")) or "")
    drain(fleet, "n1", force=True, request="f")
    fleet.ready("n1", "n2", "n3")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n2", "n3")
    assert "at least" in (refused(drain(fleet, "n2", force=True)) or "")


def test_drain_of_a_spare_and_of_a_node_that_a_recovery_needs():
    """A spare leaves the pool, unless an open rendezvous is about to take it."""
    fleet = running(plain(nodes=2, spares=2))
    assert drain(fleet, "n4") == [NodeDrained(request="d-n4", by=BY, node="n4")]
    assert fleet.state("n4") is NodeState.DRAINED
    fleet.lose("n2")
    assert refused(drain(fleet, "n3")) == "main-0 needs it"
    fleet.ready("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_drain_that_meets_a_recovery_becomes_part_of_it():
    """The open rendezvous replaces the drained node too: no second one is opened."""
    fleet = running(plain(nodes=2, spares=2))
    fleet.fail("n1")
    assert drain(fleet, "n2") == [NodeDrained(request="d-n2", by=BY, node="n2")]
    fleet.ready("n1", "n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")
    fleet.fail("n1")
    fleet.ready("n1")
    assert drain(fleet, "n1") == [NodeDrained(request="d-n1", by=BY, node="n1")], "it is ready already"
    fleet.ready("n3")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n4", "n3")


def test_two_drains_do_not_count_on_the_same_spare():
    role = RolePlan(name="r", command=("x",), replicas=2, nodes_per_replica=1, workers_per_node=1)
    fleet = running(plan_of(role, spares=1))
    assert refused(drain(fleet, "n1")) is None
    assert refused(drain(fleet, "n2")) == "no spare is left for the ranks of n2"


def test_drain_is_taken_back_when_the_spare_is_lost_meanwhile():
    """An operator's request must not end a job that could go on."""
    fleet = running(plain(nodes=2, spares=1))
    drain(fleet, "n1")
    fleet.ready("n1")
    fleet.lose("n3")
    decisions = fleet.ready("n2")
    assert decisions[0] == taken_back("n1")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")
    assert fleet.job.shutdown is None
    fleet.fail("n2")
    fleet.ready("n1", "n2")
    assert [each.nodes for each in fleet.said(RendezvousClosed)] == [("n1", "n2")] * 3, "it is drained no more"


def taken_back(node: str) -> NodeUndrained:
    return NodeUndrained(request=f"d-{node}", by=BY, node=node, why="no spare is left for its ranks in main-0")


def test_no_more_drains_are_taken_back_than_the_rendezvous_lacks_nodes():
    """The drains that came first are taken back, and only those of nodes that have not been lost."""
    # nodes, spares; drained; lost → taken back, nodes of the next cycle
    for plan, drained, lost, back, nodes in (
        (plain(nodes=3, spares=2), ("n1", "n2"), ("n5",), ("n1",), ("n1", "n4", "n3")),
        (plain(nodes=4, spares=3), ("n1", "n2", "n3"), ("n6", "n7"), ("n1", "n2"), ("n1", "n2", "n5", "n4")),
        (plain(nodes=3, spares=2), ("n1", "n2"), ("n1", "n5"), ("n2",), ("n4", "n2", "n3")),
    ):
        fleet = running(plan)
        for node in drained:
            drain(fleet, node)
        for node in lost:
            fleet.lose(node)
        fleet.ready(*(name for name in fleet.names[: plan.roles[0].nodes_per_replica] if name not in lost))
        assert fleet.said(NodeUndrained) == [taken_back(node) for node in back]
        assert fleet.said(RendezvousClosed)[-1].nodes == nodes


def test_forced_drain_stands_where_min_nodes_are_left():
    """A forced drain is taken back only if fewer than that are left; a drain without force is taken back first."""
    for lost, back, nodes in (
        (("n5",), ("n2",), ("n4", "n2", "n3")),
        (("n4", "n5"), ("n1", "n2"), ("n1", "n2", "n3")),
    ):
        fleet = running(plain(nodes=3, spares=2, min_nodes=2))
        drain(fleet, "n1", force=True)
        drain(fleet, "n2")
        for node in lost:
            fleet.lose(node)
        fleet.ready("n1", "n2", "n3")
        assert fleet.said(NodeUndrained) == [taken_back(node) for node in back]
        assert fleet.said(RendezvousClosed)[-1].nodes == nodes
    fleet = running(plain(nodes=3, spares=0, min_nodes=2))
    drain(fleet, "n1", force=True)
    fleet.ready("n1")
    fleet.lose("n2")
    fleet.ready("n3")
    assert fleet.said(NodeUndrained) == [taken_back("n1")]
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")


def test_node_whose_drain_is_taken_back_is_one_of_the_rendezvous_again():
    """If the rendezvous waits for a verdict and the node is lost meanwhile, the rendezvous does not close with it."""
    acting = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)
    fleet = running(plain(nodes=2, spares=1, attribution=acting))
    fleet.fail("n2")
    drain(fleet, "n1")
    fleet.ready("n1")
    fleet.lose("n3")
    assert fleet.ready("n2") == [taken_back("n1")]
    assert (fleet.state("n1"), fleet.job.nodes["n1"].replica) == (NodeState.READY, "main-0")
    fleet.lose("n1")
    answer = Attribution(source="lib", verdict=Verdict.RESTART)
    fleet.tell(Attributed(replica="main-0", cycle=0, rank=0, attribution=answer))
    fleet.later(SHORT_S)
    assert len(fleet.said(RendezvousClosed)) == 1
    assert [each.exit_code for each in fleet.said(Shutdown)] == [75]


def test_drained_node_that_is_lost_comes_back_drained():
    fleet = running(plain(nodes=2, spares=2))
    drain(fleet, "n1")
    fleet.lose("n1")
    fleet.ready("n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n3", "n2")
    fleet.rejoin("n1")
    assert fleet.state("n1") is NodeState.DRAINED


def test_node_that_is_lost_can_be_drained_and_undrained():
    """The node has no agent to inform: its state when it is back is what counts."""
    fleet = running(plain(nodes=2, spares=2))
    fleet.lose("n4")
    assert drain(fleet, "n4") == [NodeDrained(request="d-n4", by=BY, node="n4")]
    assert undrain(fleet, "n4") == [NodeUndrained(request="u-n4", by=BY, node="n4")]
    fleet.rejoin("n4")
    assert fleet.state("n4") is NodeState.STANDBY


def test_undrained_node_is_a_spare_again():
    fleet = running(plain(nodes=2, spares=1))
    drain(fleet, "n3")
    assert undrain(fleet, "n3") == [NodeUndrained(request="u-n3", by=BY, node="n3")]
    assert fleet.state("n3") is NodeState.STANDBY
    assert "not drained" in (refused(undrain(fleet, "n3", "again")) or "")


def test_undrain_in_the_middle_of_the_move_leaves_the_ranks_where_they_are():
    fleet = running(plain(nodes=2, spares=1))
    drain(fleet, "n1")
    undrain(fleet, "n1")
    fleet.ready("n1", "n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n2")


def test_undrained_node_is_no_longer_one_that_the_rendezvous_replaces():
    """Drained again as a spare it stays drained: only the drains that a rendezvous carries out are taken back."""
    fleet = running(plain(nodes=2, spares=2))
    drain(fleet, "n1")
    fleet.ready("n1")
    undrain(fleet, "n1")
    assert drain(fleet, "n1", request="again") == [NodeDrained(request="again", by=BY, node="n1")]
    fleet.lose("n3")
    fleet.lose("n4")
    fleet.ready("n2")
    fleet.later(SHORT_S)
    assert fleet.said(NodeUndrained) == [NodeUndrained(request="u-n1", by=BY, node="n1")]
    assert fleet.state("n1") is NodeState.DRAINED


def test_drain_at_the_start_of_a_job():
    """A drained node that has not joined yet is not waited for; it joins without ranks."""
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.join("n1", "n3")
    drain(fleet, "n2")
    assert fleet.said(RendezvousClosed)[-1].nodes == ("n1", "n3")
    fleet.join("n2")
    assert fleet.state("n2") is NodeState.DRAINED


def test_start_waits_for_no_node_that_is_drained():
    """If the other nodes are too few, the job stops as soon as they have joined."""
    fleet = Fleet(plain(nodes=2, spares=1))
    fleet.join("n1")
    drain(fleet, "n2")
    fleet.lose("n1")
    fleet.join("n3")
    assert fleet.said(Shutdown) == []
    fleet.later(SHORT_S)
    assert [each.exit_code for each in fleet.said(Shutdown)] == [75]


def test_drain_of_a_node_whose_ranks_are_done_moves_nothing():
    fleet = running(plain(nodes=2, spares=1))
    fleet.done("n1")
    assert drain(fleet, "n1") == [NodeDrained(request="d-n1", by=BY, node="n1")]
    fleet.done("n2")
    assert fleet.said(Shutdown)[-1].exit_code == 0


def test_drains_end_with_the_generation():
    """A requeued job has another allocation."""
    fleet = running(plain(nodes=2, spares=1))
    drain(fleet, "n3")
    fleet.requeue()
    fleet.join(*fleet.names)
    assert fleet.state("n3") is NodeState.STANDBY


def test_drained_nodes_leave_with_the_job():
    """The end of the job waits for their agents too."""
    fleet = running(plain(nodes=1, spares=1))
    drain(fleet, "n2")
    fleet.done("n1")
    fleet.leave("n1")
    assert not fleet.job.ended
    fleet.leave("n2")
    assert fleet.job.ended


# ------------------------------------------------------------------------------------------- commands


def run(
    fleet: Fleet, rank: int, *, cycle: int = 0, request: str = "c1", generation: int = 0
) -> list[Decision] | None:
    fields = {"request": request, "by": BY, "argv": ("nvidia-smi", "-q"), "rank": rank, "cycle": cycle}
    return fleet.tell(CommandAsked(**fields, replica="main-0", generation=generation))


def test_command_goes_to_the_node_that_has_the_rank():
    """The order names the node and the cycle: an agent that reads it later runs nothing."""
    fleet = running(plain(nodes=2))
    fields = {"by": BY, "argv": ("nvidia-smi", "-q"), "replica": "main-0", "node": "n2", "rank": 3}
    assert run(fleet, 3) == [CommandOrdered(**fields, request="c1", cycle=0)]
    assert run(fleet, 3) is None, "the same request"
    fleet.requeue()
    fleet.join(*fleet.names)
    assert run(fleet, 3, request="c2", generation=1) == [
        CommandOrdered(**fields, request="c2", cycle=0, generation=1)
    ]


def test_command_without_a_worker_to_run_beside_is_refused():
    """The cycle is another one, a recovery is under way, or the rank does not exist or is done."""
    fleet = running(plain(nodes=2))
    assert refused(run(fleet, 4, request="a")) is not None
    assert refused(run(fleet, 0, cycle=1, request="b")) is not None
    fleet.done("n1")
    assert refused(run(fleet, 0, request="c")) is not None
    fleet.fail("n2")
    assert refused(run(fleet, 2, cycle=1, request="d")) is not None
