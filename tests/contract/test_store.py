"""What every server must do for us, seen on the real one."""

from __future__ import annotations

import asyncio
import signal

import msgspec
import pytest

from nvrx_slurm.batch import children
from nvrx_slurm.clock import SystemClock
from nvrx_slurm.errors import FencedError, StoreUnreachable
from nvrx_slurm.folder import StoreAddress
from nvrx_slurm.records import (
    Assignment,
    ControllerUp,
    Entry,
    NodeJoined,
    RoundClosed,
    Shutdown,
    Tick,
    unpack_record,
)
from nvrx_slurm.store.client import Store
from nvrx_slurm.store.embedded import EmbeddedStore

JOIN = NodeJoined(node="n1", incarnation="a", seq=1, addr="h", port=1)
ASSIGNMENT = Assignment(
    group_rank=0,
    first_rank=0,
    workers=2,
    world_size=2,
    group_world_size=1,
    master_addr="h",
    master_port=1,
    role="main",
)
CLOSED = RoundClosed(
    replica="main-0", cycle=0, nodes=("n1",), active=1, standby=0, world_size=2, master_addr="h", master_port=1
)


def entry(n: int, record=None) -> Entry:
    return Entry(n=n, t=float(n), record=record or Tick())


async def test_newer_controller_fences_the_older(store):
    """Every write of a decision carries the epoch; one with an old epoch leaves no trace."""
    first, _, _ = await store.acquire("a", 1.0)
    second, _, _ = await store.acquire("b", 1.0)
    assert second > first
    with pytest.raises(FencedError):
        await store.commit(first, [entry(1)], shutdown=Shutdown(exit_code=1, reason="x"))
    assert await store.journal() == []
    await store.commit(second, [entry(1)])
    assert await store.journal() == [entry(1)]


async def test_commit_that_is_tried_again_counts_once(store):
    """A commit whose answer was lost may be sent again."""
    epoch, _, _ = await store.acquire("a", 1.0)
    await store.commit(epoch, [entry(1), entry(2)], cursor="5-0")
    await store.commit(epoch, [entry(1), entry(2)], cursor="5-0")
    assert [e.n for e in await store.journal()] == [1, 2]
    assert await store.acquire("b", 1.0) == (epoch + 1, 2, "5-0")


async def test_commit_onto_a_journal_that_it_has_not_seen_is_refused(store):
    """Opening a round, like every decision, is compare-and-set on the journal's length."""
    epoch, _, _ = await store.acquire("a", 1.0)
    with pytest.raises(FencedError, match="gap"):
        await store.commit(epoch, [entry(7)])


async def test_ranks_are_readable_before_the_round_is_seen_closed(store):
    """Whoever reads the order that a round has closed finds its assignment."""
    epoch, _, _ = await store.acquire("a", 1.0)
    last, _, _ = await store.join(JOIN)

    async def agent():
        [(_, order)] = await store.orders(last)
        return order, await store.assignment(order.replica, order.cycle, "n1")

    waiting = asyncio.create_task(agent())
    await store.commit(epoch, [entry(1, CLOSED)], orders=[CLOSED], rounds=[("main-0", 0, 0, [("n1", ASSIGNMENT)])])
    assert await waiting == (CLOSED, ASSIGNMENT)
    assert await store.assignment("main-0", 0, "n2") is None


async def test_first_shutdown_is_permanent_and_late_joiners_see_it(store):
    """The reason is set once; a join afterwards is answered with it."""
    epoch, _, _ = await store.acquire("a", 1.0)
    assert (await store.join(JOIN))[1] is None
    first, second = Shutdown(exit_code=0, reason="done"), Shutdown(exit_code=1, reason="late")
    await store.commit(epoch, [entry(1, first)], shutdown=first)
    await store.commit(epoch, [entry(2, second)], shutdown=second)
    assert (await store.join(JOIN))[1] == first


async def test_join_tells_where_the_controller_is_and_where_orders_begin(store):
    """An agent reads no order from before its join, and misses none after it."""
    epoch, _, _ = await store.acquire("a", 1.0)
    up = ControllerUp(epoch=epoch, host="h", port=5)
    await store.commit(epoch, [], orders=[up], controller=up)
    last, _, controller = await store.join(JOIN)
    assert controller == up
    await store.commit(epoch, [entry(1)], orders=[CLOSED])
    assert [order for _, order in await store.orders(last)] == [CLOSED]


async def test_inbox_keeps_order_and_is_trimmed_behind_the_cursor(store):
    """Facts arrive in order; what the journal accounts for need not be kept."""
    await store.tell(JOIN)
    await store.tell(msgspec.structs.replace(JOIN, seq=2))
    items = await store.inbox("0-0")
    assert [unpack_record(data).seq for _, data in items] == [1, 2]
    assert await store.inbox(items[0][0]) == items[1:]


async def test_controllers_lease_is_its_sign_of_life(store):
    """Agents ask for it; it is there while it is renewed."""
    assert not await store.controller_lives()
    await store.renew("host:1", 60.0)
    assert await store.controller_lives()


async def test_wrong_password_is_told_at_once(address):
    """A refusal is no outage: there is nothing to wait for."""
    stranger = Store(msgspec.structs.replace(address, password="wrong"), clock=SystemClock())
    with pytest.raises(StoreUnreachable, match="check its password"):
        await stranger.ping()
    await stranger.close()


async def test_store_that_stays_away_is_given_up_after_the_patience(address):
    """The wait has a bound, and says what it waited for."""
    nobody = Store(msgspec.structs.replace(address, url="redis://127.0.0.1:1"), clock=SystemClock(), patience_s=0.2)
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:1 does not answer"):
        await nobody.ping()
    await nobody.close()


async def test_killed_store_comes_back_with_all_that_it_had_answered_for(tmp_path):
    """SIGKILL loses nothing recorded, and a client that was waiting goes on by itself."""
    server = EmbeddedStore(tmp_path, bind="127.0.0.1", password="secret")
    process = await server.start()
    where = StoreAddress(url=f"redis://127.0.0.1:{server.port}", password="secret", job="j", token="t")
    client = Store(where, clock=SystemClock())
    epoch, _, _ = await client.acquire("a", 1.0)
    entries = [entry(n) for n in range(1, 501)]
    await client.commit(epoch, entries)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    waiting = asyncio.create_task(client.journal())
    process = await server.start()
    assert await waiting == entries
    await client.close()
    await children.end({"the store": process}, polite_s=5.0)
