"""What every carrier does in its two processes, and the memory that all of them use."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

SHM = Path("/dev/shm")
LOOPBACK = "127.0.0.1"
REQUEST = struct.Struct("<QQ")  # slot, size

Check = Callable[[Any, int], None]
"""Called with what was read and its place in the turn, after the clock."""


class Producer(Protocol):
    """Constructed with (size, count, options): room for `count` payloads. `where` (JSON): how readers find it."""

    where: Any

    def write(self, slot: int, payload: memoryview) -> Any:
        """The part that is timed."""

    def refer(self, slot: int, written: Any) -> Any:
        """What a reader needs to read it (JSON)."""


class Reader:
    """Constructed with (size, where, options)."""

    def read(self, ref: Any) -> Any:
        """The payload's bytes, in a buffer."""
        raise NotImplementedError

    def parse(self, ref: Any) -> Any:
        """Before the clock: from JSON."""
        return ref

    def timed(self, refs: Sequence[Any], check: Check) -> list[float]:
        """Seconds of each read."""
        took = []
        for place, ref in enumerate([self.parse(ref) for ref in refs]):
            began = perf_counter()
            payload = self.read(ref)
            took.append(perf_counter() - began)
            check(payload, place)
        return took


class Shelf:
    """So many payloads side by side in shared memory that has no name, all of it there; each carrier's source."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.descriptor = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.posix_fallocate(self.descriptor, 0, size * count)
        self.mapped = mmap.mmap(self.descriptor, size * count)
        self.view = memoryview(self.mapped)

    @property
    def path(self) -> str:
        """By which another process can open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def put(self, slot: int, payload: memoryview) -> None:
        self.view[slot * self.size : (slot + 1) * self.size] = payload

    def at(self, slot: int) -> memoryview:
        return self.view[slot * self.size : (slot + 1) * self.size]


class ShelfProducer:
    """A producer whose payloads lie on a shelf, and that is asked for them by slot."""

    where: Any

    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        self.shelf = Shelf(size, count)

    def write(self, slot: int, payload: memoryview) -> None:
        self.shelf.put(slot, payload)

    def refer(self, slot: int, written: None) -> int:
        return slot


def listening() -> socket.socket:
    return socket.create_server((LOOPBACK, 0))


def without_delay(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
