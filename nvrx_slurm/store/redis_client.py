"""redis-py's connections to the store that a `store.json` names, for asyncio and for threads.

A site's own store is connected to as its URL says. An embedded one is looked up again for each connection: it has
another port and another password after each of its starts (`store/link.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import redis
import redis.asyncio
from redis import exceptions as failures
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool
from redis.retry import Retry

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.store import link
from nvrx_slurm.store.link import Refusals, Where
from nvrx_slurm.util.threads import in_thread


class StoreLocation(Where, Protocol):
    """Where the store is, and whether it is this job's own."""

    @property
    def embedded(self) -> bool: ...


CONNECT_S = 3.0

# Reads `store.json` again. None where there is no such file; raises OSError or NvrxError.
Look = Callable[[], StoreLocation | None]


def async_client(
    address: StoreLocation, look: Look | None, *, connect_s: float, answer_s: float
) -> redis.asyncio.Redis:
    """A client that does not try again by itself. Without `look` the address stays what it is."""
    # RESP2: `HeartbeatReader` takes replies as hiredis has parsed them, and those of RESP3 have another form.
    options: dict[str, Any] = {"socket_connect_timeout": connect_s, "socket_timeout": answer_s, "protocol": 2}
    retry = AsyncRetry(NoBackoff(), 0)
    if not address.embedded:
        of_site: Any = _OpenFirst.from_url(address.url, password=address.password, retry=retry, **options)
        return redis.asyncio.Redis.from_pool(of_site)
    pool: Any = _OpenFirst(
        connection_class=_AsyncStoreConnection,
        address=address,
        look=look or (lambda: address),
        refusals=Refusals(),
        retry=retry,
        **options,
    )
    return redis.asyncio.Redis.from_pool(pool)


def client(address: StoreLocation, *, connect_s: float, answer_s: float) -> redis.Redis:
    """The same for a thread, and for an address that stays what it is."""
    options: dict[str, Any] = {"socket_connect_timeout": connect_s, "socket_timeout": answer_s, "protocol": 2}
    retry = Retry(NoBackoff(), 0)
    if not address.embedded:
        return redis.Redis.from_url(address.url, password=address.password, retry=retry, **options)
    return redis.Redis.from_pool(ConnectionPool(connection_class=StoreConnection, where=address, **options))


class _OpenFirst(AsyncConnectionPool):
    """Hands out an idle connection that is open before one that is not. redis-py's own hands out the one returned
    last: where the store's password has changed, that is one that cannot be opened, and the open ones are never used
    again."""

    def get_available_connection(self) -> Any:
        self._available_connections.sort(key=lambda connection: connection.is_connected)  # the last one is taken
        return super().get_available_connection()  # type: ignore[no-untyped-call]


class StoreConnection(Connection):
    """To an embedded store at one address, for one thread."""

    def __init__(self, *, where: Where, refusals: Refusals | None = None, **options: Any) -> None:
        options = {"retry": Retry(NoBackoff(), 0), **options, "password": where.password}
        super().__init__(redis_connect_func=self._log_in, **options)  # type: ignore[no-untyped-call]
        self._where, self._refusals = where, refusals or Refusals()

    def _connect(self) -> socket.socket:
        connection = link.open_socket(self._where, float(self.socket_connect_timeout or CONNECT_S))
        connection.settimeout(self.socket_timeout)
        return connection

    def _log_in(self, _: Any) -> None:
        try:
            this: Any = self  # redis-py gives these no types
            this.on_connect()
            if self._where.mark is not None:
                this.send_command(*link.MARK, check_health=False)
                _check_mark(this.read_response(), self._where)
        except failures.RedisError as error:
            raise _of_login(error, self._where, self._refusals) from None

    def _host_error(self) -> str:
        return str(self._where.url)


class _AsyncStoreConnection(AsyncConnection):
    """To an embedded store at the address that `look` returns when the connection is opened."""

    def __init__(self, *, address: StoreLocation, look: Look, refusals: Refusals, **options: Any) -> None:
        super().__init__(redis_connect_func=self._log_in, **options)
        self._where: Where = address
        self._look, self._refusals = look, refusals

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            try:
                # In a thread: a shared file system may hang, and this event loop has other things to do.
                found = await asyncio.wrap_future(in_thread(self._look, "store.json"))
            except (NvrxError, msgspec.MsgspecError, ValueError) as error:
                raise failures.ConnectionError(f"store.json cannot be read: {error}") from None
            # Where there is no file, the address that this client was made with holds.
            self._where = found or self._where
            self.password = self._where.password
            if (path := link.socket_path(self._where)) is not None:
                with link.short_path(Path(path)) as short:
                    self._reader, self._writer = await asyncio.open_unix_connection(short)
                return
            host, port = link.host_and_port(self._where)
            streams = await asyncio.open_connection(host, port, ssl=link.tls_of(self._where))
            self._reader, self._writer = streams
            # Without TCP_NODELAY, which asyncio sets itself.
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def _log_in(self, _: Any) -> None:
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                await self.on_connect()
                if self._where.mark is not None:
                    await self.send_command(*link.MARK, check_health=False)
                    _check_mark(await self.read_response(), self._where)
        except failures.RedisError as error:
            raise _of_login(error, self._where, self._refusals) from None
        except TimeoutError:
            raise failures.TimeoutError(f"no answer to the login in {self.socket_connect_timeout:g} s") from None

    def _host_error(self) -> str:
        return str(self._where.url)


def _of_login(error: failures.RedisError, where: Where, refusals: Refusals) -> failures.RedisError:
    """What an error at the login means: nothing that a stranger on the port of a dead store says may end a job."""
    if where.mark is None or (isinstance(error, failures.AuthenticationError) and refusals.counts(where)):
        return error
    return failures.ConnectionError(f"the server that answers here has not proven to be this job's store: {error}")


def _check_mark(reply: Any, where: Where) -> None:
    if not isinstance(reply, list) or len(reply) != 2 or reply[1] != (where.mark or "").encode():
        raise failures.ConnectionError("the server that answers here is not this job's store")
