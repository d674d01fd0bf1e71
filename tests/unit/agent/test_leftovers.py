"""What killed workers leave in shared memory is removed: real rings, real signals."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.agent.workers import Spawned, Stopped, SupervisorDied, WorkerEvent, Workers
from nvrx_slurm.util.processes import is_alive
from tests.harness import wait_gone
from tests.waiting import async_until

PACKAGES = Path(__file__).parents[3]
PRODUCER = f"""
import os, signal, sys
sys.path.insert(0, {str(PACKAGES)!r})
from multiprocessing import resource_tracker
from nvrx_slurm.transport.ring import SharedRing
ring = SharedRing.create(slots=2, slot_bytes=4096)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # as a node's death does: it removes nothing
os.write(1, ring.name.encode())
signal.pause()
"""
WAIT_S = 30.0


class Node:
    """Workers that make rings."""

    def __init__(self) -> None:
        self.events = asyncio.Queue[WorkerEvent]()
        self.workers = Workers(self.events.put_nowait)
        self.workers.start()

    async def next(self, kind: type[WorkerEvent]) -> WorkerEvent:
        async with asyncio.timeout(WAIT_S):
            while not isinstance(event := await self.events.get(), kind):
                pass
            return event

    async def ring(self, rank: int) -> Path:
        """Start a worker that makes a ring, which only the agent would remove. Returns the ring's path."""
        reading, writing = os.pipe()
        self.workers.spawn(rank, [sys.executable, "-c", PRODUCER], {}, "/", writing, os.dup(2))
        await self.next(Spawned)
        with os.fdopen(reading, "rb") as output:
            name = await asyncio.to_thread(output.read1, 100)
        path = Path("/dev/shm") / name.decode()
        assert path.is_file()
        return path


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    yield node
    everybody = [node.workers.supervisor_pid, *descendants(node.workers.supervisor_pid)]
    node.workers.close()
    wait_gone(everybody)


async def until_gone(*paths: Path) -> None:
    await async_until(lambda: not any(path.exists() for path in paths), f"the end of {paths}")


async def test_rings_go_when_the_workers_are_stopped(node):
    """A stop of the workers removes all their rings."""
    rings = [await node.ring(rank) for rank in range(2)]
    node.workers.stop(0.0)
    assert await node.next(Stopped) == Stopped(())
    await until_gone(*rings)


async def test_rings_go_when_the_lease_lapses(node):
    """When the lease lapses, the rings are removed without a stop."""
    ring = await node.ring(0)
    node.workers.lease(0.01)
    assert await node.next(Stopped) == Stopped((), lapsed=True)
    await until_gone(ring)


async def test_rings_go_when_the_supervisor_is_killed(node):
    """When the supervisor is killed its workers die, and their rings are removed."""
    ring = await node.ring(0)
    os.kill(node.workers.supervisor_pid, signal.SIGKILL)
    await node.next(SupervisorDied)
    await until_gone(ring)
    node.workers.start()


async def test_rings_are_gone_when_the_agent_ends(node):
    """The agent removes the rings before it ends: no other process would do it later."""
    ring = await node.ring(0)
    node.workers.close()
    assert not ring.exists()
    node.workers.start()


async def test_the_ring_of_a_worker_that_lives_stays(node):
    """With two agents on one machine, as in local jobs, each removes only the rings of its own dead workers."""
    theirs = await node.ring(0)
    other = Node()
    try:
        ours = await other.ring(0)
    finally:
        other.workers.close()
    assert not ours.exists()
    assert theirs.exists()


def lowest_free() -> int:
    """The next file descriptor that this process would get."""
    descriptor = os.dup(2)
    os.close(descriptor)
    return descriptor


async def test_a_dead_supervisors_processes_end_where_no_descriptor_is_left(node):
    """If the agent has too few descriptors to watch all processes of a dead supervisor, it still kills them all and
    reports the death."""
    reading, writing = os.pipe()
    forks = """if True:
        import os, signal
        for _ in range(80):
            os.fork() or signal.pause()
        os.write(1, b"!")
        signal.pause()
    """
    node.workers.spawn(0, [sys.executable, "-c", forks], {}, "/", writing, os.dup(2))
    await node.next(Spawned)
    assert await asyncio.to_thread(os.read, reading, 1) == b"!"
    os.close(reading)
    below = descendants(node.workers.supervisor_pid)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free() + 4, limits[1]))
    try:
        os.kill(node.workers.supervisor_pid, signal.SIGKILL)
        assert await node.next(SupervisorDied) == SupervisorDied(survivors=())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not any(is_alive(pid) for pid in below)
    node.workers.start()
