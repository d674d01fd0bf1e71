"""The tether: one authenticated TCP connection from each agent to the controller, and nothing on it but liveness.

    controller → agent   16 bytes of nonce
    agent → controller   2 bytes of length, then `Hello` with an HMAC-SHA256 of the nonce under the job's token
    controller → agent   b"+"           accepted
    agent → controller   b"a"           alive: said only while its beats do not reach the store
    agent → controller   b"."           about to leave in good order: what follows is no death
    controller → agent   b"x"           you are fenced: kill your workers, and join anew

Otherwise silence. When the agent dies its kernel closes the connection, and the controller knows within a round trip.
The agent's supervisor holds the connection too, so it breaks only when the node's last worker is dead. The agent's
kernel probes the connection (TCP keepalive), so the agent knows when it last reached the controller's host.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import socket
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec

from nvrx_slurm.records import Record

NONCE_BYTES = 16
HANDSHAKE_S = 5.0
ACCEPTED = b"+"
ALIVE = b"a"
FENCED = b"x"
GOODBYE = b"."
_LAST_ACK_OFFSET = 56
"""Of `tcpi_last_ack_recv`, milliseconds, in `struct tcp_info` (linux/tcp.h): eight bytes, then twelve 32-bit
numbers."""
_LENGTH_BYTES = 2


class Hello(Record, frozen=True, kw_only=True):
    """Who holds the agent's end."""

    node: str
    incarnation: str
    mac: bytes


_unpack_hello = msgspec.msgpack.Decoder(Hello)


def _mac(token: str, nonce: bytes, node: str, incarnation: str) -> bytes:
    message = nonce + f"{node}\0{incarnation}".encode()
    return hmac.digest(token.encode(), message, hashlib.sha256)


def address_towards(host: str) -> str:
    """This host's address on the way to `host`: one at which its neighbours there can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; it only asks the routing table
        return str(probe.getsockname()[0])


def silence_s(connection: socket.socket) -> float:
    """Seconds since the peer's kernel last answered on the connection. Raises OSError if it is closed."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_OFFSET + 4)
    return int.from_bytes(info[_LAST_ACK_OFFSET:], sys.byteorder) / 1000


def _keep_alive(connection: socket.socket, interval_s: float, timeout_s: float) -> None:
    """Have the kernel probe an idle connection every `interval_s` (a second at least), and give up as `timeout_s`
    says."""
    idle_s = max(1, math.ceil(interval_s))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(1000 * timeout_s)))


class Stream(Protocol):
    """An open connection, to whatever end."""

    async def receive(self, most: int) -> bytes:
        """At least one byte; none, when the other end has closed it. Raises OSError."""
        ...

    async def send(self, data: bytes) -> None:
        """All of it. Raises OSError."""
        ...


async def introduce(stream: Stream, *, token: str, node: str, incarnation: str) -> None:
    """Prove to the controller at the other end who holds this one. Raises OSError where it does not agree."""
    nonce = await _exactly(stream, NONCE_BYTES)
    mac = _mac(token, nonce, node, incarnation)
    hello = msgspec.msgpack.encode(Hello(node=node, incarnation=incarnation, mac=mac))
    await stream.send(len(hello).to_bytes(_LENGTH_BYTES, "big") + hello)
    if await _exactly(stream, 1) != ACCEPTED:
        raise ConnectionRefusedError("the controller refused the tether")


async def connect(
    host: str, port: int, *, token: str, node: str, incarnation: str, interval_s: float, timeout_s: float
) -> socket.socket:
    """The agent's end, authenticated. Raises OSError (TimeoutError too) where there is no such controller."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection, interval_s, timeout_s)
        async with asyncio.timeout(HANDSHAKE_S):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
            await introduce(_SocketStream(connection), token=token, node=node, incarnation=incarnation)
    except BaseException:
        connection.close()
        raise
    return connection


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
            raise ConnectionResetError("the controller closed the tether")
        data += chunk
    return data


class TetherServer:
    """The controller's end. Calls `alive(node, incarnation)` when a node ties or says so, and `lost(node,
    incarnation)` when its connection breaks, from the event loop."""

    def __init__(self, token: str, alive: Callable[[str, str], None], lost: Callable[[str, str], None]) -> None:
        self.token, self.alive, self.lost = token, alive, lost
        self.connections: dict[_Connection, None] = {}  # in the order in which they came
        self.tied: dict[tuple[str, str], _Connection] = {}
        self.closing = False
        self._server: asyncio.Server | None = None

    async def start(self, bind: str) -> int:
        """Listen; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.protocol, bind, 0, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    def protocol(self) -> asyncio.Protocol:
        """What serves one more connection."""
        return _Connection(self)

    def fence(self, node: str, incarnation: str) -> None:
        """Tell that agent, if it is tied, that its node has been given up."""
        if (connection := self.tied.get((node, incarnation))) is not None:
            connection.tell_fenced()

    async def close(self) -> None:
        """Stop listening, and let go of every agent without calling it lost."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.let_go()


class _Connection(asyncio.Protocol):
    """One agent's connection: it proves itself once, and is then only watched.

    A protocol and no streams: a thousand agents come at once when a job starts or a controller is replaced, and a
    task, two buffers and a timeout scope for each took longer than the round itself.
    """

    def __init__(self, server: TetherServer) -> None:
        self._server = server
        self._nonce = os.urandom(NONCE_BYTES)
        self._unread = b""
        self._last = b""
        self._hello: Hello | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._bound = asyncio.get_running_loop().call_later(HANDSHAKE_S, transport.abort)
        self._server.connections[self] = None
        transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        if self._hello is not None:
            self._last = data
            if ALIVE in data:
                self._server.alive(self._hello.node, self._hello.incarnation)
            return
        self._unread += data
        end = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "big")
        if len(self._unread) >= _LENGTH_BYTES and end <= len(self._unread):
            self._accept(self._unread[_LENGTH_BYTES:end])
            self._last = self._unread[end:]

    def connection_lost(self, error: Exception | None) -> None:
        self._bound.cancel()
        self._server.connections.pop(self, None)
        hello, server = self._hello, self._server
        if hello is None or server.tied.get((hello.node, hello.incarnation)) is not self:
            return  # never proven, or the same agent has tied anew
        del server.tied[hello.node, hello.incarnation]
        if not server.closing and not self._last.endswith(GOODBYE):
            server.lost(hello.node, hello.incarnation)

    def tell_fenced(self) -> None:
        self._transport.write(FENCED)

    def let_go(self) -> None:
        """Close the connection; what was written goes out first."""
        self._transport.close()

    def _accept(self, packed: bytes) -> None:
        """The one thing an agent says before silence: who it is, and that it knows the token."""
        self._bound.cancel()
        hello = self._proven(packed)
        if hello is None:
            self._transport.abort()
            return
        self._hello = hello
        self._server.tied[hello.node, hello.incarnation] = self
        self._transport.write(ACCEPTED)
        self._server.alive(hello.node, hello.incarnation)

    def _proven(self, packed: bytes) -> Hello | None:
        try:
            hello = _unpack_hello.decode(packed)
        except msgspec.DecodeError:
            return None
        expected = _mac(self._server.token, self._nonce, hello.node, hello.incarnation)
        return hello if hmac.compare_digest(expected, hello.mac) else None
