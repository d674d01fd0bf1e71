"""The liveness connection: one authenticated TCP connection from each agent to the controller.

    controller → agent   32 bytes of nonce
    agent → controller   2 bytes of length, then `Hello` with a nonce of its own and the agent's proof
    controller → agent   32 bytes: the controller's proof, which accepts the agent

Both proofs are HMAC-SHA256 under a key that is derived from the job's, over both nonces, the agent's names, and the
port at which the agent believes the controller to be: a process that has taken another port cannot pass them on. The
agent believes nothing before the controller's proof. Afterwards each word is one byte and 16 bytes of MAC, under a
key of this connection and direction, over the word and its number: a host between the two can neither forge nor
repeat one.

    agent → controller   b"a"           alive: sent only while its heartbeats do not reach the store
    agent → controller   b"."           about to leave in good order: what follows is no death
    controller → agent   b"x"           you are fenced: kill your workers, and join again

Otherwise neither sends. When the agent dies its kernel closes the connection, and the controller knows within a round
trip. The agent's supervisor holds the connection too, so it breaks only when the node's last worker is dead. The
agent's kernel probes the connection (TCP keepalive), so the agent knows when it last reached the controller's host.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.records import Record
from nvrx_slurm.util.admission import PROOF_S, Admission, RateLimitedLog
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.job_key import NONCE_BYTES, PROOF_BYTES, SIGNATURE_BYTES, JobKey, is_proof, proof
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.tasks import start

log = get_logger("liveness")

# How long an agent gives a controller for its proof. Under a flood of connections the controller takes the agent out
# of its kernel's queue late: 4,096 wait there, and 64 each 50 ms are worked off.
HANDSHAKE_S = 10.0

ALIVE = b"a"
FENCED = b"x"
GOODBYE = b"."
BACKLOG = 4096
# Between them the event loop reads what those that were accepted before have sent.
ACCEPTS_AT_ONCE = 16

# How long the controller waits before it accepts again, once accept(2) has failed (EMFILE, ENFILE, ENOBUFS).
NO_DESCRIPTOR_S = 0.25

# Of `tcpi_last_ack_recv`, milliseconds, in `struct tcp_info` (linux/tcp.h): eight bytes, then twelve 32-bit
# numbers.
_LAST_ACK_OFFSET = 56

_LENGTH_BYTES = 2
_MOST_HELLO_BYTES = 4096
_WORD_BYTES = 1 + SIGNATURE_BYTES
# Labels of this protocol's keys. An agent and a controller of different versions derive the same keys, so they stay.
_KEY, _AGENT, _CONTROLLER = "tether", "tether agent", "tether controller"


class UnprovenPeer(ConnectionAbortedError):
    """The other end does not prove that it holds the job's key."""


class Hello(Record, frozen=True, kw_only=True):
    """Who holds the agent's end."""

    node: str
    incarnation: str
    nonce: bytes
    mac: bytes


_unpack_hello = msgspec.msgpack.Decoder(Hello)


class Session:
    """The words on one proven connection, seen from the end of `role`."""

    def __init__(self, key: bytes, role: str, parts: tuple[bytes, ...]) -> None:
        other = _CONTROLLER if role == _AGENT else _AGENT
        self._put_key, self._take_key = (proof(key, f"{each} words", *parts) for each in (role, other))
        self._put, self._taken = 0, 0
        self._unread = b""

    def put(self, word: bytes) -> bytes:
        """The bytes to send for a word. Words must arrive in the order of these calls."""
        self._put += 1
        return word + self._mac(self._put_key, word, self._put)

    def take(self, data: bytes) -> bytes:
        """The words that are whole with these bytes. Raises UnprovenPeer for one that the other end has not sent."""
        self._unread += data
        words = b""
        while len(self._unread) >= _WORD_BYTES:
            word, mac = self._unread[:1], self._unread[1:_WORD_BYTES]
            self._unread = self._unread[_WORD_BYTES:]
            self._taken += 1
            if not is_proof(self._mac(self._take_key, word, self._taken), mac):
                raise UnprovenPeer("a word on the connection is not the other end's: it was tampered with")
            words += word
        return words

    @staticmethod
    def _mac(key: bytes, word: bytes, number: int) -> bytes:
        return proof(key, "word", word, number.to_bytes(8, "big"))[:SIGNATURE_BYTES]


def _parts(nonce: bytes, agents: bytes, node: str, incarnation: str, port: int) -> tuple[bytes, ...]:
    """What both ends agree on."""
    return nonce, agents, node.encode(), incarnation.encode(), str(port).encode()


def address_towards(host: str) -> str:
    """This host's address on the way to `host`: one at which its neighbours there can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; it only asks the routing table
        return str(probe.getsockname()[0])


def silence_s(connection: socket.socket) -> float:
    """Seconds since the peer's kernel last answered on the connection. Raises OSError if it is closed."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_OFFSET + 4)
    return int.from_bytes(info[_LAST_ACK_OFFSET:], sys.byteorder) / 1000


class Stream(Protocol):
    """An open connection, to either end."""

    async def receive(self, most: int) -> bytes:
        """At least one byte; none, when the other end has closed it. Raises OSError."""
        ...

    async def send(self, data: bytes) -> None:
        """All of it. Raises OSError."""
        ...


async def introduce(stream: Stream, *, token: str, node: str, incarnation: str, port: int) -> Session:
    """Prove to the controller which agent this is, and have it prove itself. `port`: where the agent has connected
    to. Raises OSError where it closes the connection; UnprovenPeer where it is no controller of this job."""
    nonce, own = await _exactly(stream, NONCE_BYTES), os.urandom(NONCE_BYTES)
    key, parts = JobKey(token).derive(_KEY), _parts(nonce, own, node, incarnation, port)
    hello = Hello(node=node, incarnation=incarnation, nonce=own, mac=proof(key, _AGENT, *parts))
    packed = msgspec.msgpack.encode(hello)
    await stream.send(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)
    if not is_proof(proof(key, _CONTROLLER, *parts), await _exactly(stream, PROOF_BYTES)):
        raise UnprovenPeer("the process there does not prove that it is this job's controller")
    return Session(key, _AGENT, parts)


async def connect(
    host: str, port: int, *, token: str, node: str, incarnation: str, interval_s: float, timeout_s: float
) -> tuple[socket.socket, Session]:
    """The agent's end, proven by both. Raises OSError (TimeoutError, UnprovenPeer too) where there is no such
    controller."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel probes an idle connection every `interval_s` (a second at least), and closes it when nothing was
        # acknowledged for `timeout_s`.
        idle_s = max(1, math.ceil(interval_s))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(1000 * timeout_s)))
        async with asyncio.timeout(HANDSHAKE_S):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
            stream = _SocketStream(connection)
            session = await introduce(stream, token=token, node=node, incarnation=incarnation, port=port)
    except BaseException:
        connection.close()
        raise
    return connection, session


class _SocketStream:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def receive(self, most: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._connection, most)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, data)


async def _exactly(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = await stream.receive(size - len(data))
        if not chunk:
            raise ConnectionResetError("the controller closed the connection")
        data += chunk
    return data


class LivenessServer:
    """The controller's end. Calls `alive(node, incarnation)` when an agent connects or sends "alive", and `lost(node,
    incarnation)` when its connection breaks, from the event loop.

    At most 64 connections that have not proven themselves are open; the others wait in the kernel's queue.
    """

    def __init__(self, token: str, alive: Callable[[str, str], None], lost: Callable[[str, str], None]) -> None:
        self.key, self.alive, self.lost = JobKey(token).derive(_KEY), alive, lost
        self.connections: dict[_Connection, None] = {}  # oldest first
        self.proven: dict[tuple[str, str], _Connection] = {}
        self.port = 0
        self.closing = False
        self.admission: Admission[_Connection] = Admission()
        self.refused = RateLimitedLog(log.warning)
        self._listener: socket.socket | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._asked_at = self._read_until = 0.0
        self._opening: set[asyncio.Task[Any]] = set()

    async def start(self, bind: str) -> int:
        """Listen; returns the port."""
        # Not by asyncio's own server: it sets SO_REUSEADDR, and then another user may take the port of a controller
        # that was killed while connections to it are in TIME_WAIT; and when descriptors run out it logs a traceback
        # for each place in the backlog.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind((bind, 0))
        self._listener.listen(BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return self.port

    def protocol(self, source: str = "") -> _Connection:
        """What serves one more connection, from the address `source`."""
        return _Connection(self, source)

    def fence(self, node: str, incarnation: str) -> None:
        """Inform that agent, if it is connected, that its node has been given up."""
        if (connection := self.proven.get((node, incarnation))) is not None:
            connection.send_fenced()

    async def close(self) -> None:
        """Stop listening, and close every connection without calling its agent lost."""
        self.closing = True
        if self._listener is not None:
            self._pause()
            self._listener.close()
            self._listener = None
        for task in self._opening:
            task.cancel()
        for connection in self.connections:
            connection.let_go()

    def has_left(self, connection: _Connection) -> None:
        """It is proven, or closed: there is room for another."""
        self.admission.gone(connection)
        if self._rest is not None and self._listener is not None:
            self._go_on()

    # ---- accepting

    def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_AT_ONCE):
            now = loop.time()
            # A loop that was busy for longer than a turn has not yet read the proofs that came meanwhile: what counts
            # is what had arrived when connections were read from last, not the time that has passed.
            if self.admission.wait_s(self._read_until) > 0.0:
                self._asked_at = now
                self._pause(self.admission.wait_s(now))
                return
            try:
                accepted, (source, _port) = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self.refused.say(f"no connection to the controller can be accepted: {error.strerror}", now)
                self._asked_at = now
                self._pause(NO_DESCRIPTOR_S)
                if (dropped := self.admission.shed(self._read_until)) is not None:
                    dropped.refuse("it had not proven itself when descriptors ran out")
                return
            accepted.setblocking(False)
            connection = self.protocol(source)
            if (dropped := self.admission.admit(connection, now, source)) is not None:
                dropped.refuse("it had not proven itself when a newer connection needed its place")
            # Where that fails the peer has gone already, and asyncio has closed the connection.
            start(loop.connect_accepted_socket(connection.itself, accepted), self._opening, lambda _: None)

    def _pause(self, for_s: float | None = None) -> None:
        """Leave new connections in the kernel's queue."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        if self._rest is not None:
            self._rest.cancel()
        self._rest = None if for_s is None else loop.call_later(for_s, self._rested)

    def _rested(self) -> None:
        """Timers run after what the same select(2) has found readable: what had arrived at the pause is read."""
        self._read_until = self._asked_at
        self._go_on()

    def _go_on(self) -> None:
        assert self._listener is not None
        self._pause()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)


class _Connection(asyncio.Protocol):
    """One agent's connection: it proves itself once, and is then only watched."""

    # A protocol and no streams: a thousand agents connect at once when a job starts or a controller is replaced, and
    # a task, two buffers and a timeout scope for each took longer than the rendezvous itself.

    def __init__(self, server: LivenessServer, source: str) -> None:
        self._server, self._source = server, source
        self._nonce = os.urandom(NONCE_BYTES)
        self._unread = b""
        self._hello: Hello | None = None
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._bound: asyncio.TimerHandle | None = None
        self._refused = self._leaves = False

    def itself(self) -> _Connection:
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections[self] = None
        if self._refused or self._server.closing:
            transport.abort()
            return
        late = f"it has not proven itself within {PROOF_S:g} s"
        self._bound = asyncio.get_running_loop().call_later(PROOF_S, self.refuse, late)
        transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        if self._session is not None:
            self._read_words(data)
            return
        self._unread += data
        end = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "big")
        if end > _MOST_HELLO_BYTES:
            self.refuse("what it sent is no greeting")
        elif len(self._unread) >= _LENGTH_BYTES and end <= len(self._unread):
            unread, self._unread = self._unread, b""
            self._accept(unread[_LENGTH_BYTES:end])
            if self._session is not None and unread[end:]:
                self._read_words(unread[end:])

    def connection_lost(self, error: Exception | None) -> None:
        if self._bound is not None:
            self._bound.cancel()
        server, hello = self._server, self._hello
        server.connections.pop(self, None)
        server.has_left(self)
        if hello is None or server.proven.get((hello.node, hello.incarnation)) is not self:
            return  # never proven, or the same agent has connected again
        del server.proven[hello.node, hello.incarnation]
        if not server.closing and not self._leaves:
            server.lost(hello.node, hello.incarnation)

    def refuse(self, why: str) -> None:
        """Close the connection of a peer that is not believed."""
        self._refused = True
        now = asyncio.get_running_loop().time()
        self._server.refused.say(f"a connection from {self._source} was closed: {why}", now)
        if self._transport is not None:
            self._transport.abort()

    def send_fenced(self) -> None:
        assert self._transport is not None and self._session is not None
        self._transport.write(self._session.put(FENCED))

    def let_go(self) -> None:
        """Close the connection; what was written goes out first."""
        if self._transport is not None:
            self._transport.close()

    def _read_words(self, data: bytes) -> None:
        assert self._session is not None and self._hello is not None
        try:
            words = self._session.take(data)
        except UnprovenPeer as error:
            self.refuse(str(error))
            return
        if words:
            self._leaves = words.endswith(GOODBYE)
        if ALIVE in words:
            self._server.alive(self._hello.node, self._hello.incarnation)

    def _accept(self, packed: bytes) -> None:
        """The agent's greeting: which agent it is, and the proof that it knows the job's key."""
        assert self._transport is not None and self._bound is not None
        if self._refused:
            return
        try:
            hello = decode(_unpack_hello.decode, packed, "a greeting on the liveness connection")
            parts = _parts(self._nonce, hello.nonce, hello.node, hello.incarnation, self._server.port)
        except (MalformedRecord, UnicodeEncodeError) as error:
            self.refuse(str(error))
            return
        key = self._server.key
        if len(hello.nonce) != NONCE_BYTES or not is_proof(proof(key, _AGENT, *parts), hello.mac):
            self.refuse("it does not prove that it is an agent of this job")
            return
        self._bound.cancel()
        self._hello, self._session = hello, Session(key, _CONTROLLER, parts)
        # In the place of an older connection of the same agent, whose end then reports no loss (`connection_lost`).
        self._server.proven[hello.node, hello.incarnation] = self
        self._transport.write(proof(key, _CONTROLLER, *parts))
        self._server.has_left(self)
        self._server.alive(hello.node, hello.incarnation)
