"""When a rank last showed progress: a few words of memory that it shares with its monitor."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from time import monotonic_ns

ITERATION, AUTOMATIC, MANUAL, SUSPENDED, ENDING = range(5)
CELLS = 5
CELL_BYTES = 8


class Stamps:
    """The rank writes, its monitor reads; times are nanoseconds of CLOCK_MONOTONIC, one clock for all of a host.

    No lock is shared, and nothing is told apart from the words themselves, so a rank that is stopped, or whose GIL is
    held, can be read as well as any. `fd` is for the monitor to inherit, and belongs to this object. After `close`
    what is stamped goes nowhere, so whoever still pings is not disturbed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, CELLS * CELL_BYTES)
        self._cells = memoryview(self._memory).cast("q")
        self._suspensions = 0
        self._lock = threading.Lock()
        self.manual = _pinger(self._cells)
        """The function says that it makes progress, and from now on in this iteration has to. Well under a µs."""

    @classmethod
    def create(cls) -> Stamps:
        """For the rank: new ones, with the time of their making as the first sign of progress."""
        fd = os.memfd_create("nvrx-stamps")
        os.ftruncate(fd, CELLS * CELL_BYTES)
        stamps = cls(fd)
        stamps.automatic()
        return stamps

    @classmethod
    def attach(cls, fd: int) -> Stamps:
        """For the monitor: those of the rank whose `fd` it has inherited."""
        return cls(fd)

    def close(self) -> None:
        """Give memory and descriptor back; a second time does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            shared, self._cells = self._cells, memoryview(bytearray(CELLS * CELL_BYTES)).cast("q")
            shared.release()
            self._memory.close()

    def automatic(self) -> None:
        """The main thread makes progress."""
        self._cells[AUTOMATIC] = monotonic_ns()

    def begin_iteration(self, iteration: int) -> None:
        """Count anew: no ping is expected until the first one, no end, and no suspension is left over."""
        with self._lock:
            self._suspensions = 0
            self.automatic()
            self._cells[MANUAL] = self._cells[ENDING] = 0
            self._cells[SUSPENDED] = 0  # after the stamps: silence from before counts no more
            self._cells[ITERATION] = iteration  # last: whoever reads it first finds no older stamps with it

    def expect_end(self) -> None:
        """The function is to be left: from now on nothing is progress but the next `begin_iteration`."""
        self._cells[ENDING] = monotonic_ns()

    def suspend(self) -> None:
        """No progress is expected until `resume`; both nest, in any thread."""
        with self._lock:
            self._suspensions += 1
            self._cells[SUSPENDED] = self._suspensions

    def resume(self) -> None:
        """End a suspension. Time counts from here, not from before it. Nothing happens without one."""
        with self._lock:
            if self._suspensions == 1:
                self.automatic()
                if self._cells[MANUAL]:
                    self.manual()
            self._suspensions = max(0, self._suspensions - 1)
            self._cells[SUSPENDED] = self._suspensions

    @property
    def iteration(self) -> int:
        """The iteration that the stamps are of. Read it before `silent_s`, if both are to belong together."""
        return self._cells[ITERATION]

    def silent_s(self, now_ns: int) -> float:
        """How long there has been no progress, in seconds: 0 while suspended; by the oldest stamp that counts."""
        if self._cells[SUSPENDED]:
            return 0.0
        automatic, manual, ending = self._cells[AUTOMATIC], self._cells[MANUAL], self._cells[ENDING]
        return max(0.0, (now_ns - min(automatic, manual or automatic, ending or automatic)) / 1e9)


def _pinger(cells: memoryview[int]) -> Callable[[], None]:
    """A closure, since that is the fastest call there is: no attribute is looked up."""

    def manual() -> None:
        try:
            cells[MANUAL] = monotonic_ns()
        except ValueError:  # closed: a released view refuses
            return

    return manual
