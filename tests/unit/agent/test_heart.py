"""The agent's beat and the lease that its workers live by, with a real store."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from nvrx_slurm.agent.heart import ControllerSilent, Heart
from nvrx_slurm.agent.tethering import Tethering
from nvrx_slurm.clock import SystemClock
from nvrx_slurm.folder import StoreAddress
from nvrx_slurm.records import Beat, FaultTolerance
from nvrx_slurm.store.client import Store
from nvrx_slurm.store.embedded import EmbeddedStore


async def nobody_listens(*_) -> None:
    raise ConnectionRefusedError


class Chest:
    """A heart in its surroundings: a store that can be stopped, leases and words that can be awaited."""

    def __init__(self, store: Store, server_pid: int, **bounds: float) -> None:
        self.store, self.server_pid = store, server_pid
        self.leases: asyncio.Queue[float] = asyncio.Queue()
        self.said: asyncio.Queue[ControllerSilent] = asyncio.Queue()
        self.tethering = Tethering(nobody_listens, lambda most_s: 0.0)
        self.heart = Heart(
            bounds=FaultTolerance(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3, **bounds),
            nodes=1,
            store=store,
            tethering=self.tethering,
            clock=SystemClock(),
            beat=lambda: Beat(node="n1", incarnation="a"),
            lease=self.leases.put_nowait,
            post=self.said.put_nowait,
        )

    async def next_lease(self, wanted) -> float:
        async with asyncio.timeout(20.0):
            while not wanted(lease := await self.leases.get()):
                pass
            return lease


@pytest.fixture
async def chest(tmp_path):
    server = EmbeddedStore(tmp_path / "store", bind="127.0.0.1", password="secret")
    process = await server.start()
    address = StoreAddress(url=f"redis://127.0.0.1:{server.port}", password="secret", job="j", token="t")
    store = Store(address, clock=SystemClock())
    running: list[asyncio.Task] = []

    def begin(**bounds: float) -> Chest:
        chest = Chest(store, process.pid, **bounds)
        running.append(asyncio.create_task(chest.heart.run()))
        return chest

    yield begin
    for task in running:
        task.cancel()
    await store.close()
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    await process.wait()


async def test_lease_is_whole_while_the_store_answers(chest):
    """Each beat that arrives lets the workers live for the fence timeout from when it was sent."""
    heart = chest(fence_timeout_s=5.0)
    for _ in range(3):
        assert 4.0 < await heart.next_lease(lambda lease: lease < 5.0) < 5.0


async def test_lease_runs_out_while_nobody_answers(chest):
    """Neither store nor tether: it shrinks to nothing, and is whole again when the store is back."""
    heart = chest(fence_timeout_s=2.0)
    await heart.next_lease(lambda lease: lease > 1.5)
    os.kill(heart.server_pid, signal.SIGSTOP)
    await heart.next_lease(lambda lease: lease == 0.0)
    os.kill(heart.server_pid, signal.SIGCONT)
    await heart.next_lease(lambda lease: lease > 1.5)


async def test_controller_that_never_shows_is_told_of_after_its_grace(chest):
    """Its lease in the store is its only sign; without one, and without a tether, it is silent."""
    heart = chest(control_plane_grace_s=0.6)
    async with asyncio.timeout(20.0):
        assert (await heart.said.get()).for_s > 0.6


async def test_controller_whose_lease_stands_is_not_silent(chest, caplog):
    """Whoever renews it lives; and its silence is logged once, and so is its end."""
    caplog.set_level("INFO")
    heart = chest(control_plane_grace_s=60.0)
    async with asyncio.timeout(20.0):
        while "has been silent" not in caplog.text:
            await heart.next_lease(lambda lease: True)
        await heart.store.renew("host:1", 60.0)
        while "is heard again" not in caplog.text:
            await heart.next_lease(lambda lease: True)
    assert caplog.text.count("has been silent") == 1
    assert heart.said.empty()
