"""The port to a launcher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NODES = 2
WORKERS_PER_NODE = 2
WORLD_SIZE = NODES * WORKERS_PER_NODE


@dataclass(frozen=True, slots=True)
class Task:
    """What to keep running: `command` on each rank, with `spares` nodes standing by, in the folder `room`."""

    command: tuple[str, ...]
    spares: int
    room: Path


class Launcher(Protocol):
    """Starts a task and keeps it running."""

    @property
    def name(self) -> str: ...

    def start(self, task: Task) -> Fleet:
        """Start it. Raises PeerMissing where the launcher is not installed."""
        ...


class Fleet(Protocol):
    """A started task."""

    @property
    def parent_of_nodes(self) -> int:
        """The process whose children are the nodes: each the root of all that runs on its node."""
        ...

    def wait_spares(self, timeout_s: float) -> None:
        """Called before each run: wait until the spares of the task stand by. Raises BenchTimeout."""
        ...

    def log(self) -> str:
        """The end of what it said, for the message of a measurement that failed."""
        ...

    def stop(self) -> None:
        """End everything."""
        ...
