"""When an agent starts the workers of a rendezvous in which its node has ranks."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from nvrx_slurm.agent.agent import Agent
from nvrx_slurm.agent.events import AgentMode, Assigned
from nvrx_slurm.journal.folder import JobFolder, StoreAddress
from nvrx_slurm.journal.records import Assignment
from nvrx_slurm.lab.simulation.valkey_client import MemoryClient
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.store.client import Store
from nvrx_slurm.util.tasks import end
from tests.still_clock import StillClock
from tests.unit.core.fleet import plain

RANKS = Assignment(
    group_rank=0,
    first_rank=0,
    workers=2,
    world_size=4,
    group_world_size=2,
    master_addr="n1",
    master_port=1,
    role="main",
)


class Node:
    """An agent that has joined, on a node of which only what is asked of it is kept."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.machine = StillClock(), MagicMock()
        self.machine.new_incarnation.side_effect = ["a", "b"]
        self.machine.board.return_value.prepare.return_value = {}
        self.machine.stacks.environment.return_value = {}
        self.spawn = self.machine.workers.return_value.spawn
        address = StoreAddress(url="redis://nowhere", job="j", token="t")
        self.agent = Agent(
            plan=plain(fence_timeout=30.0),
            folder=JobFolder(folder),
            node="n1",
            addr="n1",
            generation=0,
            store=Store(address, clock=self.clock, connection=MemoryClient(MemoryServer(self.clock))),
            token="t",
            machine=self.machine,
            clock=self.clock,
            ending_grace_s=1.0,
        )

    def assign(self, asked_by: str) -> int:
        """The answer to a question of that incarnation arrives. Returns how many workers were started."""
        self.agent._on_assigned(Assigned("main-0", 0, RANKS, asked_by))
        return int(self.spawn.call_count)


@pytest.fixture
async def node(tmp_path: Path):
    node = Node(tmp_path)
    yield node
    await end(node.agent._tasks)


async def test_ranks_are_for_the_agent_that_asked(node: Node) -> None:
    """What was given to a former incarnation may be another node's by now."""
    assert node.assign(asked_by="former") == 0
    assert node.agent.mode is AgentMode.STANDBY
    assert node.assign(asked_by="a") == RANKS.workers
    assert node.agent.mode is AgentMode.ACTIVE


async def test_workers_wait_until_the_agent_is_in_touch(node: Node) -> None:
    """Orders may be back before heartbeats after a partition: workers that start without a lease would be killed."""
    node.clock.now += 16.0  # more than half of the lease
    assert node.assign(asked_by="a") == 0
    assert node.agent.mode is AgentMode.STANDBY
    node.clock.now -= 2.0
    assert node.assign(asked_by="a") == RANKS.workers


async def test_a_node_that_is_fenced_or_leaves_starts_nothing(node: Node) -> None:
    node.agent.fenced = True
    assert node.assign(asked_by="a") == 0
    node.agent.fenced, node.agent.leaving = False, ("cancelled", 0)
    assert node.assign(asked_by="a") == 0
