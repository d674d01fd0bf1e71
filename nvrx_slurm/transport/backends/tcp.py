"""Sockets, without a thread or a loop between a caller and the kernel.

They do not block: what there is is taken at once, and `poll` waits for the rest, for it alone keeps a deadline over
interrupted system calls. Decision 0019 has what asyncio would cost here.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from nvrx_slurm.log import get_logger
from nvrx_slurm.transport.backends.naming import forget, resolve
from nvrx_slurm.transport.backends.port import Link, Seen, address_of, host_and_port
from nvrx_slurm.transport.errors import PayloadTimeout, PayloadTruncated, PeerReset, RingError, TransportError

SCHEME = "tcp"
PIECE_BYTES = 1 << 20
"""The most that is received at once: it is still in the cache when its checksum is made."""

BACKLOG = 1024
LONGEST_WAIT_S = 1e6
EXHAUSTED_S = 0.1
_LOOPBACK = ("localhost", "::1")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = get_logger("transport")


class TcpLink:
    """One socket."""

    needs_checksum = True

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._guard = threading.Lock()  # or a cut could hit a descriptor that belongs to somebody else by then
        self._is_closed = self._is_cut = False

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        parts = [memoryview(frame), payload.cast("B")] if payload else [memoryview(frame)]
        while parts:
            try:
                sent = self._socket.sendmsg(parts) if payload else self._socket.send(parts[0])
            except BlockingIOError:
                self._wait(self._writable, deadline, "the peer takes no more")
            except OSError as error:
                raise PeerReset(f"the connection broke while sending: {_reason(error)}") from None
            else:
                parts = _rest(parts, sent)

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        self._wait(self._readable, deadline, "the peer says nothing")
        if self._fill(buffer, deadline, None) == 0:
            raise PeerReset("the peer has closed the connection")

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        if self._fill(buffer, deadline, seen) == 0:
            raise PayloadTruncated("the peer has closed the connection before the payload")

    def is_stale(self) -> bool:
        return bool(self._readable.poll(0))  # its end, or what nobody asked for

    def cut(self) -> None:
        with self._guard:
            if not self._is_closed:
                self._is_cut = True
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._guard:
            if not self._is_closed:
                self._is_closed = True
                with contextlib.suppress(OSError):  # also where a forked child still holds it
                    self._socket.shutdown(socket.SHUT_WR)
                self._socket.close()

    def drop(self) -> None:
        self._is_closed = True
        self._socket.close()

    def _fill(self, buffer: memoryview, deadline: float, seen: Seen | None) -> int:
        """All of it, or 0 where the peer has closed the connection before the first byte."""
        done, size = 0, len(buffer)
        while done < size:
            try:
                count = self._socket.recv_into(buffer[done : done + PIECE_BYTES])
            except BlockingIOError:
                self._wait(self._readable, deadline, f"the peer has sent {done} of {size} bytes, and no more")
                continue
            except OSError as error:
                raise PeerReset(f"the connection broke after {done} of {size} bytes: {_reason(error)}") from None
            if count == 0:
                if self._is_cut:
                    raise PeerReset("the connection was cut on this side")
                if done == 0:
                    return 0
                raise PayloadTruncated(f"the peer has closed the connection after {done} of {size} bytes")
            if seen is not None:
                seen(buffer[done : done + count])
            done += count
            if time.monotonic() >= deadline and done < size:
                raise PayloadTimeout(f"the peer has sent {done} of {size} bytes in time")
        return done

    def _wait(self, poll: select.poll, deadline: float, what: str) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(min(left_s, LONGEST_WAIT_S) * 1000):
            raise PayloadTimeout(what)


class TcpListener:
    """A socket that listens, and the thread that accepts."""

    def __init__(self, listening: socket.socket, host: str, serve: Callable[[Link], None]) -> None:
        self._socket, self._serve = listening, serve
        self.address = address_of(SCHEME, host, listening.getsockname()[1])
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name=f"accept {self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._is_closed.is_set():
            self._is_closed.set()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
            self._socket.close()

    def drop(self) -> None:
        self._is_closed.set()
        self._socket.close()

    def _accept_all(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.warning("%s cannot take a connection: %s", self.address, error.strerror)
                    self._is_closed.wait(EXHAUSTED_S)
                continue  # or one that has gone already, or the end
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        try:
            threading.Thread(target=self._run, args=(connection,), name=f"serve {self.address}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            _log.warning("%s turns a reader away: %s", self.address, error)
            connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            link = TcpLink(connection)
        except OSError:  # it has gone already
            connection.close()
            return
        try:
            self._serve(link)
        finally:
            link.close()


class TcpBackend:
    """Default between nodes."""

    scheme = SCHEME

    def connect(self, address: str, deadline: float) -> Link:
        try:
            host, port = host_and_port(address)
        except ValueError as error:
            raise PeerReset(str(error)) from None
        fault: TransportError | None = None
        addresses = resolve(host, port, deadline)
        for tried, (family, where) in enumerate(addresses):
            now = time.monotonic()  # a silent one leaves the others their share
            try:
                return TcpLink(_connected(family, where, now + (deadline - now) / (len(addresses) - tried)))
            except TimeoutError:
                fault = PayloadTimeout("nobody answers there")
            except OSError as error:
                fault = PeerReset(f"no connection: {_reason(error)}")
        forget(host, port)
        raise fault or PeerReset(f"host {host} has no address")

    def listen(self, host: str, port: int, serve: Callable[[Link], None]) -> TcpListener:
        try:
            listening = _listening_socket(host, port)
        except OSError as error:
            raise RingError(f"cannot listen on {address_of(SCHEME, host, port)}: {_reason(error)}") from None
        return TcpListener(listening, host, serve)


def _connected(family: socket.AddressFamily, where: tuple[Any, ...], deadline: float) -> socket.socket:
    """Raises OSError; TimeoutError is one."""
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(min(left_s, LONGEST_WAIT_S))
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection


def _listening_socket(host: str, port: int) -> socket.socket:
    """On the loopback alone where that is what peers are told; else on all interfaces, since a name may have
    several."""
    if host in _LOOPBACK or host.startswith("127."):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    while parts and sent >= len(parts[0]):
        sent -= len(parts.pop(0))
    if sent:
        parts[0] = parts[0][sent:]
    return parts


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
