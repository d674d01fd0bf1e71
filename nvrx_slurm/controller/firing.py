"""The controller's side of the fence: send a datagram until the node's kernel says that nobody is there to take
it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.1


async def is_dead(addr: str, port: int, message: bytes, within_s: float) -> bool:
    """Send `message` (the key, or `PROBE`) until the node's kernel refuses it: then the supervisor is dead.

    False when that has not happened `within_s` seconds: it lives, or nothing can be known.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + within_s, FIRST_PAUSE_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
        try:
            channel.connect((addr, port))
        except OSError:
            return False
        while True:
            try:
                with contextlib.suppress(BlockingIOError):
                    channel.send(message)
                async with asyncio.timeout(min(pause, max(0.0, deadline - loop.time()))):
                    await loop.sock_recv(channel, 1)
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
