"""An in-memory Valkey: commands in, replies out, blocked reads; and the Lua scripts of `store/lua`, in Python.

Its replies are the real server's: `tests/contract` compares them. `valkey_keyspace.py` has the commands and their
data, `valkey_client.py` the methods of redis.asyncio for `Store` and `HeartbeatReader`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from redis.exceptions import AuthenticationError, RedisError, ResponseError

from nvrx_slurm.lab.simulation.valkey_keyspace import Keyspace, Word, encoded
from nvrx_slurm.util.clock import Clock

ServerAnswer = Callable[[Any], None]
"""Takes a reply, or the exception that stands for one."""

Command = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name, arguments and options, as redis-py's method of that name has them. `script`: (function, keys, arguments)."""


class _Reader:
    """A blocked read."""

    __slots__ = ("answer", "command", "streams", "timer")

    def __init__(self, command: Command, answer: ServerAnswer) -> None:
        self.command, self.answer = command, answer
        self.streams: Mapping[str, Word] = command[1][0]
        self.timer: asyncio.TimerHandle | None = None


class MemoryServer:
    """A Valkey's state, and what a process of it does. `clock` gives stream ids, TIME and expiry, by `wall`.

    `handle` may be called on any event loop; blocked reads wait there. Its data survive `stop` and `start`, as those
    of the real one survive SIGKILL: the kernel has taken what was answered for. `password` is what clients must know.
    """

    def __init__(self, clock: Clock, password: str | None = None) -> None:
        self.password = password
        self.up = True
        self.data = Keyspace(clock, self._added)
        self._readers: dict[str, list[_Reader]] = {}
        self._grown: list[str] = []  # streams that a blocked reader waits for

    # ---- its life

    def stop(self) -> None:
        """The process dies: every client that waits for a reply gets a ConnectionResetError."""
        self.up = False
        for reader in [reader for readers in self._readers.values() for reader in readers]:
            self._release(reader, ConnectionResetError("the server was killed"))

    def start(self) -> None:
        """It is back, with all that it had. It writes to its file again, if the disk takes it."""
        self.up = True
        self.data.in_memory = False

    # ---- commands

    def handle(self, password: str | None, commands: Sequence[Command], answer: ServerAnswer) -> None:
        """Run one command, or several at once (a pipeline: its reply is a list, errors included)."""
        if password != self.password:
            answer(AuthenticationError("WRONGPASS invalid username-password pair or user is disabled."))
            return
        if len(commands) > 1:
            answer([self._run(command) for command in commands])
        elif (reply := self._run(commands[0])) is None and (block_ms := commands[0][2].get("block")):
            reader = _Reader(commands[0], answer)
            reader.timer = asyncio.get_running_loop().call_later(block_ms / 1000, self._release, reader, None)
            for key in reader.streams:
                self._readers.setdefault(key, []).append(reader)
        else:
            answer(reply)
        # Wake each blocked reader of what has grown, in the order in which they came.
        grown, self._grown = self._grown, []
        for key in grown:
            for reader in list(self._readers.get(key, ())):
                if (reply := self._run(reader.command)) is not None:
                    self._release(reader, reply)

    def _run(self, command: Command) -> Any:
        name, args, options = command
        try:
            if name == "script":
                script, keys, words = args
                return script(self.data, keys, words)
            return getattr(self.data, name)(*args, **options)
        except RedisError as error:
            return error

    # ---- blocking reads

    def _added(self, key: str) -> None:
        if key in self._readers:
            self._grown.append(key)

    def _release(self, reader: _Reader, reply: Any) -> None:
        if reader.timer is not None:
            reader.timer.cancel()
        for key in reader.streams:
            readers = self._readers[key]
            readers.remove(reader)
            if not readers:
                del self._readers[key]
        reader.answer(reply)


Script = Callable[[Keyspace, Sequence[str], Sequence[Word]], list[Any]]

ROUND_S = 3600
MOST_ORDERS = 4096


def acquire(data: Keyspace, keys: Sequence[str], args: Sequence[Word]) -> list[Any]:
    """A controller takes over."""
    epoch, lease, journal_n, cursor = keys
    owner, ttl_ms, kept = args
    number = data.incr(epoch)
    data.set(lease, owner, px=int(ttl_ms))
    data.set(journal_n, kept, nx=True)
    return [number, int(data.get(journal_n) or 0), data.get(cursor) or b"0-0"]


def commit(data: Keyspace, keys: Sequence[str], args: Sequence[Word]) -> list[Any]:
    """One batch of decisions: all or nothing, only by the newest controller, only onto the journal as it saw it."""
    epoch, journal_n, journal, orders, cursor, shutdown, controller, inbox, *rendezvous = keys
    seconds, micros = data.time()
    now = seconds * 1_000_000 + micros
    if data.get(epoch) != encoded(args[0]):
        return [b"fenced", now]
    first, entries = int(args[1]), int(args[5])
    last = int(data.get(journal_n) or 0)
    if entries and first != last + 1:
        return [b"already" if first <= last else b"gap", now]

    at = 6
    for entry in args[at : at + entries]:
        data.xadd(journal, {"m": entry})
    if entries:
        data.set(journal_n, last + entries)
    at += entries
    packed = args[at + 1 : at + 1 + int(args[at])]
    field = at + 1 + len(packed)
    for key in rendezvous:
        count = int(args[field])
        words = args[field + 1 : field + 1 + count]
        for node, assignment in zip(words[::2], words[1::2], strict=True):
            data.hset(key, node, assignment)
        data.expire(key, ROUND_S)
        field += count + 1
    if args[3] != "":
        data.set(shutdown, args[3], nx=True)
    if args[4] != "":
        data.set(controller, args[4])
    for order in packed:
        data.xadd(orders, {"m": order}, maxlen=MOST_ORDERS)
    if args[2] != "":
        data.set(cursor, args[2])
        data.xtrim(inbox, minid=args[2])
    return [b"ok", now]


def join(data: Keyspace, keys: Sequence[str], args: Sequence[Word]) -> list[Any]:
    """An agent introduces itself."""
    inbox, orders, shutdown, controller, joins = keys
    record, incarnation = args
    if data.hget(joins, incarnation) is None:
        last = data.xrevrange(orders, count=1)
        data.hset(joins, incarnation, last[0][0] if last else b"0-0")
        data.xadd(inbox, {"m": record})
    return [data.hget(joins, incarnation), data.get(shutdown) or b"", data.get(controller) or b""]


def script_of(text: str) -> Script:
    """The one that does what a Lua text says. Raises ResponseError for a text that is none of `store/lua`'s."""
    try:
        return _BY_TEXT[text]
    except KeyError:
        raise ResponseError(f"the in-memory server has no Python for this script: {text[:60]!r}") from None


_LUA = resources.files("nvrx_slurm.store") / "lua"
_BY_TEXT: dict[str, Script] = {
    (_LUA / f"{script.__name__}.lua").read_text(): script for script in (acquire, commit, join)
}
