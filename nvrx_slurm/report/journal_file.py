"""The journal as the job folder has it: `events.jsonl`, and its older parts beside it.

A writer that dies leaves a torn last line, which is not an entry, whether its end arrives later or never does. No
file is held open between two reads: it may be rotated, and a network file system shows what is new on opening.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, entries_from_json
from nvrx_slurm.util.files import journal_parts

_ATTEMPTS = 3
_BLOCK_BYTES = 1 << 18


class JournalFile:
    """Reads on where it stopped, through rotations, each entry once, in order."""

    def __init__(self, folder: JobFolder, *, after: int = 0) -> None:
        self._current = folder.events_path
        self._last = after
        self._seen: os.stat_result | None = None  # the current part when it was last read
        self._offset = 0  # behind its last complete line

    def read(self) -> list[Entry]:
        """The entries that were completed since the last call. No journal yet: none. Raises OSError."""
        try:
            there = self._current.stat()
        except FileNotFoundError:  # nothing written yet, or nothing since the last rotation
            return self._read_parts()
        # Another file, since it was rotated, or a shorter one.
        if self._seen is None or not os.path.samestat(there, self._seen) or there.st_size < self._offset:
            return self._read_parts()
        if there.st_size == self._offset:
            return []
        with self._current.open("rb") as file:
            if not os.path.samestat(os.fstat(file.fileno()), self._seen):  # rotated since the look at it
                return self._read_parts()
            file.seek(self._offset)
            found = {entry.n: entry for entry in _entries(file)}
            self._offset = file.tell()
        return self._new(found)

    def skip_to(self, number: int) -> None:
        """Entries up to this number came from elsewhere."""
        self._last = max(self._last, number)

    def _read_parts(self) -> list[Entry]:
        """Read all parts again. A rotation between listing and opening shows as a gap: then once more."""
        # A gap that stays is one of the journal itself: then the entries behind it are passed on all the same.
        for _ in range(_ATTEMPTS):
            found: dict[int, Entry] = {}
            # The older parts that may hold new entries, ordered by their first ones: their names need not be trusted.
            firsts = {part: next(_entries_of(part), None) for part in journal_parts(self._current)}
            known = sorted((first.n, part) for part, first in firsts.items() if first is not None)
            ends = [first - 1 for first, _ in known[1:]]
            for (_, part), end in zip_longest(known, ends):
                if end is None or end > self._last:  # where the last of them ends is not known
                    found |= {entry.n: entry for entry in _entries_of(part)}
            self._seen, self._offset = None, 0
            with contextlib.suppress(FileNotFoundError), self._current.open("rb") as file:
                found |= {entry.n: entry for entry in _entries(file)}
                self._seen, self._offset = os.fstat(file.fileno()), file.tell()
            newer = sorted(n for n in found if n > self._last)
            # Without a gap: no part was rotated away between the listing and its opening.
            if newer == list(range(self._last + 1, self._last + 1 + len(newer))):
                break
        return self._new(found)

    def _new(self, found: dict[int, Entry]) -> list[Entry]:
        entries = [found[n] for n in sorted(found) if n > self._last]
        if entries:
            self._last = entries[-1].n
        return entries


def _entries(file: BinaryIO) -> Iterator[Entry]:
    """The entries from here on; the file stands behind the last complete line afterwards."""
    # Whole lines in large blocks, which are decoded at once.
    while block := file.read(_BLOCK_BYTES) + file.readline():
        end = block.rfind(b"\n") + 1
        yield from entries_from_json(block[:end])
        # A line that is being written: the next call reads it from its begin again.
        if end < len(block):
            file.seek(end - len(block), os.SEEK_CUR)
            return


def _entries_of(part: Path) -> Iterator[Entry]:
    """Of an older part; none where it was rotated on since it was listed."""
    with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
        yield from _entries(file)
