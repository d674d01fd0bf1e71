"""How every process of a job opens a connection to the job's embedded store, and knows that it is that store.

The URL in `store.json` says which of three ways it is:

- `unix:///…`: a socket in a folder that only the job's user can enter.
- `rediss://…`: TLS, and the server must show exactly the certificate that is in `store.json`.
- `redis://…`: neither. A client that has logged in asks the server for the mark that is in `store.json`. The Redis
  protocol has no proof by the server before the password is sent, so what makes this safe is that each start of the
  server has another port and another password: a stranger on the port of a dead server gets a password that opens
  nothing, and cannot know the mark of the next one.

Standard library only: workers import it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from ssl import SSLContext


# The command that asks for the mark. An embedded server replicates from no other, so this setting does nothing; like
# the password it is in no file and in no command line, and only a client that has logged in can read it.
MARK = ("CONFIG", "GET", "masterauth")

# How long a `redis://` server that has not proven itself may refuse the password before that counts: longer than
# a start of the real one takes.
REFUSED_S = 60.0

# X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python's `ssl` has no name for. A node whose clock is wrong still
# recognises the certificate, and one that is pinned does not grow old.
_NO_CHECK_TIME = 0x200000


class Where(Protocol):
    """What `store.json` says of the store."""

    @property
    def url(self) -> str: ...
    @property
    def password(self) -> str | None: ...
    @property
    def certificate(self) -> str | None: ...
    @property
    def mark(self) -> str | None: ...


def socket_path(where: Where) -> str | None:
    """Of a store that listens on a unix socket; else None."""
    parts = urlsplit(where.url)
    return unquote(parts.path) if parts.scheme == "unix" else None


def host_and_port(where: Where) -> tuple[str, int]:
    """Of a store that listens on a port."""
    parts = urlsplit(where.url)
    return parts.hostname or "127.0.0.1", parts.port or 6379


def tls_of(where: Where) -> SSLContext | None:
    """None where the store does without TLS."""
    return None if where.certificate is None else _pinned(where.certificate)


@functools.lru_cache(maxsize=4)
def _pinned(certificate: str) -> SSLContext:
    import ssl  # here: it takes 4 MB

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate is the whole list of what is trusted, and no authority: the server that shows it holds its key.
    # So the name in it says nothing more, and no name is compared.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    context.load_verify_locations(cadata=certificate)
    return context


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path to a unix socket, of a length that fits into its address (107 bytes). Raises OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def open_socket(
    where: Where, timeout_s: float, adopt: Callable[[socket.socket], None] | None = None
) -> socket.socket:
    """A connection on which nothing has been sent yet, but the handshake of TLS. `adopt` is given the socket as soon
    as it is connected, and the one with TLS before its handshake. Raises OSError."""
    path, address = socket_path(where), host_and_port(where)
    if path is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connection = socket.create_connection(address, timeout=timeout_s)
    try:
        connection.settimeout(timeout_s)
        if path is not None:
            with short_path(Path(path)) as short:
                connection.connect(short)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if adopt is not None:
            adopt(connection)
        if (context := tls_of(where)) is not None:
            connection = secured = context.wrap_socket(
                connection, server_hostname=address[0], do_handshake_on_connect=False
            )
            if adopt is not None:
                adopt(secured)
            secured.do_handshake()
    except BaseException:
        connection.close()
        raise
    return connection


class Refusals:
    """Whether a refused password counts, for the connections of one client. Not where the server has not proven
    itself: it may be a stranger, and the next look into `store.json` names another address. It counts once the same
    address has refused for `REFUSED_S`."""

    def __init__(self) -> None:
        self._first: tuple[str, float] | None = None

    def counts(self, where: Where) -> bool:
        """Call this when the server has refused the password."""
        if where.mark is None:
            return True
        now = time.monotonic()
        if self._first is None or self._first[0] != where.url:
            self._first = where.url, now
        return now - self._first[1] >= REFUSED_S
