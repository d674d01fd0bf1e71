"""Connections of threads to a Redis or Valkey server, with the retry policy of this package (`store/retry.py`).

`RedisSocket` is one connection: a socket, and hiredis to pack commands and to parse replies. `RetryingRedis` keeps
some of them, and asks again while the server is away.

redis-py, which asyncio's clients use (`store/redis_client.py`), takes 0.2 s and 22 MB to import, and it reconnects by
itself, where a wait that was cancelled must end. Workers and their monitors import this module instead.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from nvrx_slurm.errors import NvrxError, StoreUnreachable
from nvrx_slurm.store.link import MARK, Refusals, Where, open_socket
from nvrx_slurm.store.retry import IN_MEMORY, Cause, GiveUp, Retry, StoreRetry, code_of, is_away
from nvrx_slurm.util.redis_url import RedisUrl
from nvrx_slurm.util.threads import SignalSafeEvent, reset_after_fork

# How long a connection may take to open, login included.
CONNECT_S = 3.0

# How long a server may take for an answer, before it is asked again on a new connection.
ANSWER_S = 5.0

# How much later than `until` an answer is still taken.
LATE_S = 1.0

RECEIVE_BYTES = 64 << 10
_NOT_YET = object()

Command = Sequence[str | bytes | int]
# Reads where an embedded server is now: each start has another port and another password. Raises OSError.
Look = Callable[[], Where]


class AccessRefused(Exception):
    """The server refuses this client, or shows a certificate that this client does not trust. To ask again does not
    help."""


class CommandRefused(NvrxError):
    """The server refuses a command: it is wrong, or another server of its cluster holds the key."""


class ClientClosed(Exception):
    """The client was closed or cancelled."""


class RedisSocket:
    """One connection. One thread uses it; any other may cut it. It is opened when first used.

    `server`: a URL and its password, or a function that reads where an embedded server is now.
    """

    def __init__(self, server: tuple[RedisUrl, str | None] | Look, refusals: Refusals | None = None) -> None:
        self._server, self._refusals = server, refusals or Refusals()
        self._socket: socket.socket | None = None
        self._guard = threading.Lock()  # without it a cut could hit a descriptor number that is in use again
        self._is_cut = False

    def ask(self, commands: Sequence[Command], answer_s: float) -> list[Any]:
        """Send all, and return all replies. A reply that is an error is a `hiredis.ReplyError` in the list.

        Raises AccessRefused; OSError where no answer came within `answer_s`. After any exception the connection is
        closed, since an answer may still be under way.
        """
        try:
            deadline = time.monotonic() + answer_s
            if self._socket is None:
                self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
                until = min(deadline, time.monotonic() + CONNECT_S)
                if callable(self._server):
                    self._open_embedded(self._server(), until)
                else:
                    self._open_url(*self._server, until)
            return self._exchange(commands, deadline)
        except hiredis.ProtocolError as error:
            self.close()
            raise ConnectionError(f"the peer does not use the Redis protocol: {error}") from None
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """From any thread: a thread that waits here gets an OSError, and the connection cannot be opened again."""
        with self._guard:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, also where a forked child still holds its descriptor."""
        with self._guard:
            connection, self._socket = self._socket, None
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def _open_embedded(self, where: Where, deadline: float) -> None:
        open_socket(where, _left_s(deadline), self._adopt)
        if where.password is not None:
            [reply] = self._exchange([["AUTH", where.password]], deadline)
            if isinstance(reply, hiredis.ReplyError):
                # A refusal by a server that has not shown the mark may come from a stranger on the port of a dead
                # store. The next look at store.json names another address.
                if str(reply).startswith("WRONGPASS") and self._refusals.counts(where):
                    raise AccessRefused(f"{reply}; check its password")
                raise ConnectionError(f"the login was refused: {reply}")
        if where.mark is not None and self._exchange([MARK], deadline) != [[b"masterauth", where.mark.encode()]]:
            raise ConnectionError("the server that answers here is not this job's store")

    def _open_url(self, url: RedisUrl, password: str | None, deadline: float) -> None:
        if url.path:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._adopt(connection)
            connection.settimeout(_left_s(deadline))
            connection.connect(url.path)
        else:
            connection = socket.create_connection((url.host, url.port), timeout=_left_s(deadline))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._adopt(connection)
        if url.tls is not None:
            import ssl  # here: it takes 4 MB

            context = ssl.create_default_context(cafile=url.tls.get("ssl_ca_certs"))
            if url.tls.get("ssl_certfile"):
                context.load_cert_chain(url.tls["ssl_certfile"], url.tls.get("ssl_keyfile"))
            # The socket is adopted before its handshake: `cut` must be able to end one that hangs.
            secured = context.wrap_socket(connection, server_hostname=url.host, do_handshake_on_connect=False)
            self._adopt(secured)
            try:
                secured.do_handshake()
            except ssl.SSLCertVerificationError as error:
                raise AccessRefused(
                    f"its certificate is not trusted: {error}; name one with ?ssl_ca_certs="
                ) from None
        login: list[Command] = []
        if password is not None:
            login.append(["AUTH", *([url.username] if url.username else []), password])
        if url.database:
            login.append(["SELECT", url.database])
        for reply in self._exchange(login, deadline) if login else ():
            if isinstance(reply, hiredis.ReplyError):
                if is_away(reply):  # it has too many clients, for example
                    raise ConnectionError(f"the login was refused: {reply}")
                raise AccessRefused(f"{reply}; check its password, and what its user may do")

    def _adopt(self, connection: socket.socket) -> None:
        # Under the guard: a `cut` either finds this socket, or is found here.
        with self._guard:
            self._socket = connection
            if self._is_cut:
                raise ConnectionAbortedError("the connection was cut")

    def _exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        connection = self._socket
        assert connection is not None
        connection.settimeout(_left_s(deadline))
        # hiredis' stub knows one word only.
        connection.sendall(b"".join(hiredis.pack_command(tuple(each)) for each in commands))  # type: ignore[arg-type]
        replies: list[Any] = []
        while len(replies) < len(commands):
            if (reply := self._reader.gets()) is not _NOT_YET:
                replies.append(reply)
                continue
            connection.settimeout(_left_s(deadline))
            if not (data := connection.recv(RECEIVE_BYTES)):
                raise ConnectionResetError("the server has closed the connection")
            self._reader.feed(data)
        return replies


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)  # 0 would make the socket non-blocking


class RetryingRedis:
    """A client of one server for any number of threads: each call has a connection of its own. A forked child opens
    its own connections.

    `server`: as of `RedisSocket`; `where`: how messages name it. With a function the server is embedded: this package
    started it, and may change its configuration. `patience_s`: for how long in a row it may be away. `log`: says
    that the server is away, and that it answers again. `expected`: text of an error reply that is returned to the
    caller. `asked_again`: the last call sent its commands more than once, and the server may have carried out each.
    """

    def __init__(
        self,
        server: tuple[RedisUrl, str | None] | Look,
        where: str,
        *,
        patience_s: float,
        log: logging.Logger,
        answer_s: float | None = None,
        expected: str | None = None,
    ) -> None:
        self._server, self._where, self._embedded = server, where, callable(server)
        self._patience_s, self._answer_s, self._expected = patience_s, answer_s, expected
        self._log = log
        self._refusals = Refusals()
        self._idle: list[RedisSocket] = []
        self._busy: set[RedisSocket] = set()
        self._closed = SignalSafeEvent()
        self.asked_again = False
        reset_after_fork(self, RetryingRedis._after_fork)

    def retry(self, began: float | None = None) -> StoreRetry:
        """For calls that share one patience, which counts from `began`, or from the first failure."""
        return StoreRetry(self._where, self._patience_s, embedded=self._embedded, began=began)

    def ask(
        self, *commands: Command, wait_s: float = 0.0, until: float = math.inf, retry: StoreRetry | None = None
    ) -> list[Any]:
        """Send all at once, until the server answers: all replies. `wait_s`: how long the commands let the server
        wait before it answers.

        Raises TimeoutError at `until` (of `time.monotonic()`); StoreUnreachable where the server is away for longer
        than the patience, or refuses this client; CommandRefused; ClientClosed.
        """
        retry, self.asked_again = retry or self.retry(), False
        while not self._closed.is_set():
            # The server may let a blocking command wait for `wait_s`; its answer is late only after that.
            due = time.monotonic() + wait_s
            answer_s = ANSWER_S if self._answer_s is None else self._answer_s
            deadline = min(due + answer_s, max(due, until) + LATE_S)
            try:
                replies = self._exchange(commands, deadline)
                refusal = next(
                    (
                        each
                        for each in replies
                        if isinstance(each, hiredis.ReplyError)
                        and not (self._expected and self._expected in str(each))
                    ),
                    None,
                )
                if refusal is not None:
                    raise refusal
            except AccessRefused as error:
                # One that is open is served on, where the store took another password after the login.
                # Without a code its certificate was refused, and no connection that is open makes that one trusted.
                if not (self._idle or self._busy) or code_of(error) is None:
                    raise StoreUnreachable(f"the store at {self._where} refuses us: {error}", refused=True) from None
                self._wait(retry.failed(error, time.monotonic(), served=True), until)
            except (hiredis.ReplyError, OSError) as error:
                if self._closed.is_set():  # by `cancel`, which cut this connection
                    break
                self._wait(retry.failed(error, time.monotonic()), until)
                # The server may have carried the commands out before the connection broke.
                self.asked_again = True
            else:
                if message := retry.answered(time.monotonic()):
                    self._log.info("%s", message)
                return replies
            if time.monotonic() >= until:
                raise TimeoutError
        raise ClientClosed

    def close(self) -> None:
        """Any number of times. A call that waits for an answer gets it."""
        self._closed.set()
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().close()

    def cancel(self) -> None:
        """From any thread: as `close`; a call that waits for an answer raises ClientClosed at once."""
        self._closed.set()
        # A copy: each thread whose connection is cut takes it out of `_busy` meanwhile.
        for connection in list(self._busy):
            connection.cut()

    def _wait(self, decision: Retry | GiveUp, until: float) -> None:
        if isinstance(decision, GiveUp):
            if decision.cause is Cause.COMMAND:
                raise CommandRefused(decision.message) from None
            raise decision.unreachable() from None
        if decision.warning:
            self._log.warning("%s", decision.warning)
        if decision.reconfigure:
            with contextlib.suppress(OSError, AccessRefused):  # the next answer shows how the server is
                self._exchange([IN_MEMORY], time.monotonic() + ANSWER_S)
        if decision.reconnect:
            while self._idle:
                with contextlib.suppress(IndexError):
                    self._idle.pop().close()
        self._closed.wait(max(0.0, min(decision.pause_s, until - time.monotonic())))

    def _exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = RedisSocket(self._server, self._refusals)
        self._busy.add(connection)
        try:
            # After the entry in `_busy`: a `cancel` meanwhile has either cut this connection, or is seen here.
            if self._closed.is_set():
                raise ConnectionAbortedError("the client was closed")
            replies = connection.ask(commands, deadline - time.monotonic())
        finally:
            self._busy.discard(connection)
        self._idle.append(connection)
        # `close` may have emptied `_idle` just before this connection came back to it.
        if self._closed.is_set():
            self.close()
        return replies

    def _after_fork(self) -> None:
        """The connections are the parent's. So are the locks: a thread that does not exist here may hold them."""
        is_closed = self._closed.is_set()
        self._idle, self._busy, self._closed = [], set(), SignalSafeEvent()
        if is_closed:
            self._closed.set()
