"""The page that one worker and its agent share: where `workload` writes and the agent reads.

Little-endian int64 words, by number; all times are CLOCK_MONOTONIC in nanoseconds, one clock for a whole node.

| word | meaning |
|---|---|
| 0 | last step; -1 before the first beat |
| 1 | how many beats so far |
| 2 | when the last sign of progress was: a beat, or the end of a main-thread section; 0 before the first |
| 3 | the longest time between two signs that was outside of main-thread sections |
| 4 | process id of the one process whose sections stand here; 0 for none |
| 5 | how many main-thread sections are open, those included that found no entry |
| 6 | when the last restart in process was over; 0 before the first, -1 while one is under way |
| 7 | how many beats there were before it |
| 8 … 119 | 16 rows of 7: a section's name (40 bytes of UTF-8, zero-padded), how many have ended, the longest (ns) |
| 120 … 183 | 16 entries of 4: an open section's start, timeout (0 for none), row (+ 256: of the main thread), seal |
| 184 … 511 | zero, for later |

The 16th row, `…`, is shared by all names that found no row. A row's name is written once, before anything refers to
it. An entry is open while its start is not 0 and its seal is the exclusive or of its other three words and word 4. So
one that is half written (the worker may be killed at any point) is not open, on processors that reorder stores too.

Each number is aligned and stored whole, so a reader never sees half of one. Between two numbers there is an order
only where it matters: the end of a section is a sign first, and then its entry is freed, while the reader takes the
entries first, and then the sign. So a section that just ended is never taken for a silence as long as it was open.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

from nvrx_slurm.workload.layout import (
    BEATS,
    BEATS_BEFORE,
    COUNT,
    ENTRY_WORDS,
    GAP,
    LARGEST,
    MAIN_OPEN,
    MAIN_THREAD,
    NEVER,
    OPEN,
    OPEN_END,
    OWNER,
    RESTARTED,
    ROW_COUNT,
    SIGN,
    SLOT_BYTES,
    STEP,
    UNDER_WAY,
    map_slot,
    name_in,
    row_at,
)

__all__ = ["SLOT_BYTES", "OpenSection", "Reading", "Slot", "map_slot"]

NS = 1_000_000_000
# How often an entry in motion is looked at again. One that never rests is in use, and so does not hang.
ATTEMPTS = 8


class OpenSection(NamedTuple):
    """A section that is open: since when (CLOCK_MONOTONIC, ns), and its own timeout, if it was given one."""

    name: str
    started_ns: int
    timeout_s: float | None = None
    main_thread: bool = True


class Reading(NamedTuple):
    """What a worker has reported by now. Times are CLOCK_MONOTONIC, 0 for never; `seen`: name → (count, longest in
    s)."""

    step: int | None = None
    beats: int = 0
    sign_ns: int = 0
    largest_gap_ns: int = 0
    seen: Mapping[str, tuple[int, float]] = {}
    open: tuple[OpenSection, ...] = ()
    in_section: bool = False  # a section of the main thread is open, be it among `open` or not
    restarted_ns: int = 0  # when the last restart in process was over
    restarting: bool = False  # one is under way
    beats_before: int = 0  # how many beats there were before it

    @property
    def has_begun(self) -> bool:
        """Whether it has beaten since its start, or since its last restart in process."""
        return self.beats > self.beats_before


class Slot:
    """The agent's side of a slot."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Slot:
        """A fresh slot at `path`, readable by its owner only. Raises OSError."""
        # Not the old file's content but a new file: a worker that still runs keeps writing into the old one, which no
        # reader maps, and gets no SIGBUS as after a truncation.
        fresh = f"{os.fspath(path)}.{os.getpid()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, NEVER.to_bytes(8, "little", signed=True).ljust(SLOT_BYTES, b"\0"))
        finally:
            os.close(descriptor)
        os.replace(fresh, path)  # noqa: PTH105  pathlib takes longer to import than all of this
        return cls(map_slot(path))

    def read(self) -> Reading:
        """What the worker has reported by now. A caller that compares it with the clock reads the clock first."""
        main_open, entries = self._entries()
        sections = self._open_sections(entries)
        # The sign only now, after the entries: the end of a section stores the sign first, and then frees its entry.
        # Read in the other order, a section that has just ended would look like a silence as long as it was open.
        words = self._words
        restarted = words[RESTARTED]
        seen = {}
        for row in range(ROW_COUNT):
            at = row_at(row)
            if (count := words[at + COUNT]) > 0:
                seen[name_in(words, row)] = (count, words[at + LARGEST] / NS)
        return Reading(
            step=step if (step := words[STEP]) > NEVER else None,  # a negative one is no step
            beats=words[BEATS],
            sign_ns=words[SIGN],
            largest_gap_ns=words[GAP],
            seen=seen,
            open=sections,
            in_section=main_open > 0 or any(section.main_thread for section in sections),
            restarted_ns=max(0, restarted),
            restarting=restarted == UNDER_WAY,
            beats_before=words[BEATS_BEFORE],
        )

    def close(self) -> None:
        """Unmaps the slot; the file stays, and so does the worker's own mapping. Reading after it is a ValueError."""
        shared = self._words.obj
        self._words.release()
        assert isinstance(shared, mmap.mmap)
        shared.close()

    def _entries(self) -> tuple[int, list[int]]:
        """Word 5 and the entries; the same twice in a row, unless they never rest."""
        found = self._look()
        for _ in range(ATTEMPTS):
            before, found = found, self._look()
            if found == before:
                break
        return found

    def _look(self) -> tuple[int, list[int]]:
        return self._words[MAIN_OPEN], self._words[OPEN:OPEN_END].tolist()

    def _open_sections(self, entries: list[int]) -> tuple[OpenSection, ...]:
        owner, found = self._words[OWNER], []
        for at in range(0, len(entries), ENTRY_WORDS):
            started, timeout, what, seal = entries[at : at + ENTRY_WORDS]
            row = what & (MAIN_THREAD - 1)
            if started <= 0 or seal != started ^ timeout ^ what ^ owner or row >= ROW_COUNT:
                continue
            timeout_s = timeout / NS if timeout > 0 else None
            found.append(OpenSection(name_in(self._words, row), started, timeout_s, bool(what & MAIN_THREAD)))
        return tuple(sorted(found, key=lambda section: section.started_ns))
