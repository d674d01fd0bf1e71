"""Orders, and answers about rendezvous, as an agent reads them."""

from __future__ import annotations

import asyncio

from nvrx_slurm.agent.joining import Orders
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import Assignment, Entry, RendezvousClosed, RendezvousOpened
from nvrx_slurm.lab.simulation.valkey_client import MemoryClient
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.store.client import Store
from nvrx_slurm.util.clock import SystemClock

ADDRESS = StoreAddress(url="redis://nowhere", job="j", token="t")
CLOSED = RendezvousClosed(
    replica="main-0",
    cycle=0,
    nodes=(),
    active=1,
    standby=0,
    world_size=1,
    master_addr="n1",
    master_port=1,
)
RANKS = Assignment(
    group_rank=0,
    first_rank=0,
    workers=1,
    world_size=1,
    group_world_size=1,
    master_addr="n1",
    master_port=1,
    role="main",
)


async def test_answer_about_a_round_comes_after_the_orders_that_are_older():
    """A node that was frozen asks about a rendezvous that is over: before the answer it hears that it is."""
    store = Store(ADDRESS, clock=SystemClock(), connection=MemoryClient(MemoryServer(SystemClock())))
    epoch, _, _ = await store.acquire("controller", 60.0)
    opened = RendezvousOpened(replica="main-0", cycle=1)
    for number, (order, rendezvous) in enumerate(
        [(CLOSED, [("main-0", 0, 0, [("n1", RANKS)])]), (opened, [])], start=1
    ):
        await store.commit(epoch, [Entry(n=number, t=0.0, record=order)], orders=[order], rendezvous=rendezvous)
    heard: list[object] = []
    orders = Orders(store, "n1", heard.append)
    asking = asyncio.create_task(orders.assignment("main-0", 0, "a"))
    reading = asyncio.create_task(orders.read("0-0"))
    async with asyncio.timeout(10.0):
        assert await asking == RANKS
    assert heard == [CLOSED, opened]
    reading.cancel()
    await asyncio.wait([reading])
