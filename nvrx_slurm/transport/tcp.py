"""Sockets, without a thread or a loop between a caller and the kernel.

They do not block: what there is is taken at once, and `poll` waits for the rest, for it alone keeps a deadline over
interrupted system calls. Decision 0019 has what asyncio would cost here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nvrx_slurm.transport.errors import PayloadTimeout, PayloadTruncated, PeerReset, RingError, TransportError
from nvrx_slurm.transport.protocol import AdmissionCheck, AllInUse, Seen, ServerHandshake, address_of, host_and_port
from nvrx_slurm.util.admission import PROOF_S, Admission, RateLimitedLog
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import in_thread

SCHEME = "tcp"
PIECE_BYTES = 1 << 20  # the most that is received at once: it is still in the cache when its checksum is made
# The most that waits in the kernel for a peer on the same host: it is in the processor's cache still. What is right
# for the network, megabytes, makes 16 MiB take half as long again there.
NEAR_BYTES = 512 << 10
# So much is received with a frame: a small payload comes with its answer, and a request with the ack before it.
AHEAD_BYTES = 16 << 10
BACKLOG = 1024
LONGEST_WAIT_S = 1e6
EXHAUSTED_S = 0.1
_LOOPBACK = ("localhost", "::1")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = get_logger("transport")


class TcpLink:
    """One socket. `ahead`: what was read from it already, `AHEAD_BYTES` at most."""

    needs_checksum = True

    def __init__(self, connection: socket.socket, ahead: bytes = b"") -> None:
        connection.setblocking(False)
        # Nagle's algorithm would hold a request back until the peer's kernel has confirmed the Ack before it.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.getpeername()[0] == connection.getsockname()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES)
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        # Without the lock, `cut` could shut down a descriptor number that is in use again.
        self._guard = threading.Lock()
        self._is_closed = self._is_cut = False
        self._room = memoryview(bytearray(AHEAD_BYTES))
        self._room[: len(ahead)] = ahead
        self._ahead = self._room[: len(ahead)]

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        parts: list[bytes | memoryview] = [frame, payload.cast("B")] if payload else [frame]
        left = sum(map(len, parts))
        while True:
            try:
                # One system call for both parts: with TCP_NODELAY, two would send the frame in a packet of its own.
                sent = self._socket.sendmsg(parts) if len(parts) > 1 else self._socket.send(parts[0])
            except BlockingIOError:
                self._wait(self._writable, deadline, "the peer takes no more")
                continue
            except OSError as error:
                raise PeerReset(f"the connection broke while sending: {_reason(error)}") from None
            left -= sent
            if not left:
                return
            # What is left of the parts.
            rest: list[bytes | memoryview] = []
            for part in parts:
                rest += [memoryview(part)[sent:]] if sent < len(part) else []
                sent = max(sent - len(part), 0)
            parts = rest

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        size = len(buffer)
        while (have := len(self._ahead)) < size:
            # Receive behind what was received already: the room holds one frame and what came with it.
            self._room[:have] = self._ahead
            self._wait(self._readable, deadline, _silent(have, size))
            count = self._receive(self._room[have:], have, size, deadline)
            self._ahead = self._room[: have + count]
            if not count:
                raise PeerReset("the peer has closed the connection")
        self._take_ahead(buffer)

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        done, size = self._take_ahead(buffer), len(buffer)
        if seen is not None and done:
            seen(buffer[:done])
        while done < size:
            count = self._receive(buffer[done : done + PIECE_BYTES], done, size, deadline)
            if count == 0:
                raise PayloadTruncated("the peer has closed the connection before the payload")
            if seen is not None:
                seen(buffer[done : done + count])
            done += count
            if done < size and time.monotonic() >= deadline:
                raise PayloadTimeout(f"the peer has sent {done} of {size} bytes in time")

    def is_stale(self) -> bool:
        # The socket is readable at its end, or where the peer has sent unexpected bytes.
        return bool(self._ahead) or bool(self._readable.poll(0))

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
                # A shutdown ends the connection also where a forked child still holds the socket.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
                self._socket.close()

    def drop(self) -> None:
        # No shutdown: that would end the parent's connection, which is the same one.
        self._is_closed = True
        self._socket.close()

    def detach(self) -> socket.socket:
        """The socket, which is the caller's from now on; for the link it is as if closed."""
        with self._guard:
            self._is_closed = True
        return self._socket

    def _take_ahead(self, buffer: memoryview) -> int:
        """Take what was received already: how much of `buffer` it has filled."""
        if not self._ahead:
            return 0
        count = min(len(buffer), len(self._ahead))
        buffer[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return count

    def _receive(self, buffer: memoryview, done: int, size: int, deadline: float) -> int:
        """What there is, once there is something; 0 where the peer has closed the connection before the first byte.
        `done` of `size` bytes were there before."""
        while True:
            try:
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                self._wait(self._readable, deadline, _silent(done, size))
                continue
            except OSError as error:
                raise PeerReset(f"the connection broke after {done} of {size} bytes: {_reason(error)}") from None
            if count == 0 and self._is_cut:
                raise PeerReset("the connection was cut on this side")
            if count == 0 and done:
                raise PayloadTruncated(f"the peer has closed the connection after {done} of {size} bytes")
            return count

    def _wait(self, poll: select.poll, deadline: float, what: str) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(min(left_s, LONGEST_WAIT_S) * 1000):
            raise PayloadTimeout(what)


class _PendingConnection:
    """A connection in its handshake. `said`: bytes that have come, and the handshake has not taken yet."""

    def __init__(self, connection: socket.socket, source: str, handshake: ServerHandshake) -> None:
        self.connection, self.source, self.handshake = connection, source, handshake
        self.said = b""


class TcpListener:
    """A socket that listens, and one thread that accepts connections and serves their handshakes. Only a connection
    that has passed its handshake gets a thread: a flood costs `MOST_UNPROVEN` descriptors, and no thread."""

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        serve: Callable[[TcpLink, ServerHandshake | None], None],
        entry: AdmissionCheck | None,
    ) -> None:
        listening.setblocking(False)
        self._socket, self._serve, self._entry = listening, serve, entry
        self.address = address
        self._is_closed = threading.Event()
        self._pending: dict[int, _PendingConnection] = {}
        self._admission = Admission[int](within_s=PROOF_S if entry is None else entry.within_s)
        self._paused_until = 0.0
        self._rejections, self._exhausted = RateLimitedLog(_log.warning), RateLimitedLog(_log.warning)
        # Not epoll: a forked child would share its descriptor.
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"accept {self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._is_closed.is_set():
            self._is_closed.set()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            # The thread ends first: the number of a closed descriptor may soon belong to another file.
            self._thread.join()
            self._socket.close()

    def drop(self) -> None:
        self._is_closed.set()
        self._socket.close()
        for pending in self._pending.values():
            pending.connection.close()

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                now = time.monotonic()
                for descriptor in self._admission.overdue(now):
                    self._reject(descriptor, f"said nothing that proves it in {self._admission.within_s:g} s", now)
                # A pause where descriptors have run out, or where too many connections come.
                pause_s = max(self._paused_until - now, self._admission.wait_s(now))
                overdue_s = self._admission.overdue_in_s(now)
                waits = [each for each in (pause_s or None, overdue_s) if each is not None]
                # The end of the listening socket is reported in any case.
                self._poll.modify(self._socket, 0 if pause_s else select.POLLIN)
                for descriptor, _ in self._poll.poll(math.ceil(min(waits) * 1000) if waits else None):
                    if descriptor in self._pending:
                        self._go_on(descriptor)
                    elif not pause_s and not self._is_closed.is_set():
                        self._accept(time.monotonic())
        finally:
            for descriptor in list(self._pending):
                self._discard(descriptor)

    def _accept(self, now: float) -> None:
        try:
            connection, peer = self._socket.accept()
        except OSError as error:
            # Else the connection has gone already, or the listener was closed.
            if error.errno in _EXHAUSTED:
                self._exhausted.say(f"{self.address} cannot take a connection: {error.strerror}", now)
                self._paused_until = now + EXHAUSTED_S
                if (dropped := self._admission.shed(now)) is not None:
                    self._reject(dropped, "had to go for want of descriptors", now)
            return
        if self._entry is None:
            self._start(connection, b"", None)
            return
        connection.setblocking(False)
        descriptor, source = connection.fileno(), str(peer[0])
        dropped = self._admission.admit(descriptor, now, source)
        if dropped is not None:
            self._reject(dropped, f"was the oldest of {self._admission.most} that have proven nothing", now)
        self._pending[descriptor] = _PendingConnection(connection, source, self._entry.handshake())
        self._poll.register(connection, select.POLLIN)

    def _go_on(self, descriptor: int) -> None:
        """Pass on what was received to the handshake. Bytes behind the proof belong to the link."""
        pending = self._pending[descriptor]
        handshake = pending.handshake
        try:
            more = pending.connection.recv(AHEAD_BYTES - len(pending.said))
            pending.said += more
            while handshake.wants and len(pending.said) >= handshake.wants:
                frame, pending.said = pending.said[: handshake.wants], pending.said[handshake.wants :]
                answer = handshake.take(frame)
                # An answer is so short that it fits into the buffer of any socket whose peer reads.
                if pending.connection.send(answer) < len(answer):
                    raise PeerReset("it takes no answer")
        except BlockingIOError:
            return
        except (OSError, TransportError) as error:
            self._reject(descriptor, _reason(error), time.monotonic())
            return
        if handshake.is_passed:
            pending = self._pending.pop(descriptor)
            self._poll.unregister(descriptor)
            self._admission.proven(descriptor)
            self._start(pending.connection, pending.said, pending.handshake)
        elif not handshake.wants:
            self._reject(descriptor, "was turned away", time.monotonic())
        elif not more:
            self._discard(descriptor)

    def _reject(self, descriptor: int, why: str, now: float) -> None:
        pending = self._pending[descriptor]
        self._rejections.say(f"{self.address} has closed a connection from {pending.source}: it {why}", now)
        self._discard(descriptor)

    def _discard(self, descriptor: int) -> None:
        pending = self._pending.pop(descriptor)
        self._poll.unregister(descriptor)
        self._admission.gone(descriptor)
        # A shutdown ends the connection also where a forked child still holds the socket.
        with contextlib.suppress(OSError):
            pending.connection.shutdown(socket.SHUT_WR)
        pending.connection.close()

    def _start(self, connection: socket.socket, ahead: bytes, handshake: ServerHandshake | None) -> None:
        try:
            threading.Thread(
                target=self._serve_one, args=(connection, ahead, handshake), name=f"serve {self.address}", daemon=True
            ).start()
        except RuntimeError as error:  # no more threads
            self._exhausted.say(f"{self.address} turns a reader away: {error}", time.monotonic())
            connection.close()

    def _serve_one(self, connection: socket.socket, ahead: bytes, handshake: ServerHandshake | None) -> None:
        try:
            link = _linked(connection, ahead)
        except OSError:  # it has gone already
            return
        try:
            self._serve(link, handshake)
        finally:
            link.close()


class TcpBackend:
    """Default between nodes. `scheme`: another's, whose connections begin with one of these."""

    def __init__(self, scheme: str = SCHEME) -> None:
        self.scheme = scheme

    def connect(self, address: str, deadline: float) -> TcpLink:
        try:
            host, port = host_and_port(address)
        except ValueError as error:
            raise PeerReset(str(error)) from None
        fault: TransportError | None = None
        addresses = resolve(host, port, deadline)
        for tried, (family, where) in enumerate(addresses):
            # A silent address leaves the others their share of the time.
            now = time.monotonic()
            try:
                return _linked(_connected(family, where, now + (deadline - now) / (len(addresses) - tried)))
            except TimeoutError:
                fault = PayloadTimeout("nothing answers there")
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    raise AllInUse(f"no connection: {_exhausted(error)}") from None
                fault = PeerReset(f"no connection: {_reason(error)}")
        forget(host, port)
        raise fault or PeerReset(f"host {host} has no address")

    def listen(
        self, host: str, port: int, serve: Callable[[TcpLink], None], entry: AdmissionCheck | None = None
    ) -> TcpListener:
        return self.listen_behind(host, port, lambda link, _: serve(link), entry)

    def listen_behind(
        self,
        host: str,
        port: int,
        serve: Callable[[TcpLink, ServerHandshake | None], None],
        entry: AdmissionCheck | None,
    ) -> TcpListener:
        """As `listen`; `serve` also gets the handshake that the connection has passed."""
        try:
            if host in _LOOPBACK or host.startswith("127."):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            elif socket.has_dualstack_ipv6():
                # On all interfaces: a name may have addresses on several.
                family = socket.AF_INET6
                listening = socket.create_server(("", port), family=family, dualstack_ipv6=True, backlog=BACKLOG)
            else:
                listening = socket.create_server(("", port), backlog=BACKLOG)
        except OSError as error:
            raise RingError(f"cannot listen on {address_of(self.scheme, host, port)}: {_reason(error)}") from None
        return TcpListener(listening, address_of(self.scheme, host, listening.getsockname()[1]), serve, entry)


def _connected(family: socket.AddressFamily, where: tuple[Any, ...], deadline: float) -> socket.socket:
    """A socket that is connected to `where`. Raises OSError; TimeoutError is one."""
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


def _linked(connection: socket.socket, ahead: bytes = b"") -> TcpLink:
    """A link that takes the connection over, or closes it. Raises OSError where the peer has reset it already."""
    try:
        return TcpLink(connection, ahead)
    except BaseException:
        connection.close()
        raise


def _silent(done: int, size: int) -> str:
    return f"the peer has sent {done} of {size} bytes, and no more" if done else "the peer says nothing"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


KEPT_S = 300.0
MOST_HOSTS = 4096

Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # a family, and what its sockets connect to
_known: dict[tuple[str, int], tuple[float, list[Address]]] = {}
# Lookups that outlived their caller's deadline: the next caller waits for the same one.
_asked: dict[tuple[str, int], concurrent.futures.Future[list[Any]]] = {}


def resolve(host: str, port: int, deadline: float) -> list[Address]:
    """The addresses of a host, kept for a while. Raises PayloadTimeout, and PeerReset where it has none."""
    until, addresses = _known.get((host, port), (0.0, []))
    if time.monotonic() < until:
        return addresses
    if len(_asked) >= MOST_HOSTS:
        _asked.clear()
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        if _is_address(host):  # no name server is asked
            found = look_up()
        else:
            # In a thread: getaddrinfo(3) has no timeout of its own, and cannot be cancelled.
            lookup = _asked.get((host, port)) or in_thread(look_up, f"look up {host}")
            _asked[host, port] = lookup
            found = lookup.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        # A failed lookup of the system may raise TimeoutError, too. It has ended, so the next caller asks again.
        if lookup.done():
            _asked.pop((host, port), None)
        raise PayloadTimeout(f"the address of host {host} could not be found in time") from None
    except (OSError, UnicodeError) as error:
        _asked.pop((host, port), None)
        # EAGAIN: no thread can be started.
        if isinstance(error, OSError) and error.errno in (*_EXHAUSTED, errno.EAGAIN):
            raise AllInUse(f"host {host} cannot be looked up: {_exhausted(error)}") from None
        raise PeerReset(f"host {host} is not known here: {getattr(error, 'strerror', None) or error}") from None
    _asked.pop((host, port), None)
    if len(_known) >= MOST_HOSTS:
        _known.clear()
    addresses = [(family, address) for family, _, _, _, address in found]
    _known[host, port] = time.monotonic() + KEPT_S, addresses
    return addresses


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return True
    return False


def _exhausted(error: OSError) -> str:
    limit = ": close files, or raise `ulimit -n`" if error.errno == errno.EMFILE else ""
    return f"this process has no descriptor, thread or memory left ({error.strerror}){limit}"


def forget(host: str, port: int) -> None:
    """Forget a host's addresses. Nothing answers there: the name may be another machine's by now."""
    _known.pop((host, port), None)


# The threads that look up are not in the child.
os.register_at_fork(after_in_child=_asked.clear)
