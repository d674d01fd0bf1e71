"""The server's process: commands in, replies out, blocking reads in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from redis.exceptions import AuthenticationError, RedisError

from nvrx_slurm.lab.faults.valkey.keyspace import Keyspace, Word
from nvrx_slurm.util.clock import Clock

Answer = Callable[[Any], None]
"""Takes a reply, or the exception that stands for one."""

Command = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name, arguments and options, as redis-py's method of that name has them. `script`: (function, keys, arguments)."""


class Timer(Protocol):
    def cancel(self) -> object: ...


class _Reader:
    """A blocked read."""

    __slots__ = ("answer", "command", "timer")

    def __init__(self, command: Command, answer: Answer) -> None:
        self.command, self.answer = command, answer
        self.timer: Timer | None = None


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
        self._grown: list[str] = []  # streams for which somebody waits

    # ---- its life

    def stop(self) -> None:
        """The process dies: whoever waits for a reply hears of it."""
        self.up = False
        for reader in [reader for readers in self._readers.values() for reader in readers]:
            self._release(reader, ConnectionResetError("the server was killed"))

    def start(self) -> None:
        """It is back, with all that it had. It writes to its file again, if the disk takes it."""
        self.up = True
        self.data.in_memory = False

    # ---- commands

    def handle(self, password: str | None, commands: Sequence[Command], answer: Answer) -> None:
        """Run one command, or several at once (a pipeline: its reply is a list, errors included)."""
        if password != self.password:
            answer(AuthenticationError("WRONGPASS invalid username-password pair or user is disabled."))
            return
        if len(commands) > 1:
            answer([self._run(command) for command in commands])
        elif (reply := self._run(commands[0])) is None and commands[0][2].get("block"):
            self._wait(commands[0], answer)
        else:
            answer(reply)
        if self._grown:
            self._wake()

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

    def _wait(self, command: Command, answer: Answer) -> None:
        reader = _Reader(command, answer)
        block_s = command[2]["block"] / 1000
        reader.timer = asyncio.get_running_loop().call_later(block_s, self._release, reader, None)
        for key in _streams(command):
            self._readers.setdefault(key, []).append(reader)

    def _wake(self) -> None:
        """Each blocked reader of what has grown, in the order in which they came."""
        grown, self._grown = self._grown, []
        for key in grown:
            for reader in list(self._readers.get(key, ())):
                if (reply := self._run(reader.command)) is not None:
                    self._release(reader, reply)

    def _release(self, reader: _Reader, reply: Any) -> None:
        if reader.timer is not None:
            reader.timer.cancel()
        for key in _streams(reader.command):
            readers = self._readers[key]
            readers.remove(reader)
            if not readers:
                del self._readers[key]
        reader.answer(reply)


def _streams(command: Command) -> Mapping[str, Word]:
    streams: Mapping[str, Word] = command[1][0]
    return streams
