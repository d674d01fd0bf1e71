"""The 64 bytes that one worker and its agent share: where `workload.beat` writes and the agent reads.

| offset | little-endian | meaning |
|---|---|---|
| 0 | int64 | last step; -1 before the first beat |
| 8 | int64 | how many beats so far |
| 16 | int64 | CLOCK_MONOTONIC of the last beat, nanoseconds (0 before it); one clock for all processes of a node |
| 24 | 40 bytes | zero, for later |

Each number is aligned and stored whole, so a reader never sees half of one. Between two numbers there is no such
promise: a reader may meet the step of one beat beside the count of the one before.
"""

from __future__ import annotations

import mmap
import os
import sys

SLOT_BYTES = 64
_STEP, _COUNT, _NANOSECONDS = 0, 1, 2
_NEVER = -1


def map_slot(path: str | os.PathLike[str]) -> memoryview:
    """The slot at `path` as eight writable int64, shared with every process that maps it.

    Raises OSError if it cannot be opened, ValueError if it is shorter than a slot or the machine is big-endian.
    """
    if sys.byteorder != "little":
        raise ValueError("a beat slot is little-endian; this machine is not")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        shared = mmap.mmap(descriptor, SLOT_BYTES)
    finally:
        os.close(descriptor)
    return memoryview(shared).cast("q")


class Slot:
    """The agent's side of a slot."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Slot:
        """A fresh slot at `path`, readable by its owner only.

        It takes the place of an older file rather than its content: a worker that is still about keeps writing into
        the old one, where nobody looks, and is not struck by SIGBUS as a truncation would do. Raises OSError.
        """
        fresh = f"{os.fspath(path)}.{os.getpid()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _NEVER.to_bytes(8, "little", signed=True).ljust(SLOT_BYTES, b"\0"))
        finally:
            os.close(descriptor)
        os.replace(fresh, path)  # noqa: PTH105  pathlib takes longer to import than all of this
        return cls(map_slot(path))

    def read(self) -> tuple[int | None, int, int]:
        """Last step (None before the first beat), number of beats, and when the last was (monotonic nanoseconds)."""
        step = self._words[_STEP]
        return (None if step == _NEVER else step), self._words[_COUNT], self._words[_NANOSECONDS]

    def close(self) -> None:
        """Unmaps the slot; the file stays, and so does the worker's own mapping. Reading after it is a ValueError."""
        shared = self._words.obj
        self._words.release()
        assert isinstance(shared, mmap.mmap)
        shared.close()
