"""When a rank's output was written: marks beside its log, which the agent writes and `logs --since` reads. Standard
library only.

A mark is a moment and how long the log was then. There is one every ten seconds at most, and none for output that
ends within ten seconds: most cycles that fail at once cost no file more.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from nvrx_slurm.util.files import open_log, write_all

MARK_EVERY_S = 10.0
_MARK = struct.Struct("<dQ")
# The begin of a longer line is not looked for.
LONGEST_LINE_BYTES = 64 << 10


def marks_path(log: Path) -> Path:
    """In a hidden folder: a reader of the cycle's logs skips it."""
    return log.parent / ".times" / log.name


class TimeMarks:
    """The marks of one log that is written now. `note` comes ahead of each piece of output."""

    def __init__(self, log: Path, descriptor: int) -> None:
        self._log, self._descriptor = log, descriptor
        self._unwritten: bytes | None = None  # the first mark, until there is a second one
        self._file: int | None = None
        self._due: float | None = None

    def note(self, monotonic: float, wall: float) -> None:
        """Mark the end of the log, if a mark is due. An error costs the marks, and nothing else."""
        if self._due is not None and monotonic < self._due:
            return
        is_first, self._due = self._due is None, monotonic + MARK_EVERY_S
        with contextlib.suppress(OSError):
            mark = _MARK.pack(wall, os.lseek(self._descriptor, 0, os.SEEK_END))
            if is_first:
                self._unwritten = mark
                return
            if self._file is None:
                self._file = open_log(marks_path(self._log))
            mark, self._unwritten = (self._unwritten or b"") + mark, None
            write_all(self._file, mark)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def written_since(log: Path, moment: float) -> int | None:
    """Where the first line begins that was written since the moment, or up to ten seconds before it; None: there are
    no marks that say so. Raises OSError."""
    try:
        marks = marks_path(log).read_bytes()
    except FileNotFoundError:
        return None
    # All between a mark and the next one was written within ten seconds of the first of them.
    for index, (at, length) in enumerate(_MARK.iter_unpack(marks[: len(marks) - len(marks) % _MARK.size])):
        if at + MARK_EVERY_S >= moment:
            return _line_at(log, length) if index else 0
    return log.stat().st_size if marks else None


def _line_at(log: Path, offset: int) -> int:
    """Where the line begins in which this byte is."""
    begin = max(0, offset - LONGEST_LINE_BYTES)
    with log.open("rb") as file:
        file.seek(begin)
        return begin + file.read(offset - begin).rfind(b"\n") + 1
