"""An in-memory Valkey: commands in, replies out, blocked reads, and its cache of Lua scripts.

Its replies are the real server's: `tests/contract` compares them. `valkey_keyspace.py` has the commands and their
data, `valkey_scripts.py` runs the scripts, `valkey_client.py` has the methods of redis.asyncio for `StoreClient` and
`HeartbeatReader`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.exceptions import AuthenticationError, NoScriptError, RedisError

from nvrx_slurm.lab.simulation.valkey_keyspace import Keyspace, Word, encoded
from nvrx_slurm.lab.simulation.valkey_scripts import lua_scripts
from nvrx_slurm.util.clock import Clock

# Takes a reply, or the exception that stands for one.
ServerAnswer = Callable[[Any], None]

# Name, arguments and options, as redis-py's method of that name has them.
Command = tuple[str, tuple[Any, ...], dict[str, Any]]


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
        self._clock = clock
        self.lose_data()
        self._lua = lua_scripts()
        self._scripts: dict[str, Any] = {}  # by SHA1, since the process began
        self._readers: dict[str, list[_Reader]] = {}
        self._grown: list[str] = []  # streams that a blocked reader waits for

    # ---- its life

    def stop(self) -> None:
        """The process dies: every client that waits for a reply gets a ConnectionResetError. Its scripts are gone."""
        self.up = False
        self._scripts.clear()
        # Once each: a reader of several streams is listed with each of them.
        for reader in dict.fromkeys(reader for readers in self._readers.values() for reader in readers):
            self._release(reader, ConnectionResetError("the server was killed"))

    def lose_data(self) -> None:
        """As one that writes to no file does when it ends. While it is down, or has no clients."""
        self.data = Keyspace(self._clock, self._added)

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
            if name == "evalsha":
                return self._evalsha(*args)
            if name == "script_load":
                return self._load(*args)
            return getattr(self.data, name)(*args, **options)
        except RedisError as error:
            return error

    # ---- scripts

    def _load(self, text: Word) -> str:
        sha, script = self._lua.compile(encoded(text))
        self._scripts[sha] = script
        return sha

    def _evalsha(self, sha: str, keys: int, *words: Word) -> Any:
        if (script := self._scripts.get(sha)) is None:
            raise NoScriptError("No matching script.")
        sent = [encoded(word) for word in words]
        return self._lua.run(script, self.data, sent[:keys], sent[keys:])

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
