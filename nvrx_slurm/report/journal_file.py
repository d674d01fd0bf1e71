"""The journal as the job folder has it: `events.jsonl`, and its older parts beside it.

A writer that dies leaves a torn last line; it is not an entry, whether its end arrives later or never does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from nvrx_slurm.folder import JobFolder
from nvrx_slurm.records import Entry, entry_from_json

_PART = re.compile(r"events(\.\d+)?\.jsonl")
_ATTEMPTS = 3


class JournalFile:
    """Reads on where it stopped, through rotations, each entry once, in order."""

    def __init__(self, folder: JobFolder, *, after: int = 0) -> None:
        self._current = folder.events_path
        self._last = after
        self._open: BinaryIO | None = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def read(self) -> list[Entry]:
        """The entries that were completed since the last call. No journal yet: none. Raises OSError."""
        found = self._keep_new(_entries(self._open)) if self._open else []
        if self._open is None or self._is_rotated(self._open):
            found += self._read_parts()
        return found

    def skip_to(self, number: int) -> None:
        """Entries up to this number came from elsewhere."""
        self._last = max(self._last, number)

    def _is_rotated(self, file: BinaryIO) -> bool:
        try:
            there = self._current.stat()
        except FileNotFoundError:
            return False  # in the middle of a rotation, or the folder is being removed
        here = os.fstat(file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < file.tell()

    def _read_parts(self) -> list[Entry]:
        """All parts anew. A rotation between listing and opening shows as a gap: then once more."""
        for attempt in range(1, _ATTEMPTS + 1):
            found, newest = _read_all(self._parts(), self._last)
            gapless = [entry.n for entry in found] == list(range(self._last + 1, self._last + 1 + len(found)))
            if gapless or attempt == _ATTEMPTS:
                break
            if newest:
                newest.close()
        self.close()
        self._open = newest
        return self._keep_new(found)

    def _parts(self) -> list[Path]:
        """The parts, oldest first by the number of their first entry: their names need not be trusted."""
        try:
            names = [name for name in os.listdir(self._current.parent) if _PART.fullmatch(name)]  # noqa: PTH208 - names
        except FileNotFoundError:
            return []
        parts = [self._current.parent / name for name in names if name != self._current.name]
        older = sorted((first, part) for part in parts if (first := _first_number(part)) is not None)
        kept = [
            part
            for index, (_, part) in enumerate(older)
            if index + 1 == len(older) or older[index + 1][0] > self._last + 1
        ]
        return [*kept, self._current]

    def _keep_new(self, entries: Iterable[Entry]) -> list[Entry]:
        new = []
        for entry in entries:
            if entry.n > self._last:
                self._last = entry.n
                new.append(entry)
        return new


def _read_all(parts: list[Path], after: int) -> tuple[list[Entry], BinaryIO | None]:
    """The entries after a number, in order, and the newest part, open behind its last complete line."""
    found: dict[int, Entry] = {}
    newest: BinaryIO | None = None
    for part in parts:
        if newest is not None:
            newest.close()
        try:
            newest = part.open("rb")
        except FileNotFoundError:
            newest = None
            continue
        found |= {entry.n: entry for entry in _entries(newest) if entry.n > after}
    if newest is not None and Path(newest.name) != parts[-1]:
        newest.close()
        newest = None
    return [found[n] for n in sorted(found)], newest


def _entries(file: BinaryIO) -> Iterator[Entry]:
    """The complete lines from here on; the file stands behind the last of them afterwards."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        entry = _parse(line)
        if entry is not None:
            yield entry


def _parse(line: bytes) -> Entry | None:
    """None for what is no entry: a line torn by a crash, or an event of a newer version that this one cannot know."""
    try:
        return entry_from_json(line)
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


def _first_number(part: Path) -> int | None:
    try:
        with part.open("rb") as file:
            return next((entry.n for entry in _entries(file)), None)
    except FileNotFoundError:
        return None
