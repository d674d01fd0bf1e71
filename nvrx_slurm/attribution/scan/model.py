"""What reading finds: log files, the lines in them that a rule recognises, and what else analysis wants to know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from nvrx_slurm.attribution.rules.catalogue import Rule

LogKind = Literal["out", "err", "stacks", "health", "mixed", "flight_recorder"]

# Characters of a line that are kept.
LONGEST_TEXT = 400

# Of a number in a line or a file's name that may be a rank or a pid. A longer number is neither.
MOST_DIGITS = 9

# Of each rule's lines in a file so many are kept from the beginning, and so many from the end.
KEPT = 8

TAIL_LINES = 20


class LogFile(msgspec.Struct, frozen=True):
    """One file, and whose output it holds, as far as its path shows. `rank` is the global one."""

    path: Path
    rank: int | None
    node: str | None
    kind: LogKind

    @property
    def name(self) -> str:
        """The path as records can hold it: they are UTF-8, and of a path that is not some bytes are escaped."""
        return os.fsencode(self.path).decode(errors="backslashreplace")


class Hit(msgspec.Struct, frozen=True):
    """A line that a rule recognises.

    `line` counts the file's newlines, from 1. `offset` is where the line's text begins, in bytes of the file's text:
    as it is once unpacked, and in UTF-8. `text` has no control characters and at most 400 characters. `rank` and
    `node` are those whose line it is: by the line's own label, else by the file, else by the rule's groups. `t` is
    seconds since the epoch, by the line's own stamp, or that of the traceback it ends; None: it has none.

    `groups` are the pattern's named groups, and for the last line of a Python traceback: `frames` (`file.py:12 in f`,
    innermost last, joined by `|`) and, where it may have ended no process, `non_fatal` (see tracebacks.py).
    `local_rank`: the line's label names a rank within its node.
    """

    file: LogFile
    line: int
    text: str
    rule: Rule
    rank: int | None
    node: str | None
    t: float | None
    groups: Mapping[str, str]
    offset: int


class FileScan(msgspec.Struct):
    """What was read of one file, beside its hits.

    `size_bytes`: of its text. `tail`: its last lines, at most 20. `head`: its first line that is not empty. `first_t`
    and `last_t`: seconds since the epoch, of the first and the last stamp near its beginning and its end. `starts`:
    offsets at which its first lines come again, where another run may begin. `problem`: why it could not be read, or
    not to its end.
    """

    size_bytes: int = 0
    tail: tuple[str, ...] = ()
    head: str = ""
    first_t: float | None = None
    last_t: float | None = None
    starts: tuple[int, ...] = ()
    problem: str | None = None


class Scan(msgspec.Struct, frozen=True):
    """What was read and found.

    `hits` are in the order of `files` and lines; of each file and rule the first 8 and the last 8. Noise has none,
    nor has a line that noise matches. `reads`: by the file's path; a file that was not read has none. `problems`:
    what could not be read, and why; a scan that was stopped says so here.
    """

    hits: tuple[Hit, ...]
    files: tuple[LogFile, ...]
    reads: Mapping[Path, FileScan] = {}
    problems: tuple[str, ...] = ()

    @property
    def bytes_read(self) -> int:
        return sum(read.size_bytes for read in self.reads.values())

    @property
    def ranks(self) -> frozenset[int]:
        """Those that a file or a line names."""
        named = {file.rank for file in self.files} | {hit.rank for hit in self.hits}
        return frozenset(rank for rank in named if rank is not None)

    def of(self, file: LogFile) -> FileScan:
        """What was read of a file; nothing of one that was not read."""
        return self.reads.get(file.path) or FileScan()
