"""The controller's side of the fence: send the key by UDP, and connect by TCP until the node's kernel refuses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Protocol

from nvrx_slurm.liveness import fence

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.1
MOST_DIALS = 8
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Channel(Protocol):
    """A way to a node's fence socket. Both methods raise ConnectionRefusedError once the node's kernel has refused,
    and other OSErrors as they occur."""

    def send(self, data: bytes) -> None: ...
    async def receive(self) -> None: ...


async def is_dead(addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S) -> bool:
    """Send `message` (the key, or `PROBE`) until the node's kernel refuses it: then the supervisor is dead.

    False when that has not happened within `within_s` seconds: it lives, or nothing can be known. `pause_s`: from the
    first message to the second; it doubles up to `LAST_PAUSE_S`.
    """
    channel = _FenceChannel(addr, port)
    try:
        return await send_fence(channel, message, within_s, pause_s)
    finally:
        channel.close()


async def send_fence(channel: Channel, message: bytes, within_s: float, pause_s: float) -> bool:
    """Send `message` again and again: whether it is refused within that time."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + within_s, pause_s
    while True:
        try:
            channel.send(message)
            async with asyncio.timeout(min(pause, max(0.0, deadline - loop.time()))):
                await channel.receive()
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            if loop.time() >= deadline:
                return False
        except OSError:  # no route at this moment
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


class _FenceChannel:
    """A node's fence socket (`fence.py`): the key goes by UDP, and TCP says whether its holder lives."""

    def __init__(self, addr: str, port: int) -> None:
        self._there = (addr, port)
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._refused = asyncio.Event()
        self._dials: dict[asyncio.Task[None], None] = {}  # oldest first
        self._connected = 0

    def send(self, data: bytes) -> None:
        """Send the key, and connect once more unless a connection is up: its end will say the same."""
        self._raise_refused()
        if data != fence.PROBE:
            with contextlib.suppress(BlockingIOError):
                self._datagrams.sendto(data, self._there)
        if not self._connected:
            if len(self._dials) >= MOST_DIALS:  # on a lossy network the kernel itself repeats a SYN after a second
                next(iter(self._dials)).cancel()
            dial = asyncio.get_running_loop().create_task(self._dial())
            self._dials[dial] = None
            dial.add_done_callback(self._dialled)

    async def receive(self) -> None:
        await self._refused.wait()
        self._raise_refused()

    def close(self) -> None:
        for dial in self._dials:
            dial.cancel()
        self._datagrams.close()

    def _raise_refused(self) -> None:
        if self._refused.is_set():
            raise ConnectionRefusedError(f"{self._there[0]}:{self._there[1]} refuses connections")

    async def _dial(self) -> None:
        try:
            # Once more when a connection was up: it ends when its listener does, and the kernel refuses the next one.
            if await self._connect():
                await self._connect()
        except ConnectionRefusedError:
            self._refused.set()

    async def _connect(self) -> bool:
        """Connect, and wait for the end. Whether there was a connection. Raises ConnectionRefusedError."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
            # Close it by RST: the fence socket accepts no connection, and would keep each half-closed one.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            try:
                await loop.sock_connect(connection, self._there)
            except ConnectionRefusedError:
                raise
            except OSError:  # no route at this moment
                return False
            self._connected += 1
            try:
                with contextlib.suppress(OSError):
                    await loop.sock_recv(connection, 1)
            finally:
                self._connected -= 1
            return True

    def _dialled(self, dial: asyncio.Task[None]) -> None:
        self._dials.pop(dial, None)
        if not dial.cancelled():
            dial.exception()
