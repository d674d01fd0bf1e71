"""The nodes, ranks and processes of a job by its journal."""

from __future__ import annotations

import pytest

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import ControllerStarted, JobStarted, NodeJoined, WorkersStarted
from nvrx_slurm.lab.flow.topology import JobTopology, node_of, resolved, worker_of
from tests.unit.core.fleet import Fleet, plain, plan_of, running


def world_of(fleet):
    world = JobTopology(fleet.plan)
    for entry in fleet.journal:
        world.feed(entry)
    return world


def start_workers(fleet, node, pids, replica="main-0"):
    cycle = fleet.job.replicas[replica].cycle
    fleet.tell(WorkersStarted(**fleet.by(node), replica=replica, cycle=cycle, pids=pids))


def said(call, *arguments):
    with pytest.raises(FaultFailed) as raised:
        call(*arguments)
    return str(raised.value)


def test_ranks_move_with_each_rendezvous():
    """A rank is on its node in the newest closed rendezvous, and its worker is the newest one."""
    fleet = running(plain(nodes=2, spares=1))
    start_workers(fleet, "n1", {0: 10, 1: 11})
    start_workers(fleet, "n2", {2: 20, 3: 21})
    world = world_of(fleet)
    assert [world.node_of_rank(rank) for rank in range(4)] == ["n1", "n1", "n2", "n2"]
    assert (world.worker(3), world.first_rank_on("n2"), world.standby) == (21, ("main-0", 2), ("n3",))
    fleet.lose("n2")
    fleet.ready("n1")
    start_workers(fleet, "n3", {2: 30, 3: 31})
    world = world_of(fleet)
    assert (world.node_of_rank(3), world.worker(3)) == ("n3", 31)
    assert world.standby == ()
    assert said(world.first_rank_on, "n2") == "n2 holds no rank now"


def test_agent_of_a_lost_node_is_known():
    """A frozen agent must be found later, so that it can be continued."""
    fleet = Fleet(plain(nodes=1, spares=1))
    fleet.tell(NodeJoined(**fleet.by("n1"), addr="a", port=1, pid=71))
    fleet.tell(NodeJoined(**fleet.by("n2"), addr="a", port=1, pid=72))
    fleet.lose("n2")
    world = world_of(fleet)
    assert world.agent("n2") == 72
    assert said(world.agent, "n3") == "n3 has no agent: agents are on n1, n2"


def test_next_generation_forgets_the_processes_of_the_one_before():
    """After a requeue no pid of the last generation is used; the newest controller counts."""
    fleet = running(plain(nodes=1, spares=0))
    start_workers(fleet, "n1", {0: 10, 1: 11})
    fleet.tell(ControllerStarted(epoch=1, host="h", pid=5))
    fleet.tell(JobStarted(job="1", name="t", expected=("n4", "n5"), generation=1))
    fleet.tell(ControllerStarted(epoch=2, host="h", pid=6))
    world = world_of(fleet)
    assert (world.generation, world.batch_host, world.controller) == (1, "n4", 6)
    assert said(world.agent, "n1") == "n1 has no agent: there are none yet"
    assert said(world.worker, 0) == "rank 0 of main-0 has no worker: there are none yet"


def test_before_the_first_rendezvous_has_closed_no_node_has_a_rank():
    """A node that is preferred in an open rendezvous has no rank yet."""
    fleet = Fleet(plain(nodes=2))
    assert said(world_of(fleet).node_of_rank, 0) == "main-0 has no rank 0: its world has 0 ranks now"
    world = JobTopology(fleet.plan)
    assert said(lambda: world.batch_host) == "the job has not started: no node is known"
    assert said(lambda: world.controller) == "no controller has started yet"


def test_where_there_are_several_replicas_one_must_be_named():
    """A rank alone does not identify its replica."""
    policy = RolePlan(name="policy", command=("x",), nodes_per_replica=1)
    rollout = RolePlan(name="rollout", command=("x",), replicas=2, nodes_per_replica=1)
    world = world_of(running(plan_of(policy, rollout)))
    assert world.node_of_rank(0, "rollout-1") == "n3"
    valid = "there are policy-0, rollout-0, rollout-1"
    assert said(world.node_of_rank, 0) == f"`replica` must say whose rank: {valid}"
    assert said(world.node_of_rank, 0, "rollout-2") == f"there is no replica 'rollout-2': {valid}"


# -------------------------------------------------------------------------------- targets


@pytest.fixture
def world():
    """Two nodes of two ranks each, and two hot spares."""
    fleet = running(plain(nodes=2, spares=2))
    for node, pids in {"n1": {0: 10, 1: 11}, "n2": {2: 20, 3: 21}}.items():
        fleet.tell(WorkersStarted(**fleet.by(node), replica="main-0", cycle=0, pids=pids))
    world = JobTopology(fleet.plan)
    for entry in fleet.journal:
        world.feed(entry)
    return world


@pytest.mark.parametrize(
    ("arguments", "node"),
    [
        ({"node": "n4"}, "n4"),
        ({"of_rank": 3}, "n2"),
        ({"of_rank": 0, "replica": "main-0"}, "n1"),
        ({"spare": 2}, "n4"),
        ({"batch_host": True}, "n1"),
    ],
)
def test_node_is_named_in_each_way(world, arguments, node):
    """It is named directly, by one of its ranks, as a hot spare, or as that of the batch host."""
    assert node_of(arguments, world) == node


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"node": "n9"}, "the job has no node 'n9': it has n1, n2, n3, n4"),
        ({"of_rank": 4}, "main-0 has no rank 4: its world has 4 ranks now"),
        ({"spare": 3}, "there is no hot spare 3: on standby now: n3, n4"),
        ({}, "no node is named by {}: it takes node, of_rank, spare, or batch_host"),
    ],
)
def test_unknown_node_is_an_error(world, arguments, message):
    """The error lists the nodes."""
    with pytest.raises(FaultFailed) as raised:
        node_of(arguments, world)
    assert str(raised.value) == message


def test_worker_is_named_by_rank_or_by_node(world):
    """For a node, its first rank is meant."""
    by_rank, by_node = worker_of({"rank": 2}, world), worker_of({"of_node": "n2"}, world)
    assert by_rank == by_node
    assert (by_rank.pid, by_rank.node, str(by_rank)) == (20, "n2", "rank 2 of main-0 on n2")


def test_captures_are_replaced_by_their_values():
    """One without a value is an error that lists the captures with values."""
    assert resolved({"node": "$dead", "delay": 0.2}, {"dead": "n2"}) == {"node": "n2", "delay": 0.2}
    with pytest.raises(FaultFailed) as raised:
        resolved({"node": "$gone"}, {"dead": "n2", "spare": "n3"})
    assert str(raised.value) == "$gone has no value yet (bound so far: $dead, $spare)"
