"""Where each number lies in a slot (the table is in `slot.py`), and how a process maps one."""

from __future__ import annotations

import os
import sys

SLOT_BYTES = 4096

# words of the header
STEP, BEATS, SIGN, GAP, OWNER, MAIN_OPEN, RESTARTED, BEATS_BEFORE = range(8)

# rows of the table of names; offsets within a row
ROWS, ROW_WORDS, ROW_COUNT = 8, 7, 16
NAME_WORDS, COUNT, LARGEST = 5, 5, 6
NAME_BYTES = 8 * NAME_WORDS

# entries of open sections; offsets within an entry
OPEN, ENTRY_WORDS, ENTRY_COUNT = ROWS + ROW_WORDS * ROW_COUNT, 4, 16
STARTED, TIMEOUT, WHAT, SEAL = range(4)
OPEN_END = OPEN + ENTRY_WORDS * ENTRY_COUNT
MAIN_THREAD = 1 << 8  # the flag in WHAT; the row is the byte below

NEVER = -1
UNDER_WAY = -1
# The name that all sections share for which no row is left.
OTHERS = "…"


def row_at(row: int) -> int:
    """The first word of a row."""
    return ROWS + ROW_WORDS * row


def name_in(words: memoryview, row: int) -> str:
    """The name in a row; empty if the row is free."""
    at = row_at(row)
    return words[at : at + NAME_WORDS].tobytes().rstrip(b"\0").decode(errors="replace")


def map_slot(path: str | os.PathLike[str]) -> memoryview:
    """The slot at `path` as 512 writable int64, shared with every process that maps it.

    Raises OSError if it cannot be opened, ValueError if it is shorter than a slot or the machine is big-endian.
    """
    import mmap  # here: a process without an agent never needs it

    if sys.byteorder != "little":
        raise ValueError("a slot is little-endian; this machine is not")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        shared = mmap.mmap(descriptor, SLOT_BYTES)
    finally:
        os.close(descriptor)
    return memoryview(shared).cast("q")
