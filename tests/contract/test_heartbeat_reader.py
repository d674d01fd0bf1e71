"""How the controller reads heartbeats from a store: the real one, and the one in memory."""

from __future__ import annotations

import asyncio

import pytest

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.records import Heartbeat, unpack_heartbeat
from nvrx_slurm.store.heartbeat_reader import BATCH
from nvrx_slurm.store.sealing import seal_heartbeat
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.job_key import JobKey
from tests.contract.servers import BEATS as KEY
from tests.contract.servers import TOKEN

NODES = 50
KEEP = 2 * NODES + 16
BOUND_S = 10.0


class SetClock(SystemClock):
    """A monotonic clock that stands where the test sets it."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
async def store(server):
    """An agent's client."""
    store = server.store()
    yield store
    await store.close()


@pytest.fixture
async def reader(server):
    """The controller's heartbeat reader."""
    reader = server.heartbeat_reader()
    yield reader
    await reader.close()


@pytest.fixture
async def raw(server):
    """A plain client, to write what no agent would write."""
    client = server.raw()
    yield client
    await client.aclose()


def beat(node: str = "n1", **more) -> Heartbeat:
    return Heartbeat(node=node, incarnation=f"of-{node}", **more)


def item(beat: Heartbeat) -> dict[str, str | bytes]:
    """A heartbeat in the form in which an agent adds it to the stream."""
    return {"who": beat.incarnation, "m": seal_heartbeat(JobKey(TOKEN), KEY, beat, 1)}


def nodes(heard) -> list[str]:
    return [who.decode().removeprefix("of-") for _, who, _ in heard.beats]


async def send(store, *names: str) -> None:
    for name in names:
        await store.send_heartbeat(beat(name), KEEP)


async def test_each_heartbeat_is_read_once_and_in_order(store, reader):
    """A read returns the heartbeats that were sent since the last read, and nothing else."""
    await send(store, "n1", "n2")
    assert nodes(await reader.read()) == ["n1", "n2"]
    assert nodes(await reader.read()) == []
    await send(store, "n3", "n1")
    assert nodes(await reader.read()) == ["n3", "n1"]


async def test_first_call_brings_what_was_sent_before_it(server, store, reader):
    """A new reader also returns the heartbeats that were sent before its first read. Only that first result is
    marked."""
    assert (await reader.read()).first
    await send(store, "n1")
    newcomer = server.heartbeat_reader()
    heard = await newcomer.read()
    assert heard.first and nodes(heard) == ["n1"]
    assert not (await newcomer.read()).first
    await newcomer.close()


async def test_sender_is_readable_without_decoding_the_heartbeat(store, reader):
    """The sender's incarnation is stored beside the packed heartbeat, which keeps all of its fields."""
    told = beat(state="active", cycle=3, generation=2, steps={0: 7}, teardown="ask")
    await store.send_heartbeat(told, KEEP)
    [(_, who, packed)] = (await reader.read()).beats
    assert who == b"of-n1"
    assert unpack_heartbeat(packed) == told


async def test_more_than_one_batch_comes_in_one_call(reader, raw):
    """A backlog longer than one reply is read to its end."""
    count = 2 * BATCH + 1
    async with raw.pipeline(transaction=False) as pipeline:
        for index in range(count):
            pipeline.xadd(KEY, item(beat(f"n{index}")))
        await pipeline.execute()
    assert nodes(await reader.read()) == [f"n{index}" for index in range(count)]


async def test_age_is_the_servers(reader, raw):
    """A heartbeat's age is the server's time now, minus the server's time when it was added."""
    seconds, _ = await raw.time()
    await raw.xadd(KEY, item(beat()), id=f"{(seconds - 60) * 1000}-0")
    heard = await reader.read()
    assert seconds <= heard.now_s <= seconds + BOUND_S
    [(age_s, _, _)] = heard.beats
    assert age_s == pytest.approx(heard.now_s - (seconds - 60), abs=0.01)


@pytest.mark.parametrize(("set_by_s", "age_s"), [(-3600, 0.25), (3600, 0.0)])
async def test_clock_that_jumps_falsifies_no_age_beyond_the_time_between_two_calls(server, raw, set_by_s, age_s):
    """A heartbeat whose stamp is an hour off gets an age between 0 and the time since the previous read."""
    clock = SetClock()
    reader = server.heartbeat_reader(clock=clock)
    seconds, _ = await raw.time()
    await reader.read()
    clock.now_s += 0.25
    await raw.xadd(KEY, item(beat()), id=f"{(seconds + set_by_s) * 1000}-0")
    assert [age for age, _, _ in (await reader.read()).beats] == [age_s]
    await reader.close()


async def test_what_is_no_heartbeat_is_set_aside_and_counted(reader, raw, caplog):
    """Items that are no heartbeats are skipped and counted. The heartbeats of other nodes are still read."""
    await raw.xadd(KEY, {"m": b"of an older version"})
    await raw.xadd(KEY, item(beat("n2")))
    await raw.xadd(KEY, {"x": "", "m": ""})
    await raw.xadd(KEY, item(beat("n3")))
    assert nodes(await reader.read()) == ["n2", "n3"]
    [refused] = reader.refused.take()
    assert (refused.stream, refused.count) == (KEY, 2)
    assert caplog.text.count("set aside") == 1  # one log line per minute


async def test_copy_of_a_heartbeat_is_no_sign_of_life(store, reader, raw):
    """Another user of the store copies a signed heartbeat, with the same sender and with another one: neither
    counts."""
    await send(store, "n1")
    [(_, fields)] = await raw.xrange(KEY)
    assert nodes(await reader.read()) == ["n1"]
    await raw.xadd(KEY, fields)
    await raw.xadd(KEY, {**fields, b"who": b"of-n2"})
    assert nodes(await reader.read()) == []


async def test_stream_stays_trimmed_and_memory_flat(store, reader, raw):
    """The stream keeps about two heartbeats per node, whether or not a controller reads it."""
    names = [f"n{index}" for index in range(NODES)]
    sizes = []
    for _ in range(2):
        for _ in range(10):
            await send(store, *names)
        await reader.read()
        assert await raw.xlen(KEY) <= KEEP + 100  # the server trims whole leaves of 100 items
        sizes.append(await raw.memory_usage(KEY))
    assert sizes[1] <= 2 * sizes[0]


async def test_wrong_password_is_an_immediate_error(server):
    """The reader does not retry a refused password."""
    reader = server.heartbeat_reader(password="wrong")
    with pytest.raises(StoreUnreachable) as caught:
        await reader.read()
    assert caught.value.refused
    await reader.close()


async def test_key_of_another_kind_is_an_error(reader, raw):
    """The error contains the server's answer."""
    await raw.set(KEY, "x")
    with pytest.raises(StoreUnreachable, match="WRONGTYPE"):
        await reader.read()


async def test_reader_reconnects_to_a_store_that_was_killed(server, store, reader):
    """A read fails at once while the store is down. The next read after its restart reconnects and misses no
    heartbeat."""
    await send(store, "n1")
    assert nodes(await reader.read()) == ["n1"]
    await send(store, "n2")
    await server.kill()
    with pytest.raises(StoreUnreachable) as away:
        await reader.read()
    assert not away.value.refused
    await server.start()
    assert nodes(await reader.read()) == ["n2"]


async def test_frozen_store_fails_the_call_within_its_bound(server, reader):
    """A store that accepts connections and never answers fails the read within its timeout. After it thaws, reads
    succeed."""
    await reader.read()
    await server.freeze()
    with pytest.raises(StoreUnreachable):
        await asyncio.wait_for(reader.read(), BOUND_S)
    await server.thaw()
    assert nodes(await reader.read()) == []
