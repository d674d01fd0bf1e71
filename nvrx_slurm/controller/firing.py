"""The controller's side of the fence: send a datagram until the node's kernel says that nobody is there to take
it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.1


class Channel(Protocol):
    """A datagram socket that is connected to a node's port. Both raise ConnectionRefusedError when its kernel has
    refused, and other OSErrors as they come."""

    def send(self, data: bytes) -> None: ...
    async def receive(self) -> None: ...


async def is_dead(addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S) -> bool:
    """Send `message` (the key, or `PROBE`) until the node's kernel refuses it: then the supervisor is dead.

    False when that has not happened within `within_s` seconds: it lives, or nothing can be known. `pause_s`: from the
    first message to the second; it doubles up to `LAST_PAUSE_S`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as datagrams:
        try:
            datagrams.connect((addr, port))
        except OSError:
            return False
        return await is_refused(_SocketChannel(datagrams), message, within_s, pause_s)


async def is_refused(channel: Channel, message: bytes, within_s: float, pause_s: float) -> bool:
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


class _SocketChannel:
    def __init__(self, datagrams: socket.socket) -> None:
        self._datagrams = datagrams

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            self._datagrams.send(data)

    async def receive(self) -> None:
        await asyncio.get_running_loop().sock_recv(self._datagrams, 1)
