"""The registry that each worker connects to when it starts.

Workers of one world have one MASTER_PORT; every launcher takes a new one for each cycle. When the connection of one
worker breaks, the registry closes those of all others of its world, and they exit, as after a broken collective.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.errors import BenchTimeout
from nvrx_slurm.util.clock import Clock, SystemClock

WORKER = Path(__file__).parent / "worker.py"


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that runs. `started` is its own stamp, in seconds on the machine's monotonic clock; `stamps` are those
    of what it did before, in order."""

    world: str
    rank: int
    pid: int
    started: float
    stamps: dict[str, float] = field(default_factory=dict)


class WorkerRegistry:
    """Owns all workers' connections; serves them while a caller waits."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._open = set[socket.socket]()
        self._worlds: dict[str, dict[socket.socket, RunningWorker]] = defaultdict(dict)

    @property
    def address(self) -> tuple[str, str]:
        """The last two arguments of a worker's command: host and port."""
        host, port = self._server.getsockname()
        return host, str(port)

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a worker that reports here, and does nothing else."""
        return (sys.executable, "-S", "-E", str(WORKER), *self.address)

    def wait_world(self, size: int, *, timeout_s: float, after: float = 0.0) -> dict[int, RunningWorker]:
        """The workers by rank, once one world has all of `size` at the same time, each started later than `after`.

        Raises BenchTimeout.
        """
        found: dict[int, RunningWorker] = {}

        def complete() -> bool:
            for world in self._worlds.values():
                there = {worker.rank: worker for worker in world.values() if worker.started > after}
                if len(there) == size:
                    found.update(there)
                    return True
            return False

        self._serve_until(complete, timeout_s, f"{size} workers of one world")
        return found

    def close(self) -> None:
        """Close all connections; the workers exit."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _serve_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while not done():
            left = deadline - self._clock.monotonic()
            if left <= 0:
                there = {name: sorted(w.rank for w in world.values()) for name, world in self._worlds.items()}
                raise BenchTimeout(f"{what} did not report in {timeout_s:.0f} s; ranks there, by world: {there}")
            for key, _ in self._selector.select(left):
                if key.fileobj is self._server:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._open:
                    self._read(key.fileobj)  # not one that was closed since select

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        self._selector.register(connection, selectors.EVENT_READ)
        self._open.add(connection)

    def _read(self, connection: socket.socket) -> None:
        """A worker's only line, in one piece as it is short; or the end of its connection."""
        try:
            data = connection.recv(1024)
        except ConnectionError:
            data = b""
        if not data:
            self._lost(connection)
            return
        world, rank, pid, started, *stamps = data.decode().split(maxsplit=4)
        before = json.loads(stamps[0]) if stamps else {}
        self._worlds[world][connection] = RunningWorker(world, int(rank), int(pid), float(started), before)

    def _lost(self, connection: socket.socket) -> None:
        self._drop(connection)
        for name, world in list(self._worlds.items()):
            if connection in world:
                del self._worlds[name]
                for peer in world.keys() - {connection}:
                    self._drop(peer)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._open.discard(connection)
        connection.close()
