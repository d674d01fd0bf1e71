"""Whom a fault is meant for."""

from __future__ import annotations

import pytest

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.journal.records import WorkersStarted
from nvrx_slurm.lab.flow.topology import JobTopology, node_of, resolved, worker_of
from tests.unit.core.fleet import plain, running


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
    """By its name, by a rank that it holds, as a hot spare, as the batch host's."""
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
def test_node_that_is_not_there_is_an_error(world, arguments, message):
    """It says what there is."""
    with pytest.raises(FaultFailed) as raised:
        node_of(arguments, world)
    assert str(raised.value) == message


def test_worker_is_named_by_rank_or_by_node(world):
    """Of a node, the first rank is meant."""
    by_rank, by_node = worker_of({"rank": 2}, world), worker_of({"of_node": "n2"}, world)
    assert by_rank == by_node
    assert (by_rank.pid, by_rank.node, str(by_rank)) == (20, "n2", "rank 2 of main-0 on n2")


def test_captures_are_replaced_by_what_they_stand_for():
    """One that stands for nothing yet is an error that names those that do."""
    assert resolved({"node": "$dead", "delay": 0.2}, {"dead": "n2"}) == {"node": "n2", "delay": 0.2}
    with pytest.raises(FaultFailed) as raised:
        resolved({"node": "$gone"}, {"dead": "n2", "spare": "n3"})
    assert str(raised.value) == "$gone has no value yet (bound so far: $dead, $spare)"
