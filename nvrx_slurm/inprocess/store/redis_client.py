"""A connection to a Redis or Valkey server that waits while the server restarts, and asks again.

`RedisSocket` is one connection: a socket, and hiredis to pack commands and to parse replies. `RetryingRedis` carries
out the retry policy that every client in this package shares (`nvrx_slurm/store/retry.py`).

Not redis-py, which the other processes use (`nvrx_slurm/store/redis_client.py`): its import takes 0.2 s and 22 MB, in
each rank's monitor too, and it reconnects by itself, where a wait that was cancelled must end.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis

from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store.port import Cancelled
from nvrx_slurm.store.link import MARK, Refusals, Where, open_socket
from nvrx_slurm.store.retry import IN_MEMORY, GiveUp, StoreRetry
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.redis_url import PASSWORD_IN_URL, bad_option

if TYPE_CHECKING:
    from ssl import SSLContext


RECEIVE_BYTES = 64 << 10
_NOT_YET = object()

Command = Sequence[str | bytes | int]


class RedisRefusal(Exception):
    """The server will have nothing of us, or we of it, and there is no use in asking again. What it says of it."""

    @classmethod
    def by(cls, reply: hiredis.ReplyError) -> RedisRefusal:
        return cls(f"refuses us: {reply}; check its password, and what its user may do")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A server. `where` is its URL, for people: without the password. `look`: reads where an embedded server is now,
    for each connection; of the other fields only `where` counts then. Raises OSError."""

    where: str
    host: str = ""
    port: int = 0
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: tuple[tuple[str, str], ...] | None = None
    look: Callable[[], Where] | None = None


def parse_address(url: str, password: str | None) -> RedisAddress:
    """`redis://[user@]host[:port][/database]`, or `rediss://…` with `redis_url.URL_OPTIONS`.

    Raises OptionError, which does not repeat the URL: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        port, database = parts.port or 6379, int(parts.path.strip("/") or 0)
    except ValueError:
        parts, port, database = urlsplit(""), 0, 0
    options = tuple(parse_qsl(parts.query))
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise OptionError("RedisStore: url must look like redis://host:6379/0 or rediss://host:6379/0")
    fault = bad_option(parts.query, is_tls=parts.scheme == "rediss")
    if parts.password is not None or fault == PASSWORD_IN_URL:
        raise OptionError(f"RedisStore: url {PASSWORD_IN_URL}, since messages show it; name a password_file")
    if fault is not None:
        raise OptionError(f"RedisStore: url {fault}")
    username = unquote(parts.username) if parts.username else None
    tls = options if parts.scheme == "rediss" else None
    return RedisAddress(url, parts.hostname, port, database, username, password, tls)


class RedisSocket:
    """A connection that one thread uses, and any other may cut. It is opened when first used."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._refusals = Refusals()
        self._socket: socket.socket | None = None
        # Or a cut could hit a descriptor that has another owner by then.
        self._guard = threading.Lock()
        self._is_cut = False

    def ask(self, commands: Sequence[Command], answer_s: float) -> list[Any]:
        """Send all, and return all replies, a `hiredis.ReplyError` among them where one was refused.

        Raises OSError where there was no answer within `answer_s`, RedisRefusal, or what a signal's handler raises;
        then the connection is closed, for an answer may still be under way.
        """
        try:
            if self._socket is None:
                self._open(answer_s)
            return self._exchange(commands, answer_s)
        except hiredis.ProtocolError as error:
            self.close()
            raise ConnectionError(f"no Redis: {error}") from None
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """From any thread: the thread that waits here is woken, and the connection is not opened again."""
        with self._guard:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, also where a forked child still holds it."""
        with self._guard:
            connection, self._socket = self._socket, None
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def _open(self, answer_s: float) -> None:
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        if self._address.look is not None:
            self._open_embedded(self._address.look(), answer_s)
            return
        connection = socket.create_connection((self._address.host, self._address.port), timeout=answer_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._adopt(connection)
        if self._address.tls is not None:
            options = dict(self._address.tls)
            secured = _context(options).wrap_socket(
                connection, server_hostname=self._address.host, do_handshake_on_connect=False
            )
            self._adopt(secured)
            try:
                secured.do_handshake()
            except ValueError as error:
                # A certificate that does not verify is one, and stays so.
                raise RedisRefusal(
                    f"has no certificate that we trust: {error}; name one with ?ssl_ca_certs="
                ) from None
        commands: list[Command] = []
        if self._address.password is not None:
            user = [self._address.username] if self._address.username else []
            commands.append(["AUTH", *user, self._address.password])
        if self._address.database:
            commands.append(["SELECT", self._address.database])
        for reply in self._exchange(commands, answer_s) if commands else ():
            if isinstance(reply, hiredis.ReplyError):
                raise RedisRefusal.by(reply)

    def _open_embedded(self, where: Where, answer_s: float) -> None:
        open_socket(where, answer_s, self._adopt)
        commands: list[Command] = [] if where.password is None else [["AUTH", where.password]]
        for reply in self._exchange(commands, answer_s) if commands else ():
            if isinstance(reply, hiredis.ReplyError):
                if str(reply).startswith("WRONGPASS") and self._refusals.counts(where):
                    raise RedisRefusal.by(reply)
                raise ConnectionError(f"the login was refused: {reply}")
        if where.mark is not None and self._exchange([MARK], answer_s) != [[b"masterauth", where.mark.encode()]]:
            raise ConnectionError("the server that answers here is not this job's store")

    def _adopt(self, connection: socket.socket) -> None:
        with self._guard:
            self._socket = connection
            if self._is_cut:
                raise ConnectionAbortedError("it was cut")

    def _exchange(self, commands: Sequence[Command], answer_s: float) -> list[Any]:
        connection, deadline = self._socket, time.monotonic() + answer_s
        assert connection is not None
        connection.settimeout(answer_s)
        connection.sendall(b"".join(map(_pack, commands)))
        replies: list[Any] = []
        while len(replies) < len(commands):
            if (reply := self._reader.gets()) is not _NOT_YET:
                replies.append(reply)
                continue
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (data := connection.recv(RECEIVE_BYTES)):
                raise ConnectionResetError("the server has closed the connection")
            self._reader.feed(data)
        return replies


def _pack(command: Command) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub knows one word only
    return packed


def _context(options: dict[str, str]) -> SSLContext:
    """Raises OSError where a file cannot be read."""
    import ssl  # here: it takes 4 MB

    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    return context


log = get_logger("inprocess")

ANSWER_S = 5.0
"""How long a server may take for an answer, before it is asked again on a new connection."""

PLACE_IS_TAKEN = "ID specified in XADD is equal or smaller"


class RetryingRedis:
    """One thread's connection. `embedded`: this package has started the server for these ranks or this job, and may
    change its configuration. `asked_again`: the last answer took more than one request, and an earlier one may have
    been carried out as well."""

    def __init__(self, address: RedisAddress, *, patience_s: float, embedded: bool = False) -> None:
        self._where, self._patience_s, self._embedded = address.where, patience_s, embedded
        self._line = RedisSocket(address)
        self._cancelled = threading.Event()
        self.asked_again = False

    def cancel(self) -> None:
        """From any thread: the thread that asks stops waiting, for good."""
        self._cancelled.set()
        self._line.cut()

    def close(self) -> None:
        self._line.close()

    def ask(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """Send all in one go, until the server answers: all replies. An error among them is one of a place that is
        taken. `wait_s`: how long the answer itself may take.

        Raises Cancelled; StoreError where it has not answered for the patience, refuses us, or refuses a command.
        """
        answer_s = min(ANSWER_S, self._patience_s)
        retry = StoreRetry(self._where, self._patience_s, embedded=self._embedded)
        self.asked_again = False
        while not self._cancelled.is_set():
            try:
                replies = self._line.ask(commands, wait_s + answer_s)
            except RedisRefusal as error:
                raise StoreError(f"the store at {self._where} {error}") from None
            except OSError as error:
                self._wait(retry, error)
                continue
            if (refusal := _refusal(replies)) is not None:
                self._wait(retry, refusal)
                continue
            if message := retry.answered(time.monotonic()):
                log.info("%s", message)
            return replies
        raise Cancelled

    def _wait(self, retry: StoreRetry, error: Exception) -> None:
        """Until it is worth asking again. Raises StoreError where it is not."""
        decision = retry.failed(error, time.monotonic())
        if self._cancelled.is_set():
            # The error is that of a line which was cut.
            return
        if isinstance(decision, GiveUp):
            raise StoreError(decision.message) from None
        if decision.warning:
            log.warning("%s", decision.warning)
        if decision.reconfigure:
            with contextlib.suppress(OSError, RedisRefusal):
                # The next answer says how the server is.
                self._line.ask([IN_MEMORY], ANSWER_S)
        if decision.reconnect:
            self._line.close()
        self.asked_again = True
        self._cancelled.wait(decision.pause_s)


def _refusal(replies: list[Any]) -> Exception | None:
    """The first error among the replies. A place that is taken is none."""
    errors = (reply for reply in replies if isinstance(reply, hiredis.ReplyError))
    return next((error for error in errors if PLACE_IS_TAKEN not in str(error)), None)
