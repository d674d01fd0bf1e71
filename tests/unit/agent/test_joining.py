"""Orders, and answers about rendezvous, as an agent reads them."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.agent.joining import Joining, Orders
from nvrx_slurm.agent.linux import HeldPort
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import Assignment, Entry, RendezvousClosed, RendezvousOpened
from nvrx_slurm.lab.simulation.valkey_client import MemoryClient
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.store.client import StoreClient
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
    store = StoreClient(ADDRESS, clock=SystemClock(), connection=MemoryClient(MemoryServer(SystemClock())))
    epoch, _, _ = await store.acquire("controller", 60.0)
    opened = RendezvousOpened(replica="main-0", cycle=1)
    for number, (order, rendezvous) in enumerate(
        [(CLOSED, [("main-0", 0, 0, [("n1", RANKS)])]), (opened, [])], start=1
    ):
        await store.commit(epoch, [Entry(n=number, t=0.0, record=order)], orders=[order], rendezvous=rendezvous)
    heard: list[object] = []
    orders = Orders(store, "n1", heard.append)
    asking = asyncio.create_task(orders.assignment("main-0", 0, "a"))
    for _ in range(100):  # turns of the loop: the answer is there by then, the orders are not
        await asyncio.sleep(0)
    assert not asking.done()
    reading = asyncio.create_task(orders.read("0-0"))
    async with asyncio.timeout(60.0):
        assert await asking == RANKS
    assert heard == [CLOSED, opened]
    reading.cancel()
    await asyncio.wait([reading])


async def test_port_is_held_until_its_workers_start():
    """Between a node's report that it is ready and the start of its workers no other process gets the port; after it,
    the workers do."""
    store = StoreClient(ADDRESS, clock=SystemClock(), connection=MemoryClient(MemoryServer(SystemClock())))
    publisher = FactPublisher(node="n1", generation=0, store=store, incarnation="a")
    machine: Any = SimpleNamespace(hold_port=HeldPort)  # of the node only its ports are touched
    joining = Joining(
        machine, addr="n1", token="t", store=store, publisher=publisher, workers=machine, post=lambda order: None
    )
    for hold in (lambda: joining.port.number, joining.hold_port):  # at the join, and in each rendezvous
        number = hold()
        assert joining.port.number == number
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", number))
    joining.port.release()
    with socket.socket() as worker:
        worker.bind(("", number))
