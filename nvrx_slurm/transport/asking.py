"""Asking a Redis or Valkey that may be restarted meanwhile: it is waited for, and asked again."""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from nvrx_slurm.errors import StoreUnreachable, UsageError
from nvrx_slurm.store.job_store import JobStore
from nvrx_slurm.store.retry import IN_MEMORY, Cause, GiveUp, Retry, StoreRetry
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.store_link import PASSWORD_IN_URL, Refusals, bad_option
from nvrx_slurm.util.threads import SignalSafeEvent

log = get_logger("transport")

ANSWER_S = 5.0
"""How long a server may take for an answer, before it is asked again on a new connection."""

CONNECT_S = 2.0
"""How long it may take for each step of a connection, and be silent in the middle of an answer."""

LATE_S = 1.0
"""How much later than when it was to come an answer is still taken, by who can wait no longer."""

Command = Sequence[str | bytes | int]

_askers: weakref.WeakSet[Asker] = weakref.WeakSet()


class Asker:
    """Connections to one server, one for each thread that asks at the moment; a forked child gets its own.
    `look`: reads where the job's embedded store is now, for each connection; then `url` and `password` are not used,
    and the server's configuration may be changed, since it serves this job alone.

    Raises UsageError for a URL that is none.
    """

    def __init__(
        self, url: str, password: str | None, *, patience_s: float, look: Callable[[], JobStore] | None = None
    ) -> None:
        self._where, self._patience_s = url, patience_s
        self._look, self._embedded = look, look is not None
        self._options: dict[str, Any] = {}
        if look is None:
            self._options = _options(url) | ({} if password is None else {"password": password})
        self._refusals = Refusals()
        self._idle: list[Any] = []  # redis-py's connections; half of what they do has no types
        self._closed = SignalSafeEvent()
        _askers.add(self)

    def patience(self) -> StoreRetry:
        """For one reader, whose calls share it."""
        return StoreRetry(self._where, self._patience_s, embedded=self._embedded)

    def ask(
        self,
        *commands: Command,
        wait_s: float = 0.0,
        until: float = math.inf,
        patience: StoreRetry | None = None,
    ) -> list[Any]:
        """Send all in one go, until the server answers: all replies. `wait_s`: how long it is asked to wait with one.

        Raises TimeoutError once `until` has passed without any; StoreUnreachable where the server has not answered
        for the patience, or refuses us; TransportError where it refuses a command; UsageError after `close`.
        """
        from redis import exceptions as failures

        retry = patience or self.patience()
        while not self._closed.is_set():
            due = time.monotonic() + wait_s
            try:
                replies = self._exchange(commands, min(due + ANSWER_S, max(due, until) + LATE_S))
            except (failures.RedisError, OSError) as error:
                self._wait(retry.failed(error, time.monotonic()), until)
            else:
                if message := retry.answered(time.monotonic()):
                    log.info("%s", message)
                return replies
            if time.monotonic() >= until:
                raise TimeoutError
        raise UsageError("this Directory is closed")

    def close(self) -> None:
        """Idempotent. Who waits for an answer goes on as soon as that has come."""
        self._closed.set()
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().disconnect()

    # ---- how

    def _wait(self, decision: Retry | GiveUp, until: float) -> None:
        if isinstance(decision, GiveUp):
            if decision.cause is Cause.COMMAND:
                raise TransportError(decision.message) from None
            raise StoreUnreachable(decision.message, refused=decision.cause is Cause.ACCESS) from None
        if decision.warning:
            log.warning("%s", decision.warning)
        if decision.reconfigure:
            from redis.exceptions import RedisError

            with contextlib.suppress(RedisError, OSError):  # the next answer says how the server is
                self._exchange([IN_MEMORY], time.monotonic() + ANSWER_S)
        self._closed.wait(max(0.0, min(decision.pause_s, until - time.monotonic())))

    def _exchange(self, commands: Sequence[Command], until: float) -> list[Any]:
        connection = self._connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            replies = [_reply(connection, until) for _ in commands]
        except BaseException:  # an answer may still be under way
            connection.disconnect()
            raise
        self._idle.append(connection)
        if self._closed.is_set():
            self.close()
        return replies

    def _connection(self) -> Any:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        from redis.backoff import NoBackoff
        from redis.connection import Connection
        from redis.retry import Retry

        options: dict[str, Any] = {
            **self._options,
            "socket_timeout": CONNECT_S,
            "socket_connect_timeout": CONNECT_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if self._look is not None:
            from nvrx_slurm.store.redis_client import StoreConnection

            return StoreConnection(where=self._look(), refusals=self._refusals, **options)
        return options.pop("connection_class", Connection)(**options)

    def _after_fork(self) -> None:
        """The connections are the parent's. So are the locks: a thread that is not here may hold them."""
        closed = self._closed.is_set()
        self._idle, self._closed = [], SignalSafeEvent()
        if closed:
            self._closed.set()


def _reply(connection: Any, until: float) -> Any:
    if not connection.can_read(max(0.0, until - time.monotonic())):
        raise ConnectionError("no answer in time")
    return connection.read_response()


def _options(url: str) -> dict[str, Any]:
    """What redis-py makes a connection of. The messages do not repeat the URL: it may hold a password."""
    from redis import connection

    parse_url: Any = connection.parse_url
    try:
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError:
        raise UsageError("Directory: url must look like redis://host:6379/0 or rediss://host:6379/0") from None
    fault = bad_option(urlsplit(url).query, is_tls=url.startswith("rediss:"))
    if "password" in options or fault == PASSWORD_IN_URL:
        raise UsageError(f"Directory: url {PASSWORD_IN_URL}, since messages show it; name a password_file")
    if fault is not None:
        raise UsageError(f"Directory: url {fault}")
    return options


def _forget() -> None:
    for asker in list(_askers):
        asker._after_fork()


os.register_at_fork(after_in_child=_forget)
