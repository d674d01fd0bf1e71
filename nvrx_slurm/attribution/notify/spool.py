"""What is still to be told to one receiver: a file each, in the order of their numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.locks import locked

MOST_PARCELS = 256
"""What a receiver that is away for good may cost. The oldest go first."""

LARGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Parcel:
    """One thing to tell. `identity` names the failure; `path` is None where no disk would take it."""

    identity: str
    body: bytes
    path: Path | None = None


class Spool:
    """A folder (0700) for one receiver. All of it blocks, and raises OSError."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self._clock = clock

    def put(self, identity: str, body: bytes) -> int:
        """Keep a parcel, unless one of that identity waits already. Returns how many older ones made room for it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        waiting = self._paths()
        if any(path.stem.partition("-")[2] == identity for path in waiting):
            return 0
        number = int(waiting[-1].name.partition("-")[0]) + 1 if waiting else 1
        write_private(self.folder / f"{number:09}-{identity}.json", body)
        too_many = waiting[: max(0, len(waiting) + 1 - MOST_PARCELS)]
        for path in too_many:
            path.unlink(missing_ok=True)
        return len(too_many)

    def waiting(self, most: int = MOST_PARCELS) -> list[Parcel]:
        """The oldest parcels, in order."""
        found = []
        for path in self._paths()[:most]:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # somebody may clear away
                found.append(Parcel(path.stem.partition("-")[2], file.read(LARGEST_BYTES), path))
        return found

    def count(self) -> int:
        return len(self._paths())

    @staticmethod
    def drop(parcel: Parcel) -> None:
        if parcel.path is not None:
            parcel.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def emptying(self) -> Iterator[bool]:
        """Nobody else takes parcels out meanwhile. Raises TimeoutError at once where somebody does."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / ".lock", timeout_s=0.0, clock=self._clock) as is_locked:
            yield is_locked

    def _paths(self) -> list[Path]:
        """Numbers first, and all of the same width: names sort as they came."""
        return sorted(path for path in self.folder.glob("*-*.json") if path.name[:9].isdigit())
