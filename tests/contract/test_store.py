"""The store's contract, on both servers: the real one, and the one in memory."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from nvrx_slurm.errors import DataLostError, FencedError, StoreUnreachable
from nvrx_slurm.journal.records import (
    Assignment,
    ControllerUp,
    Entry,
    Fence,
    NodeJoined,
    Progress,
    RendezvousClosed,
    Shutdown,
    Tick,
    pack,
)
from tests.contract.servers import RealServer

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
CLOSED = RendezvousClosed(
    replica="main-0", cycle=0, nodes=("n1",), active=1, standby=0, world_size=2, master_addr="h", master_port=1
)


@pytest.fixture
async def store(server):
    """A client of the server."""
    client = server.store()
    yield client
    await client.close()


def entry(n: int, record=None) -> Entry:
    return Entry(n=n, t=float(n), record=record or Tick())


async def test_newer_controller_fences_the_older(store):
    """Every commit carries the controller's epoch; a commit with an old epoch changes nothing."""
    first, _, _ = await store.acquire("a", 1.0)
    second, _, _ = await store.acquire("b", 1.0)
    assert second > first
    with pytest.raises(FencedError):
        await store.commit(first, [entry(1)], shutdown=Shutdown(exit_code=1, reason="x"))
    assert await store.journal() == []
    await store.commit(second, [entry(1)])
    assert await store.journal() == [entry(1)]


async def test_commit_that_is_tried_again_counts_once(store):
    """A commit whose answer was lost can be sent again, and is applied once."""
    epoch, _, _ = await store.acquire("a", 1.0)
    await store.commit(epoch, [entry(1), entry(2)], cursor="5-0")
    await store.commit(epoch, [entry(1), entry(2)], cursor="5-0")
    assert [e.n for e in await store.journal()] == [1, 2]
    assert await store.acquire("b", 1.0) == (epoch + 1, 2, "5-0")


async def test_commit_onto_a_journal_that_it_has_not_seen_is_refused(store):
    """A commit is a compare-and-set on the journal's length. An entry of the same number and epoch with other
    content, from before the data were lost, is not taken for a repeated commit."""
    epoch, _, _ = await store.acquire("a", 1.0)
    with pytest.raises(DataLostError):
        await store.commit(epoch, [entry(7)])
    await store.commit(epoch, [entry(1)])
    other = msgspec.structs.replace(entry(1), t=entry(1).t + 1.0)
    with pytest.raises(DataLostError):
        await store.commit(epoch, [other])


async def test_store_that_has_lost_its_data_says_so(server, store):
    """The leading controller gets DataLostError at its next commit and its next renewal of the lease. A controller
    that takes over with the journal's copy gets a newer epoch and continues the numbering."""
    epoch, _, _ = await store.acquire("a", 60.0)
    await store.commit(epoch, [entry(1), entry(2)])
    await store.renew("a", 60.0, epoch, 2)
    await server.lose_data()
    with pytest.raises(DataLostError):
        await store.renew("a", 60.0, epoch, 2)
    with pytest.raises(DataLostError):
        await store.commit(epoch, [entry(3)])
    assert (await store.acquire("b", 60.0, 2))[0] == 0, "this epoch may have been given before"
    with pytest.raises(DataLostError):
        await store.commit(epoch, [entry(3)])
    assert await store.acquire("b", 60.0, 2, epoch) == (epoch + 1, 2, "0-0")
    await store.commit(epoch + 1, [entry(3)])
    await store.renew("b", 60.0, epoch + 1, 3)
    assert await store.journal() == [entry(3)]
    with pytest.raises(FencedError):
        await store.commit(epoch, [entry(3)])


async def test_orders_with_older_ids_are_read(store, caplog):
    """A store that comes back without its data may have a clock that is behind, and ids come from that clock. New
    orders with older ids are read, and old orders that are there again are not reported as forged."""
    read = f"{9 * 10**12}-0"
    epoch, _, _ = await store.acquire("a", 60.0)
    await store.commit(epoch, [entry(1, CLOSED)], orders=[CLOSED])
    assert [order for _, order in await store.orders("0-0")] == [CLOSED]
    assert await store.orders(read) == []
    fence = Fence(node="n1", incarnation="i1")
    await store.commit(epoch, [entry(2, fence)], orders=[fence])
    assert [order for _, order in await store.orders(read)] == [fence]
    assert not caplog.records


async def test_join_that_is_tried_again_is_the_same_one(store):
    """A join whose reply was lost is in the inbox once, and orders since the first join are still to be read."""
    epoch, _, _ = await store.acquire("a", 1.0)
    since, _, _ = await store.join(JOIN)
    await store.commit(epoch, [entry(1, CLOSED)], orders=[CLOSED])
    assert (await store.join(JOIN))[0] == since
    assert len(await store.inbox("0-0")) == 1
    assert [order for _, order in await store.orders(since)] == [CLOSED]


async def test_assignment_comes_with_the_newest_order(store):
    """An agent that has not read up to that order cannot know yet whether the rendezvous is still valid."""
    epoch, _, _ = await store.acquire("a", 1.0)
    assert await store.assignment("main-0", 0, "n1") == (None, "0-0")
    await store.commit(
        epoch, [entry(1, CLOSED)], orders=[CLOSED], rendezvous=[("main-0", 0, 0, [("n1", ASSIGNMENT)])]
    )
    [(newest, _)] = await store.orders("0-0")
    assert await store.assignment("main-0", 0, "n1") == (ASSIGNMENT, newest)


async def test_ranks_are_readable_before_the_rendezvous_is_seen_closed(store):
    """An agent that reads that a rendezvous has closed finds its assignment."""
    epoch, _, _ = await store.acquire("a", 1.0)
    last, _, _ = await store.join(JOIN)

    async def agent():
        [(_, order)] = await store.orders(last)
        return order, (await store.assignment(order.replica, order.cycle, "n1"))[0]

    waiting = asyncio.create_task(agent())
    await store.commit(
        epoch, [entry(1, CLOSED)], orders=[CLOSED], rendezvous=[("main-0", 0, 0, [("n1", ASSIGNMENT)])]
    )
    assert await waiting == (CLOSED, ASSIGNMENT)
    assert (await store.assignment("main-0", 0, "n2"))[0] is None


async def test_first_shutdown_is_permanent_and_late_joiners_see_it(store):
    """The first shutdown is never replaced, and the reply to a later join contains it."""
    epoch, _, _ = await store.acquire("a", 1.0)
    assert (await store.join(JOIN))[1] is None
    first, second = Shutdown(exit_code=0, reason="done"), Shutdown(exit_code=1, reason="late")
    await store.commit(epoch, [entry(1, first)], shutdown=first)
    await store.commit(epoch, [entry(2, second)], shutdown=second)
    assert (await store.join(JOIN))[1] == first


async def test_join_returns_the_controllers_address_and_where_orders_begin(store):
    """An agent reads no order from before its join, and misses none after it."""
    epoch, _, _ = await store.acquire("a", 1.0)
    up = ControllerUp(epoch=epoch, host="h", port=5)
    await store.commit(epoch, [], orders=[up], controller=up)
    last, _, controller = await store.join(JOIN)
    assert controller == up
    await store.commit(epoch, [entry(1)], orders=[CLOSED])
    assert [order for _, order in await store.orders(last)] == [CLOSED]


async def test_a_copy_of_an_order_is_not_read_again(server, store):
    """Another user of the store appends copies of a closed rendezvous and of a fence to the stream: agents ignore
    them."""
    epoch, _, _ = await store.acquire("a", 1.0)
    fence = Fence(node="n1", incarnation="a")
    await store.commit(epoch, [entry(1), entry(2)], orders=[CLOSED, fence])
    raw = server.raw()
    for _, fields in await raw.xrange(store.keys.orders):
        await raw.xadd(store.keys.orders, fields)
    await raw.aclose()
    assert [order for _, order in await store.orders("0-0")] == [CLOSED, fence, None, None]
    newest = await store.newest_order()
    await store.commit(epoch, [entry(3)], orders=[fence])
    assert [order for _, order in await store.orders(newest)] == [fence]


async def test_order_of_an_earlier_generation_is_not_one_of_this(server):
    """A requeued job keeps its key: the shutdown of its previous generation does not end it again."""
    before, after = server.store(), server.store(generation=1)
    epoch, _, _ = await before.acquire("a", 1.0)
    await before.commit(epoch, [entry(1)], orders=[Shutdown(exit_code=0, reason="done")])
    assert [order for _, order in await after.orders("0-0")] == [None]
    for client in (before, after):
        await client.close()


async def test_assignment_of_another_agent_of_the_node_is_none(store):
    """An order that was copied from before the join of a node's next agent gives that agent no assignment."""
    epoch, _, _ = await store.acquire("a", 1.0)
    mine = msgspec.structs.replace(ASSIGNMENT, incarnation="a")
    await store.commit(epoch, [entry(1)], rendezvous=[("main-0", 0, 0, [("n1", mine)])])
    assert (await store.assignment("main-0", 0, "n1", "a"))[0] == mine
    assert (await store.assignment("main-0", 0, "n1", "a-1"))[0] is None


async def test_what_is_not_signed_is_set_aside_wherever_it_stands(server, store):
    """In each stream and value, unsigned records are skipped and counted once, and the records behind them are
    read."""
    keys, raw = store.keys, server.raw()
    epoch, _, _ = await store.acquire("a", 1.0)
    round_key = keys.rendezvous("main-0", 0, 0)
    await raw.xadd(keys.inbox, {"m": pack(JOIN)})
    await raw.xadd(keys.inbox, {"m": b"\xff"})
    await raw.xadd(keys.inbox, {"x": "y"})
    await raw.xadd(keys.orders, {"m": pack(CLOSED)})
    await raw.xadd(keys.journal, {"m": pack(entry(1))})
    await raw.hset(round_key, "n1", pack(ASSIGNMENT))
    await raw.set(keys.shutdown(0), pack(Shutdown(exit_code=0, reason="x")))
    await raw.set(keys.controller, pack(ControllerUp(epoch=9, host="h", port=1)))
    await raw.set(keys.cursor, "no id")
    await raw.aclose()
    assert (await store.join(JOIN))[1:] == (None, None)
    assert [fact for _, fact in await store.inbox("0-0")] == [None, None, None, JOIN]
    assert [order for _, order in await store.orders("0-0")] == [None]
    assert (await store.assignment("main-0", 0, "n1"))[0] is None
    await store.commit(epoch, [entry(1)])
    assert await store.journal() == [entry(1)]
    assert (await store.acquire("b", 1.0))[2] == "0-0"
    counted = {refused.stream: refused.count for refused in store.refused.take()}
    assert counted == {
        keys.inbox: 3, keys.orders: 1, keys.journal: 1, round_key: 1, keys.shutdown(0): 1, keys.controller: 1
    }  # fmt: skip
    assert store.refused.take() == []


async def test_record_that_was_copied_to_another_place_is_set_aside(server, store):
    """A signature is valid for one key only, and in a rendezvous for one node only."""
    epoch, _, _ = await store.acquire("a", 1.0)
    await store.commit(epoch, [entry(1, CLOSED)], rendezvous=[("main-0", 0, 0, [("n1", ASSIGNMENT)])])
    raw, key = server.raw(), store.keys.rendezvous("main-0", 0, 0)
    [(_, fields)] = await raw.xrange(store.keys.journal)
    await raw.xadd(store.keys.inbox, fields)
    mine = await raw.hget(key, "n1")
    await raw.hset(key, "n2", mine)
    await raw.hset(store.keys.rendezvous("main-0", 0, 1), "n1", mine)
    await raw.aclose()
    assert [fact for _, fact in await store.inbox("0-0")] == [None]
    assert (await store.assignment("main-0", 0, "n1"))[0] == ASSIGNMENT
    assert (await store.assignment("main-0", 0, "n2"))[0] is None
    assert (await store.assignment("main-0", 1, "n1"))[0] is None


async def test_copies_in_the_journal_are_left_out(server, store):
    """Each entry number counts once, in order."""
    epoch, _, _ = await store.acquire("a", 1.0)
    await store.commit(epoch, [entry(1), entry(2)])
    raw = server.raw()
    for _, fields in await raw.xrange(store.keys.journal):
        await raw.xadd(store.keys.journal, fields)
    await raw.aclose()
    await store.commit(epoch, [entry(3)])
    assert [each.n for each in await store.journal()] == [1, 2, 3]


async def test_inbox_keeps_order_and_is_trimmed_behind_the_cursor(server, store):
    """Facts arrive in order. A commit removes facts that its cursor accounts for, and no fact behind the cursor."""
    epoch, _, _ = await store.acquire("a", 1.0)
    posted = 250  # a server removes a hundred at a time
    for seq in range(1, posted + 1):
        await store.post(msgspec.structs.replace(JOIN, seq=seq))
    items = await store.inbox("0-0")
    assert [fact.seq for _, fact in items] == list(range(1, posted + 1))
    cursor = items[-2][0]
    assert await store.inbox(cursor) == items[-1:]
    await store.commit(epoch, [entry(1)], cursor=cursor)
    raw = server.raw()
    assert await raw.xlen(store.keys.inbox) < posted
    await raw.aclose()
    assert await store.inbox(cursor) == items[-1:]


async def test_controllers_lease_is_its_sign_of_life(store):
    """Agents check the lease; it exists as long as the controller renews it."""
    assert not await store.controller_lives()
    await store.renew("host:1", 60.0)
    assert await store.controller_lives()
    await store.renew("host:1", 0.1)
    async with asyncio.timeout(30.0):
        while await store.controller_lives():
            pass


async def test_lease_of_another_generations_controller_is_no_sign_of_life(server, store):
    """An agent of an older generation could not read that controller's orders."""
    following = server.store(generation=1)
    await following.renew("host:1", 60.0)
    assert await following.controller_lives() and not await store.controller_lives()
    await following.close()


async def test_wrong_password_is_an_error_without_retry(server):
    """A refusal is no outage, and is not waited out."""
    stranger = server.store(password="wrong")
    with pytest.raises(StoreUnreachable) as caught:
        await stranger.ping()
    assert caught.value.refused
    await stranger.close()


async def test_refused_command_is_an_error_without_retry(server, store):
    """The error names the refused command, as when a server of a cluster refuses the keys of another one."""
    raw = server.raw()
    await raw.set(store.keys.inbox, "no stream")
    await raw.aclose()
    with pytest.raises(StoreUnreachable, match=r"refuses a command: .*wrong kind of value") as caught:
        await store.post(JOIN)
    assert caught.value.refused


async def test_new_password_of_the_store_leaves_the_open_connections(tmp_path):
    """The password changes while a read blocks one connection and another connection is open. Concurrent calls share
    that other one. Once no connection is left, the refusal is an error."""
    server = RealServer(tmp_path / "server")
    await server.start()
    client, raw = server.store(), server.raw()
    orders = asyncio.create_task(client.orders("0-0"))
    while not (await raw.info("clients"))["blocked_clients"]:  # noqa: ASYNC110 - only the server shows it
        await asyncio.sleep(0)
    await client.ping()
    await raw.config_set("requirepass", "another")
    await asyncio.gather(*(client.post(msgspec.structs.replace(JOIN, seq=n)) for n in range(20)))
    assert sorted(fact.seq for _, fact in await client.inbox("0-0")) == list(range(20))
    await raw.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(StoreUnreachable) as caught:
        await client.ping()
    assert caught.value.refused
    orders.cancel()
    await client.close()
    await raw.aclose()
    await server.end()


async def test_keys_that_were_retired_live_on_with_the_next_generation(server, store):
    """The next generation keeps keys that were set to expire, as when the batch host dies between the end of its
    generation and the removal of the store's address."""
    await store.acquire("a", 60.0)
    progress = {"incarnation": "n1.0", "node": "n1", "generation": 0, "replica": "main-0", "cycle": 0}
    await store.post(Progress(**progress, seq=1, rank=0, step=1))
    await store.retire(60)
    await store.acquire("b", 60.0)
    raw = server.raw()
    assert [await raw.ttl(key) for key in (store.keys.epoch, store.keys.journal_n, store.keys.inbox)] == [-1] * 3
    assert 0 < await raw.ttl(store.keys.lease) <= 60
    await raw.aclose()


async def test_retirement_that_a_failover_interrupts_is_tried_again(tmp_path):
    """The keys of an ended job expire, although the server refused the first attempt."""
    server = RealServer(tmp_path / "server")
    await server.start()
    client, raw = server.store(), server.raw()
    await client.acquire("a", 60.0)
    await raw.execute_command("REPLICAOF", "127.0.0.1", "1")
    retiring = asyncio.create_task(client.retire(60))
    while "cmdstat_expire" not in await raw.info("commandstats"):  # noqa: ASYNC110 - only the server shows it
        await asyncio.sleep(0.01)
    await raw.execute_command("REPLICAOF", "NO", "ONE")
    await retiring
    assert 0 < await raw.ttl(client.keys.epoch) <= 60
    await client.close()
    await raw.aclose()
    await server.end()


async def test_store_that_stays_away_is_given_up_after_the_patience(server):
    """The wait has a bound, and its error names the store."""
    await server.kill()
    client = server.store(patience_s=0.2)
    with pytest.raises(StoreUnreachable, match=re.escape(server.address().url)) as caught:
        await client.ping()
    assert not caught.value.refused
    await client.close()


async def test_killed_store_comes_back_with_all_that_it_had_answered_for(server, store):
    """SIGKILL loses nothing that was acknowledged, and clients that wait for an answer or for new orders go on by
    themselves."""
    epoch, _, _ = await store.acquire("a", 1.0)
    entries = [entry(n) for n in range(1, 501)]
    await store.commit(epoch, entries)
    last, _, _ = await store.join(JOIN)
    orders = asyncio.create_task(store.orders(last))
    await store.ping()
    await server.kill()
    journal = asyncio.create_task(store.journal())
    await server.start()
    assert await journal == entries
    await store.commit(epoch, [entry(501)], orders=[CLOSED])
    assert [order for _, order in await orders] == [CLOSED]
