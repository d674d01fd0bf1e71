"""When an agent starts the workers of a rendezvous that assigns ranks to its node; real processes on this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.agent.agent import MOST_SUPERVISORS, Agent
from nvrx_slurm.agent.events import AgentMode, Assigned
from nvrx_slurm.agent.hangs import Hang
from nvrx_slurm.agent.linux import LinuxMachine
from nvrx_slurm.agent.log_reader import LogReader
from nvrx_slurm.agent.node_health import NodeHealth
from nvrx_slurm.agent.output import Output
from nvrx_slurm.agent.progress import StepFiles
from nvrx_slurm.agent.stacks import Stacks
from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.agent.workers import Exited, Spawned, SupervisorDied
from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.folder import JobFolder, StoreAddress, claim_node, clear_runtime_folders
from nvrx_slurm.journal.records import Assignment
from nvrx_slurm.lab.simulation.valkey_client import MemoryClient
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.tasks import end
from tests import frozen_fs
from tests.harness import WAIT_S, wait_gone
from tests.still_clock import StillClock
from tests.unit.core.fleet import plan_of

STARTUP_S = 600.0
RANKS = Assignment(
    group_rank=1,
    first_rank=2,
    workers=2,
    world_size=4,
    group_world_size=2,
    master_addr="n1",
    master_port=1,
    role="main",
)


class Node:
    """An agent that has joined, with a real supervisor on this machine; its clock does not advance by itself."""

    def __init__(self, tmp: Path) -> None:
        self.clock, self.folder = StillClock(), JobFolder(tmp / "7")
        runtime, self._lock = claim_node(self.folder, "n1")
        role = RolePlan(name="main", command=("sleep", "1000"), nodes_per_replica=2, workers_per_node=2)
        plan = plan_of(role, fence_timeout=30.0, hang__startup_timeout=STARTUP_S)
        self._job_log = os.open(os.devnull, os.O_WRONLY)
        machine = LinuxMachine(
            node="n1",
            token="t",
            bounds=plan.fault_tolerance,
            runtime=runtime,
            lock=self._lock,
            output=Output(job_log=self._job_log, clock=self.clock),
            stacks=Stacks(self.folder, runtime / "stacks", generation=0, inherited={}, clock=self.clock),
            health=NodeHealth("n1", [], self.clock),
            step_files=StepFiles(plan.fault_tolerance.progress, self.clock),
            log_reader=LogReader("n1", plan.fault_tolerance.attribution, lambda _: True),
        )
        address = StoreAddress(url="redis://nowhere", job="7", token="t")
        self.agent = Agent(
            plan=plan,
            folder=self.folder,
            node="n1",
            addr="n1",
            generation=0,
            store=StoreClient(address, clock=self.clock, connection=MemoryClient(MemoryServer(self.clock))),
            token="t",
            machine=machine,
            clock=self.clock,
            ending_grace_s=1.0,
            shares_signals=False,
        )
        self.agent.workers.start()
        self.agent.board.open()

    def assign(self, asked_by: str | None = None) -> None:
        """Deliver an assignment that `asked_by` has requested; by default the agent's present incarnation."""
        self.agent._on_assigned(Assigned("main-0", 0, RANKS, asked_by or self.agent.publisher.incarnation))

    async def ranks_started(self) -> list[int]:
        """The ranks for which the supervisor has started a process; waits until there are as many as were
        assigned."""
        ranks: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while len(ranks) < RANKS.workers:
                event = await self.agent.inbox.get()
                ranks += [event.rank] if isinstance(event, Spawned) else []
        return sorted(ranks)

    def processes(self) -> list[int]:
        """The supervisor and its descendants."""
        supervisor_pid = self.agent.workers.supervisor_pid
        return [supervisor_pid, *descendants(supervisor_pid)]

    async def close(self) -> None:
        processes = self.processes()
        self.agent.workers.close()
        wait_gone(processes)
        self.agent.output.close(WAIT_S)
        self.agent.board.close()
        self.agent.joining.port.release()
        await self.agent.machine.health.close()
        await end(self.agent._tasks)
        for descriptor in (self._job_log, self._lock):
            os.close(descriptor)
        clear_runtime_folders(self.folder)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.close()


async def test_ranks_are_for_the_agent_that_asked(node: Node) -> None:
    """The agent ignores an assignment that its former incarnation requested: another node may have those ranks by
    now."""
    node.assign(asked_by="former")
    assert node.agent.mode is AgentMode.STANDBY
    node.assign()
    assert node.agent.mode is AgentMode.ACTIVE
    assert await node.ranks_started() == [2, 3]
    assert len(node.processes()) == 1 + RANKS.workers
    # Rank 0 may import for a minute before it listens: the agent still holds the port.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", node.agent.joining.port.number))


async def test_order_of_before_it_joined_again_holds_no_ranks_back(node: Node) -> None:
    """The agent had read that a later cycle is open, and the store has lost that order with its data: the next
    controller knows of no such cycle, and closes this one."""
    node.agent._cycle_is_over("main-0", 1)
    node.agent._join_again()
    node.assign()
    assert await node.ranks_started() == [2, 3]


async def test_workers_wait_until_the_agent_is_in_touch(node: Node) -> None:
    """The agent starts no workers while more than half of its lease is spent: after a partition an order may arrive
    before the next heartbeat, and workers without a lease would be killed."""
    node.clock.now += 16.0  # more than half of the lease
    node.assign()
    assert node.agent.mode is AgentMode.STANDBY
    node.clock.now -= 2.0
    node.assign()
    assert node.agent.mode is AgentMode.ACTIVE
    assert await node.ranks_started() == [2, 3]
    assert len(node.processes()) == 1 + RANKS.workers


@pytest.mark.skipif(not frozen_fs.IS_HERE, reason="needs /dev/fuse")
async def test_worker_that_never_gets_to_its_program_hangs(node: Node, tmp_path: Path) -> None:
    """A worker whose folder is on a dead file system counts as hung: its startup timeout runs from the order to start
    it."""
    (tmp_path / "dead").mkdir()
    with frozen_fs.frozen(tmp_path / "dead"):
        node.agent.plan = msgspec.structs.replace(node.agent.plan, workdir=str(tmp_path / "dead"))
        node.assign()
        node.clock.now += STARTUP_S + 1.0
        async with asyncio.timeout(WAIT_S):
            while not isinstance(event := await node.agent.inbox.get(), Hang):
                pass
    assert (event.rank, event.limit_s) == (2, STARTUP_S)


async def test_a_full_memory_file_system_fails_the_worker_and_not_the_agent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is no room for a rank's slot, that rank fails with the reason, and the agent's cycle goes on."""
    prepare = node.agent.board.prepare

    def full(rank: int, cycle: int) -> dict[str, str]:
        if rank == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return prepare(rank, cycle)

    monkeypatch.setattr(node.agent.board, "prepare", full)
    node.assign()
    events = [await asyncio.wait_for(node.agent.inbox.get(), WAIT_S) for _ in range(RANKS.workers)]
    (failed,) = (event for event in events if isinstance(event, Exited))
    assert failed.rank == 2
    assert (failed.error or "").startswith("No space left on device")
    assert node.agent.cycle is not None
    assert node.agent.cycle.running == {2, 3}


async def test_an_agent_without_a_descriptor_fails_the_worker_and_not_itself(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the pipe for a rank's output cannot be opened, that rank fails with the reason."""
    capture = node.agent.output.capture

    def limited(path: Path, prefix: str, rank: int = 0) -> int:
        if path.name == "rank-2.err":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return capture(path, prefix, rank)

    monkeypatch.setattr(node.agent.output, "capture", limited)
    node.assign()
    events = [await asyncio.wait_for(node.agent.inbox.get(), WAIT_S) for _ in range(RANKS.workers)]
    (failed,) = (event for event in events if isinstance(event, Exited))
    assert (failed.rank, failed.error) == (2, "Too many open files: the pipes for its output")


async def test_an_agent_whose_supervisors_all_die_leaves(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent exits after a bounded number of supervisors have died: each new one adds a join to the journal."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(node.agent.workers.supervisor_pid, signal.SIGKILL)
    died = 0
    while node.agent._exit_code is None:
        event = await asyncio.wait_for(node.agent.inbox.get(), WAIT_S)
        if isinstance(event, SupervisorDied):
            node.agent._on_supervisor_died(event)
            died += 1
    assert (died, node.agent._exit_code) == (MOST_SUPERVISORS, EXIT_FAILED)


@pytest.mark.parametrize(("name", "value"), [("fenced", True), ("leaving", ("cancelled", 0))])
async def test_a_node_that_is_fenced_or_leaves_starts_nothing(node: Node, name: str, value: object) -> None:
    before = getattr(node.agent, name)
    setattr(node.agent, name, value)
    node.assign()
    assert node.agent.mode is AgentMode.STANDBY
    setattr(node.agent, name, before)
    node.assign()
    assert await node.ranks_started() == [2, 3]
    assert len(node.processes()) == 1 + RANKS.workers
