"""The in-memory server answers as the real one does, for any sequence of commands and for every script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import NoScriptError, ResponseError

from nvrx_slurm.errors import DataLostError, FencedError
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import (
    Assignment,
    ControllerUp,
    Entry,
    Heartbeat,
    NodeJoined,
    RendezvousClosed,
    RendezvousOpened,
    Shutdown,
    Tick,
)
from nvrx_slurm.lab.simulation.loop import VirtualClock, VirtualLoop
from nvrx_slurm.lab.simulation.valkey_client import MemoryClient
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.util.clock import SystemClock
from tests.contract.servers import PASSWORD, InMemoryServer, RealServer, Server

EXAMPLES = settings(settings.get_profile("shared fixtures"), max_examples=60)
KEYS = Keys("j")
NODES = ("n0", "n1", "n2")
KEEP = 5


class Pair:
    """Both servers, emptied before each comparison."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._real = RealServer(folder)
        self._runner.run(self._real.start())

    def play(self, play: Any, *args: Any) -> list[Any]:
        """What `play(server, *args)` returns for each of the two servers."""
        return [self._runner.run(self._play(server, play, args)) for server in (self._real, InMemoryServer(Path()))]

    async def _play(self, server: Server, play: Any, args: tuple[Any, ...]) -> Any:
        if server is self._real:
            async with raw(server) as client:
                await client.flushall()
        return await play(server, *args)

    def close(self) -> None:
        self._runner.run(self._real.end())
        self._runner.close()


@asynccontextmanager
async def raw(server: Server) -> AsyncIterator[Any]:
    client = server.raw()
    yield client
    await client.aclose()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """A real server and one in memory."""
    pair = Pair(tmp_path)
    yield pair
    pair.close()


# ---- what the store does


@dataclass(frozen=True)
class Commit:
    """`epoch` and `first` are relative to the journal; `cursor` counts from the newest inbox item."""

    epoch: int = 0
    first: int = 1
    entries: int = 1
    orders: int = 0
    rendezvous: tuple[int, ...] = ()
    cursor: int | None = None
    shutdown: str | None = None
    controller: bool = False


commits = st.builds(
    Commit,
    epoch=st.sampled_from([0, 0, 0, -1]),
    first=st.sampled_from([1, 1, 1, 0, 2]),
    entries=st.integers(0, 3),
    orders=st.integers(0, 2),
    rendezvous=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    cursor=st.none() | st.integers(0, 3),
    shutdown=st.none() | st.sampled_from(["first", "second"]),
    controller=st.booleans(),
)
others = st.sampled_from(["acquire", "join", "tell", "beat", "trim", "journal", "lives", "renew", "ranks", "retire"])
SHUT = {name: Shutdown(exit_code=1, reason=name) for name in ("first", "second")}


class Actor:
    """Runs steps on a store and records every reply. Ids are recorded as counts from the newest."""

    def __init__(self, store: StoreClient, client: Any) -> None:
        self._store, self._client = store, client
        self._epoch = self._n = self._said = 0

    async def play(self, steps: list[Commit | str]) -> list[Any]:
        said = [await self._commit(step) if isinstance(step, Commit) else await self._do(step) for step in steps]
        return [*said, *[await self._left(key) for key in (KEYS.inbox, KEYS.beats, KEYS.orders, KEYS.journal)]]

    async def _do(self, step: str) -> Any:
        self._said += 1
        store = self._store
        match step:
            case "acquire":
                kept_epoch = 2 * self._said % 7 or None
                epoch, n, cursor = await store.acquire("owner", 60.0, self._said, kept_epoch)
                if epoch:  # 0: nothing was changed
                    self._epoch, self._n = epoch, n
                return epoch, n, await self._age(KEYS.inbox, cursor)
            case "join":
                last, *rest = await store.join(self._fact())
                return await self._age(KEYS.orders, last), rest
            case "tell":
                return await store.post(self._fact())
            case "beat" | "trim":
                beat = Heartbeat(node="n", incarnation=f"i{self._said}", cycle=self._said)
                return await store.send_heartbeat(beat, KEEP if step == "trim" else None)
            case "journal":
                return await store.journal()
            case "lives":
                return await store.controller_lives()
            case "renew":
                return await store.renew("owner", 60.0)
            case "retire":
                await store.retire(60)
                return [await self._client.ttl(key) for key in KEYS.all(0)]
            case _:
                answers = [await store.assignment("main-0", cycle, node) for cycle in range(2) for node in NODES]
                return [assignment for assignment, _ in answers]

    async def _commit(self, step: Commit) -> Any:
        first = self._n + step.first
        assignments = [_assignment(index) for index in range(len(NODES))]
        fields = list(zip(NODES, assignments, strict=True))
        try:
            took = await self._store.commit(
                self._epoch + step.epoch,
                [Entry(n=first + index, t=float(index), record=Tick()) for index in range(step.entries)],
                orders=[RendezvousOpened(replica="main-0", cycle=index) for index in range(step.orders)],
                rendezvous=[("main-0", 0, cycle, fields[:count]) for cycle, count in enumerate(step.rendezvous)],
                cursor=await self._inbox_id(step.cursor),
                shutdown=None if step.shutdown is None else SHUT[step.shutdown],
                controller=ControllerUp(epoch=self._epoch, host="h", port=self._said) if step.controller else None,
            )
        except (FencedError, DataLostError) as error:
            return type(error)
        self._n += step.entries if step.first == 1 else 0
        return abs(took - SystemClock().wall()) < 60.0

    def _fact(self) -> NodeJoined:
        return NodeJoined(node="n", incarnation="i", seq=self._said, addr="h", port=1)

    async def _inbox_id(self, age: int | None) -> str:
        items = await self._client.xrevrange(KEYS.inbox, count=None if age is None else age + 1)
        return "" if age is None or len(items) <= age else items[age][0].decode()

    async def _age(self, key: str, identity: str) -> int | None:
        identities = [each.decode() for each, _ in await self._client.xrevrange(key)]
        return identities.index(identity) if identity in identities else None

    async def _left(self, key: str) -> list[Any]:
        """The content of a stream; for a stream that is trimmed lazily, only the part that must be left."""
        trimmed = key in (KEYS.inbox, KEYS.beats)
        return [fields for _, fields in (await self._client.xrevrange(key, count=KEEP if trimmed else None))]


def _assignment(rank: int) -> Assignment:
    return Assignment(
        group_rank=rank,
        first_rank=rank,
        workers=1,
        world_size=3,
        group_world_size=3,
        master_addr="h",
        master_port=1,
        role="main",
    )


async def act(server: Server, steps: list[Commit | str]) -> list[Any]:
    store = server.store()
    async with raw(server) as client:
        said = await Actor(store, client).play(steps)
    await store.close()
    return said


def test_random_histories_of_a_job_get_the_same_replies(pair: Pair) -> None:
    """Takeovers, valid and invalid commits, joins, facts, heartbeats and retirement, in any order: both servers give
    the same replies and end with the same content."""

    @EXAMPLES
    @example([*["journal"] * 5, "acquire", Commit(epoch=-1, orders=1)])  # the second takeover is refused
    @given(st.lists(commits | others, max_size=25))
    def story(steps: list[Commit | str]) -> None:
        real, memory = pair.play(act, ["acquire", *steps])
        assert memory == real

    story()


# ---- command by command

names = st.sampled_from(["k0", "k1"])
words = st.sampled_from(["a", b"b", 3])
identities = st.builds(lambda ms, number: f"{ms}-{number}", st.integers(0, 4), st.integers(0, 2))
ends = identities | st.sampled_from(["-", "+", "2"])
counts = st.none() | st.integers(1, 3)


def command(name: str, *args: Any, **options: Any) -> st.SearchStrategy[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    return st.tuples(st.just(name), st.tuples(*args), st.fixed_dictionaries(options))


COMMANDS = st.one_of(
    command("ping"),
    command("get", names),
    command("set", names, words),
    command("set", names, words, nx=st.booleans(), px=st.sampled_from([None, 60_000])),
    command("delete", names),
    command("expire", names, st.just(60)),
    command("ttl", names),
    command("hset", names, words, words),
    command("hget", names, words),
    command("hgetall", names),
    command("xadd", names, st.just({"m": b"x", "n": 1}), id=identities, maxlen=st.none(), approximate=st.booleans()),
    command("xadd", names, st.just({"m": b"y"}), id=identities, maxlen=st.integers(0, 2), approximate=st.just(False)),
    command("xlen", names),
    command("xtrim", names, minid=identities, approximate=st.just(False)),
    command("xrange", names, ends, ends, count=counts),
    command("xrevrange", names, ends, ends, count=counts),
    command("xread", st.dictionaries(names, identities, min_size=1), count=counts),
)


async def command_by_command(server: Server, commands: list[Any]) -> list[Any]:
    said: list[Any] = []
    async with raw(server) as client:
        for name, args, options in commands:
            try:
                said.append(await getattr(client, name)(*args, **options))
            except ResponseError as error:
                said.append(str(error))
    return said


def test_random_commands_get_the_same_replies(pair: Pair) -> None:
    """Replies, their types and errors are the same, also for keys of the wrong kind and for ids that do not grow."""

    @EXAMPLES
    @given(st.lists(COMMANDS, min_size=5, max_size=40))
    def story(commands: list[Any]) -> None:
        real, memory = pair.play(command_by_command, commands)
        assert list(zip(commands, memory, strict=True)) == list(zip(commands, real, strict=True))

    story()


# ---- scripts

SCRIPTS = {
    # What a command's reply is in Lua.
    "status": "return redis.call('SET', KEYS[1], 'v')",
    "status is a table": "return redis.call('SET', KEYS[1], 'v').ok",
    "nil is false": "local v = redis.call('GET', 'none') return {type(v), tostring(v), v, 1}",
    "SET NX that did nothing": "redis.call('SET', KEYS[1], 'v') return {redis.call('SET', KEYS[1], 'w', 'NX'), 'x'}",
    "integer": "return {redis.call('HSET', KEYS[1], 'a', 1) + 1, type(redis.call('HSET', KEYS[1], 'b', 1))}",
    "array": "redis.call('XADD', KEYS[1], '5-1', 'm', 'v')"
    " return redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)",
    "TIME": "local time = redis.call('TIME') return {#time, type(time[1]), time[1] * 1000000 + time[2] > 10^15}",
    "TIME stands still": "local a, b = redis.call('TIME'), redis.call('TIME') return a[1] == b[1] and a[2] == b[2]",
    # What a script's value is as a reply.
    "nothing": "local x = 1",
    "values": "return {true, false, 3.99, -3.99, 'x', {ok='fine'}, {1, {2, {3}}}}",
    "ends before nil": "return {1, 2, nil, 4}",
    "large numbers": "return {2^53, 1e17, -2^53}",
    "status reply": "return redis.status_reply('GOOD')",
    # How Lua's numbers are sent, and how strings work as numbers.
    "numbers": "local r = {} for i, n in ipairs({1e15, 3.5, 1e20, 0.1, -0.0, 2^53, 1/3, 1e-7, 123456789.125}) do"
    " redis.call('SET', KEYS[1], n) r[i] = redis.call('GET', KEYS[1]) end return r",
    "concatenated": "return 'a' .. 1 .. 2.5 .. 1e15 .. 1e100",
    "added": "return '5' + ARGV[1]",
    "compared": "redis.call('SET', KEYS[1], 1) return {redis.call('GET', KEYS[1]) == ARGV[1], 1 == ARGV[1]}",
    "bytes": "return {KEYS[1] .. '\\0\\255', #ARGV[2]}",
    "keys and arguments": "return {#KEYS, #ARGV, KEYS[1], ARGV[1], ARGV[2], type(KEYS[2])}",
    "commands in lower case": "return redis.call('get', KEYS[1])",
    "server": "return server.call('SET', KEYS[1], 'v')",
    # Errors of commands.
    "call raises": "redis.call('HSET', KEYS[1], 'a', '1') return redis.call('GET', KEYS[1])",
    "call ends the script": "redis.call('HSET', KEYS[1], 'a', '1') redis.call('GET', KEYS[1]) return 'unseen'",
    "pcall returns": "redis.call('HSET', KEYS[1], 'a', '1')"
    " local r = redis.pcall('GET', KEYS[1]) return {type(r), r.err}",
    "pcall as a reply": "redis.call('HSET', KEYS[1], 'a', '1') return redis.pcall('GET', KEYS[1])",
    "Lua's pcall": "redis.call('HSET', KEYS[1], 'a', '1') return {pcall(redis.call, 'GET', KEYS[1])}",
    "raised again": "local r = redis.pcall('GET') error(r)",
    "error code": "redis.call('SET', KEYS[1], 'x') return redis.pcall('EXPIRE', KEYS[1], 'x').err",
    "small id": "redis.call('XADD', KEYS[1], '5-1', 'm', 'v') return redis.call('XADD', KEYS[1], '5-1', 'm', 'v')",
    "unknown command": "return redis.call('NOSUCH', 'x')",
    "too few arguments": "return redis.call('GET')",
    "too many arguments": "return redis.call('GET', 'a', 'b')",
    "a field without value": "return redis.call('HSET', KEYS[1], 'a')",
    "no command": "return redis.call()",
    "a table as an argument": "return redis.call('SET', KEYS[1], {1})",
    "nil as an argument": "return redis.call('GET', nil)",
    "no integer": "return redis.call('EXPIRE', KEYS[1], 1.5)",
    "no time": "return redis.call('SET', KEYS[1], 'v', 'PX', '0')",
    "no option": "return redis.call('SET', KEYS[1], 'v', 'QQ')",
    # Errors of scripts.
    "not Lua": "return (",
    "fails": "local a = {} \n return a.b.c",
    "error": "error('oh')",
    "error with a table": "error({err='MY oh'})",
    "error reply": "return redis.error_reply('MY fault')",
    "error reply without code": "return redis.error_reply('fault')",
    "half done": "redis.call('SET', KEYS[1], 'half') error('stop')",
    # The sandbox.
    "new global": "x = 1 return x",
    "known global": "ARGV = {} return 1",
    "unknown global": "return nosuch",
    "redis is closed": "redis.call = 1 return 1",
    "nothing of the host": "local seen = {} for _, name in ipairs({'io', 'debug', 'require', 'print', 'dofile'}) do"
    " seen[#seen + 1] = tostring(pcall(function() return _G[name] end)) end return seen",
    # Commands that we use and that no case above has.
    "hashes": "return {redis.call('HSET', KEYS[1], 'a', 1, 'b', 2), redis.call('HSETNX', KEYS[1], 'a', 3),"
    " redis.call('HSETNX', KEYS[1], 'c', 3), redis.call('HGET', KEYS[1], 'a'), redis.call('HGET', KEYS[1], 'z')}",
    "expiry": "redis.call('SET', KEYS[1], 'v', 'PX', 60000) return {redis.call('EXPIRE', KEYS[1], 60),"
    " redis.call('EXPIRE', 'none', 60), redis.call('PERSIST', KEYS[1]), redis.call('PERSIST', KEYS[1])}",
    "trims": "for i = 1, 9 do redis.call('XADD', KEYS[1], 'MAXLEN', '~', 4096, i .. '-0', 'm', i) end"
    " return {redis.call('XTRIM', KEYS[1], 'MINID', '3-0'),"
    " redis.call('XTRIM', KEYS[1], 'MINID', '~', '9-0'), #redis.call('XREVRANGE', KEYS[1], '+', '-')}",
}


async def run_script(server: Server, text: str) -> tuple[Any, Any]:
    async with raw(server) as client:
        try:
            reply = await client.register_script(text)(keys=["k"], args=["1", b"\x00b"])
        except ResponseError as error:
            # The real server also names the line.
            reply = type(error).__name__, str(error).partition(" script: ")[0]
        left = None
        with contextlib.suppress(ResponseError):  # the key may be no string
            left = await client.get("k")
    return reply, left


def test_scripts_run_as_on_the_real_server(pair: Pair) -> None:
    """Conversions between Lua values and replies, caught and uncaught errors, and what a script can access: both
    servers give the same replies and leave the same value in the key."""
    seen = {name: pair.play(run_script, text) for name, text in SCRIPTS.items()}
    assert {name: memory for name, (_, memory) in seen.items()} == {name: real for name, (real, _) in seen.items()}


async def test_scripts_must_be_loaded_again_after_the_server_was_killed(server):
    """EVALSHA fails in a process that has not loaded the script, without running anything; redis-py then loads it."""
    script = "return redis.call('HSETNX', KEYS[1], 'a', 1)"
    sha = sha1(script.encode()).hexdigest()
    async with raw(server) as client:
        with pytest.raises(NoScriptError):
            await client.evalsha(sha, 1, "k")
        loaded = await client.script_load(script)
        assert (loaded if isinstance(loaded, str) else loaded.decode()) == sha
        assert await client.evalsha(sha, 1, "k") == 1
    await server.kill()
    await server.start()
    async with raw(server) as client:
        with pytest.raises(NoScriptError):
            await client.evalsha(sha, 1, "k")
        assert await client.register_script(script)(keys=["k"]) == 0  # what the first process has set is there


# ---- what only time shows


async def test_blocked_readers_wake_in_turn_and_time_out_alone(server):
    """Each blocked reader gets what is new to it, whether a command or a script wrote it. A write to another stream
    wakes no reader."""
    store = server.store()
    async with raw(server) as client:
        first = asyncio.create_task(client.xread({KEYS.orders: "0-0"}, block=30_000))
        second = asyncio.create_task(client.xread({KEYS.orders: "0-0", KEYS.beats: "0-0"}, block=30_000))
        assert await client.xread({KEYS.journal: "0-0"}, block=50) == []
        epoch, _, _ = await store.acquire("a", 1.0)
        closed = RendezvousClosed(
            replica="main-0", cycle=0, nodes=(), active=0, standby=0, world_size=0, master_addr="h", master_port=1
        )
        await store.commit(epoch, [Entry(n=1, t=1.0, record=closed)], orders=[closed])
        [[key, items]] = await first
        assert key == KEYS.orders.encode() and len(items) == 1
        assert await second == [[key, items]]
    await store.close()


async def test_server_dies_under_a_reader_of_two_streams():
    """When the server dies, every blocked reader gets one error, also a reader of two streams."""
    memory = MemoryServer(SystemClock())
    streams = ({"a": "0-0", "b": "0-0"}, {"c": "0-0"})
    reads = [asyncio.create_task(MemoryClient(memory).xread(each, block=30_000)) for each in streams]
    await asyncio.sleep(0)
    memory.stop()
    for read in reads:
        with pytest.raises(StoreConnectionError):
            await read


async def test_disk_that_is_full_refuses_writes_until_memory_has_to_do():
    """A refused write changes nothing. The store's client then switches the server to memory only, as it does with
    the real one."""
    memory = MemoryServer(SystemClock(), PASSWORD)
    client = MemoryClient(memory, password=PASSWORD)
    memory.data.disk_full = True
    with pytest.raises(ResponseError, match="MISCONF"):
        await client.set("k", "v")
    assert await client.get("k") is None
    address = StoreAddress(url="redis://memory:1", password=PASSWORD, job="j", token="t", embedded=True)
    store = StoreClient(address, clock=SystemClock(), connection=client)
    assert (await store.acquire("a", 1.0))[0] == 1
    await client.set("k", "v")
    assert await client.get("k") == b"v"


def test_ids_times_and_expiry_follow_the_servers_clock():
    """Ids keep growing even when the clock is set back."""
    loop = VirtualLoop()
    clock = VirtualClock(loop, ahead_s=0.0)  # the monotonic clock begins at 1,000 s
    client = MemoryClient(MemoryServer(clock))

    async def story() -> None:
        assert await client.time() == (1_000, 0)
        await client.set("k", "v", px=2_000)
        assert await client.xadd("s", {"m": "1"}) == b"1000000-0"
        await asyncio.sleep(1.5)
        assert await client.get("k") == b"v"
        clock.set_by(-60.0)
        assert await client.xadd("s", {"m": "2"}) == b"1000000-1"
        clock.set_by(60.0)
        await asyncio.sleep(0.5)
        assert await client.get("k") is None
        assert await client.xadd("s", {"m": "3"}) == b"1002000-0"

    loop.run(story())
    loop.close()


def test_client_gives_up_what_is_never_answered_after_its_own_time():
    """Each call that is never answered times out on its own, counted from when it was sent."""
    loop = VirtualLoop()

    class Silent:
        def call(self, request: Any) -> asyncio.Future[Any]:
            return loop.create_future()

    server = MemoryServer(VirtualClock(loop))
    silent = MemoryClient(server, link=Silent(), socket_s=7.0)

    async def late(after_s: float) -> float:
        await asyncio.sleep(after_s)
        began = loop.time()
        with pytest.raises(Exception, match="Timeout"):
            await silent.ping()
        return loop.time() - began

    async def story() -> list[float]:
        return await asyncio.gather(late(0.0), late(3.0), late(20.0))

    assert loop.run(story()) == [7.0, 7.0, 7.0]
    loop.close()
