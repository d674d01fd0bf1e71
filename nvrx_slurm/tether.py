"""The tether: one authenticated TCP connection from each agent to the controller, and nothing on it but liveness.

    controller → agent   16 bytes of nonce
    agent → controller   2 bytes of length, then `Hello` with an HMAC-SHA256 of the nonce under the job's token
    controller → agent   b"+"           accepted
    agent → controller   b"."           about to leave in good order: what follows is no death

Then silence. When the agent dies its kernel closes the connection, and the controller knows within a round trip. The
agent's supervisor holds the connection too, so it breaks only when the node's last worker is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
from collections.abc import Callable

import msgspec

from nvrx_slurm.records import Record

NONCE_BYTES = 16
HANDSHAKE_S = 5.0
ACCEPTED = b"+"
GOODBYE = b"."
_LENGTH_BYTES = 2


class Hello(Record, frozen=True, kw_only=True):
    """Who holds the agent's end."""

    node: str
    incarnation: str
    mac: bytes


def _mac(token: str, nonce: bytes, node: str, incarnation: str) -> bytes:
    message = nonce + f"{node}\0{incarnation}".encode()
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


def address_towards(host: str) -> str:
    """This host's address on the way to `host`: one at which its neighbours there can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; it only asks the routing table
        return str(probe.getsockname()[0])


async def connect(host: str, port: int, *, token: str, node: str, incarnation: str) -> socket.socket:
    """The agent's end, authenticated. Raises OSError (TimeoutError too) where there is no such controller."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(HANDSHAKE_S):
            await loop.sock_connect(connection, (host, port))
            nonce = await _exactly(connection, NONCE_BYTES)
            mac = _mac(token, nonce, node, incarnation)
            hello = msgspec.msgpack.encode(Hello(node=node, incarnation=incarnation, mac=mac))
            await loop.sock_sendall(connection, len(hello).to_bytes(_LENGTH_BYTES, "big") + hello)
            if await _exactly(connection, 1) != ACCEPTED:
                raise ConnectionRefusedError("the controller refused the tether")
    except BaseException:
        connection.close()
        raise
    return connection


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not chunk:
            raise ConnectionResetError("the controller closed the tether")
        data += chunk
    return data


class TetherServer:
    """The controller's end. Calls `up(node, incarnation)` and `lost(node, incarnation)` from the event loop."""

    def __init__(self, token: str, up: Callable[[str, str], None], lost: Callable[[str, str], None]) -> None:
        self._token = token
        self._up = up
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, bind: str) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, bind, 0, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and let go of every agent without calling it lost."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            hello = await self._handshake(reader, writer)
            if hello is not None:
                self._up(hello.node, hello.incarnation)
                if await self._until_broken(reader):
                    self._lost(hello.node, hello.incarnation)
        except asyncio.CancelledError:
            pass  # we are closing: whoever is connected is not lost
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        nonce = os.urandom(NONCE_BYTES)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            async with asyncio.timeout(HANDSHAKE_S):
                writer.write(nonce)
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                hello = msgspec.msgpack.decode(await reader.readexactly(length), type=Hello)
                expected = _mac(self._token, nonce, hello.node, hello.incarnation)
                if hmac.compare_digest(expected, hello.mac):
                    writer.write(ACCEPTED)
                    await writer.drain()
                    return hello
        return None

    @staticmethod
    async def _until_broken(reader: asyncio.StreamReader) -> bool:
        """Wait for the end of the connection; whether it was a death."""
        last = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(64):
                last = data
        return not last.endswith(GOODBYE)
