"""redis.asyncio's methods over a link to an in-memory server, for `StoreClient` and `HeartbeatReader`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from redis import exceptions as failures
from redis.commands.core import AsyncScript

from nvrx_slurm.lab.simulation.valkey_server import Command, MemoryServer, ServerAnswer
from nvrx_slurm.util.tasks import settle

# How long a client waits for a reply by default, in seconds: as `store.client` configures redis-py.
SOCKET_S = 7.0

# Runs on the server's side, and answers there.
StoreRequest = Callable[[ServerAnswer], None]


class ServerLink(Protocol):
    """The way to the server and back."""

    def call(self, request: StoreRequest) -> asyncio.Future[Any]:
        """The answer, or OSError where the connection breaks; it may also never come."""
        ...


class DirectLink:
    """No network in between."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    def call(self, request: StoreRequest) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._server.up:
            request(lambda reply: settle(future, reply))
        else:
            settle(future, ConnectionRefusedError("Connection refused"))
        return future


def _command(name: str) -> Callable[..., Awaitable[Any]]:
    def method(self: MemoryClient, *args: Any, **options: Any) -> Awaitable[Any]:
        return self.ask([(name, args, options)])

    return method


class MemoryClient:
    """What `redis.asyncio.Redis` is to `StoreClient`: raises redis-py's own errors. `socket_s`: its timeout."""

    def __init__(
        self,
        server: MemoryServer,
        *,
        password: str | None = None,
        link: ServerLink | None = None,
        socket_s: float = SOCKET_S,
    ) -> None:
        self._server, self._password, self._link = server, password, link or DirectLink(server)
        self._deadlines = _RequestDeadlines(socket_s)
        self._parsers: dict[str, Callable[[Any], Any]] = dict(_PARSERS)

    ping, time, config_set = _command("ping"), _command("time"), _command("config_set")
    get, set, delete, expire = _command("get"), _command("set"), _command("delete"), _command("expire")
    hget, hgetall, hset, ttl = _command("hget"), _command("hgetall"), _command("hset"), _command("ttl")
    xadd, xlen, xtrim, xread = _command("xadd"), _command("xlen"), _command("xtrim"), _command("xread")
    evalsha, script_load = _command("evalsha"), _command("script_load")
    xrange, xrevrange, memory_usage = _command("xrange"), _command("xrevrange"), _command("memory_usage")

    def set_response_callback(self, command: str, callback: Callable[[Any], Any]) -> None:
        """How this client parses replies to a command."""
        self._parsers[command.lower()] = callback

    def register_script(self, text: str) -> AsyncScript:
        """redis-py's own: EVALSHA, and where the server has no such script SCRIPT LOAD and EVALSHA again."""
        return AsyncScript(self, text.encode())  # type: ignore[arg-type]  # it calls two methods of its client

    def pipeline(self, transaction: bool = True) -> MemoryPipeline:
        return MemoryPipeline(self)

    async def aclose(self) -> None:
        """Nothing is held."""

    # ---- how

    async def ask(self, commands: list[Command]) -> Any:
        """The reply to a command, or those to several that are carried out together. Raises the first error among
        them."""
        # One coroutine for both: each reply resumes every coroutine between here and the task.
        future = self._link.call(partial(self._server.handle, self._password, commands))
        if not future.done():
            self._deadlines.watch(future)
        try:
            reply = await future
        except TimeoutError:
            raise failures.TimeoutError("Timeout reading from the in-memory server") from None
        except OSError as error:
            raise failures.ConnectionError(str(error)) from None
        parsers = self._parsers
        if len(commands) == 1:
            name = commands[0][0]
            return parsers[name](reply) if name in parsers else reply
        for at, ((name, *_), each) in enumerate(zip(commands, reply, strict=True)):
            if isinstance(each, Exception):
                raise each
            if name in parsers:
                reply[at] = parsers[name](each)
        return list(reply)


class MemoryPipeline:
    """Commands that are sent together."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client
        self._commands: list[Command] = []

    async def __aenter__(self) -> MemoryPipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    def __getattr__(self, name: str) -> Callable[..., MemoryPipeline]:
        def add(*args: Any, **options: Any) -> MemoryPipeline:
            self._commands.append((name, args, options))
            return self

        return add

    async def execute(self) -> list[Any]:
        commands, self._commands = self._commands, []
        if not commands:
            return []
        replies: Any = await self._client.ask(commands)
        return replies if len(commands) > 1 else [replies]


class _RequestDeadlines:
    """One timer for all calls of a client: each has the same time, so the oldest is the next to be late."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._calls: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._armed = False

    def watch(self, future: asyncio.Future[Any]) -> None:
        loop = future.get_loop()
        self._calls.append((loop.time() + self._after_s, future))
        if not self._armed:
            self._arm(loop)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed = True
        loop.call_at(self._calls[0][0], self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        calls, now = self._calls, loop.time()
        # Those that are answered go as well, so that the timer is set for one that still waits.
        while calls and (calls[0][0] <= now or calls[0][1].done()):
            settle(calls.popleft()[1], TimeoutError())
        self._armed = False
        if calls:
            self._arm(loop)


def _parse_items(items: list[Any]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(identity, dict(zip(words[::2], words[1::2], strict=True))) for identity, words in items]


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "xread": lambda reply: [[name, _parse_items(items)] for name, items in reply or ()],
    "xrange": _parse_items,
    "xrevrange": _parse_items,
}
