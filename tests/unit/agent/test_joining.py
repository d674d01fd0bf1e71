"""How an agent reads its orders and the answers to its rendezvous requests."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.agent.events import JoinLost
from nvrx_slurm.agent.joining import Joining, Orders
from nvrx_slurm.agent.linux import HeldPort
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import (
    Assignment,
    ControllerUp,
    Entry,
    FromAgent,
    NodeJoined,
    NodeLeft,
    RendezvousClosed,
    RendezvousOpened,
    Shutdown,
)
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


async def test_answer_about_a_rendezvous_comes_after_older_orders():
    """A node that was frozen asks about a finished rendezvous: it reads the older orders, including its end, before
    the answer."""
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
    for _ in range(100):  # turns of the loop: the answer has arrived by then, the orders have not
        await asyncio.sleep(0)
    assert not asking.done()
    reading = asyncio.create_task(orders.read("0-0"))
    async with asyncio.timeout(60.0):
        assert await asking == RANKS
    assert heard == [CLOSED, opened]
    reading.cancel()
    await asyncio.wait([reading])


# Linux 6.3: the ports that the kernel may choose for one socket, lower bound in the low half. Not in `socket` yet.
IP_LOCAL_PORT_RANGE = 51


def may_choose(number: int) -> socket.socket:
    """A socket for which the kernel can choose this port only."""
    chooser = socket.socket()
    try:
        chooser.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", number << 16 | number))
    except OSError as error:
        chooser.close()
        pytest.skip(f"no IP_LOCAL_PORT_RANGE: {error}")
    return chooser


@pytest.mark.parametrize(
    "take",
    [lambda chooser, number: chooser.bind(("", 0)), lambda chooser, number: chooser.connect(("127.0.0.1", number))],
    ids=["bind", "connect"],
)
def test_the_kernel_gives_a_held_port_to_no_other_socket(take: Callable[[socket.socket, int], None]) -> None:
    """The kernel never gives a held port to another socket: a rank that connects to rank 0 before rank 0 listens
    would otherwise connect to itself."""
    held = HeldPort()
    with may_choose(held.number) as chooser, pytest.raises(OSError) as refused:
        take(chooser, held.number)
    assert refused.value.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
    held.release()
    with may_choose(held.number) as chooser:
        take(chooser, held.number)
        assert chooser.getsockname()[1] == held.number


@pytest.mark.parametrize("dual_stack", [False, True])
def test_workers_can_listen_on_a_held_port(dual_stack: bool) -> None:
    """Workers can listen on a held port with SO_REUSEADDR, which the servers of Python, torch and gRPC set, for IPv4
    alone or for both IP versions."""
    if dual_stack and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    held = HeldPort()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    with socket.create_server(("", held.number), family=family, dualstack_ipv6=dual_stack) as server:
        socket.create_connection(("127.0.0.1", held.number)).close()
        server.accept()[0].close()
    held.release()


async def test_port_is_held_from_one_rendezvous_to_the_next():
    """No other process can bind the port before the workers do, however late they listen."""
    store = StoreClient(ADDRESS, clock=SystemClock(), connection=MemoryClient(MemoryServer(SystemClock())))
    publisher = FactPublisher(node="n1", generation=0, store=store, incarnation="a")
    machine: Any = SimpleNamespace(hold_port=HeldPort)  # only the node's ports are used
    joining = Joining(
        machine, addr="n1", token="t", store=store, publisher=publisher, workers=machine, post=lambda order: None
    )
    for hold in (lambda: joining.port.number, joining.hold_port):  # at the join, and in each rendezvous
        number = hold()
        assert joining.port.number == number
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", number))
        with socket.create_server(("", number)):
            pass
    joining.port.release()


class SlowStore(StoreClient):
    """A store that carries out no join until `answers` is set. `posted`: the facts that it has received, in order."""

    def __init__(self) -> None:
        super().__init__(ADDRESS, clock=SystemClock(), connection=MemoryClient(MemoryServer(SystemClock())))
        self.answers = asyncio.Event()
        self.posted: list[FromAgent] = []

    async def join(self, fact: NodeJoined) -> tuple[str, Shutdown | None, ControllerUp | None]:
        self.posted.append(fact)
        await self.answers.wait()
        return "0-0", None, None

    async def post(self, fact: Any) -> None:
        self.posted.append(fact)


def slow_joining() -> tuple[SlowStore, FactPublisher, Joining]:
    store = SlowStore()
    publisher = FactPublisher(node="n1", generation=0, store=store, incarnation="a")
    machine: Any = SimpleNamespace(hold_port=lambda: SimpleNamespace(number=1), pid=1)
    joining = Joining(
        machine, addr="n1", token="t", store=store, publisher=publisher, workers=machine, post=lambda order: None
    )
    return store, publisher, joining


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_second_join_waits_for_the_first():
    """The second join is not sent before the first one is answered: orders are read from the first join on, and the
    store must not carry it out after the second one."""
    store, publisher, joining = slow_joining()
    first = asyncio.create_task(joining.join())
    await turns()
    publisher.renew_incarnation()
    second = asyncio.create_task(joining.join())
    await turns()
    assert [fact.incarnation for fact in store.posted] == ["a"]
    store.answers.set()
    await asyncio.gather(first, second)
    assert [fact.incarnation for fact in store.posted] == ["a", publisher.incarnation]


async def test_facts_wait_for_the_join_of_their_incarnation():
    """A fact is sent only after the join of its incarnation: the controller would drop it as stale, and `node_left`
    would be lost."""
    store, publisher, joining = slow_joining()
    store.answers.set()
    await joining.join()
    store.answers.clear()
    publishing = asyncio.create_task(publisher.run())
    publisher.renew_incarnation()
    rejoining = asyncio.create_task(joining.join())
    publisher.publish(NodeLeft, reason="done")
    publisher.finish()
    await turns()
    assert [type(fact) for fact in store.posted] == [NodeJoined, NodeJoined]
    store.answers.set()
    await asyncio.gather(publishing, rejoining)
    assert [type(fact) for fact in store.posted] == [NodeJoined, NodeJoined, NodeLeft]


async def test_join_that_fails_holds_no_facts_back():
    """Facts do not wait for a join that failed: an agent that leaves because the store refuses it still sends
    `node_left`."""
    store, publisher, joining = slow_joining()
    rejoining = asyncio.create_task(joining.join())
    publishing = asyncio.create_task(publisher.run())
    publisher.publish(NodeLeft, reason="refused")
    publisher.finish()
    await turns()
    rejoining.cancel()
    async with asyncio.timeout(60.0):
        await publishing
    assert [type(fact) for fact in store.posted] == [NodeJoined, NodeLeft]


async def test_join_that_the_store_has_lost_is_found_when_another_controller_takes_over():
    """A join that went with the store's data is found out at the next controller; one that the store has, or that is
    under way, is not."""
    connection = MemoryClient(MemoryServer(SystemClock()))
    store = StoreClient(ADDRESS, clock=SystemClock(), connection=connection)
    publisher = FactPublisher(node="n1", generation=0, store=store, incarnation="a")
    machine: Any = SimpleNamespace(hold_port=lambda: SimpleNamespace(number=1), pid=1)
    posted: list[Any] = []
    joining = Joining(
        machine, addr="n1", token="t", store=store, publisher=publisher, workers=machine, post=posted.append
    )
    other = ControllerUp(epoch=2, host="h", port=1)
    await joining.look_for_join(other)  # it has not joined yet
    await joining.join()
    await joining.look_for_join(other)
    assert posted == []
    await connection.delete(store.keys.joins)
    await joining.look_for_join(other)
    publisher.renew_incarnation()
    await joining.look_for_join(other)  # the join of the new one is under way
    assert posted == [JoinLost("a")]
