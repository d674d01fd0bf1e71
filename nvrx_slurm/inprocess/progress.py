"""Signs of progress: when a rank last showed one, and the watchdog that looks whether its main thread runs Python.

`Stamps` are a few words of memory that the rank shares with its monitor. The `Watchdog` stamps automatic progress.
"""

from __future__ import annotations

import ctypes
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


SEMAPHORE_BYTES = 32
"""The size of `sem_t` in 64-bit glibc; musl's is no larger."""

_libc = ctypes.CDLL(None)
_post_address = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

_semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
"""One for the life of the process, since a call may still be pending when its watchdog has gone."""
_libc.sem_init(_semaphore, 0, 0)


class Watchdog:
    """Stamps `automatic` once an interval for as long as the main thread makes progress, from `start` to `stop`.

    A process has one at a time. While the main thread makes none, one call stays pending, and this thread waits for
    it, without polling.
    """

    def __init__(self, stamps: Stamps, interval_s: float) -> None:
        self._stamps, self._interval_s = stamps, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nvrx-watchdog", daemon=True)

    def start(self) -> None:
        """Once in its life."""
        self._thread.start()

    def stop(self) -> None:
        """Called by the main thread. A call that is still pending afterwards does no harm."""
        self._stopped.set()
        _libc.sem_post(_semaphore)
        self._thread.join()

    def _watch(self) -> None:
        while _libc.sem_trywait(_semaphore) == 0:  # what a watchdog before this one has left; only here, before
            pass  # `stopped` is looked at, since the post of our own `stop` must not get lost
        while not self._stopped.is_set():
            if _ask_main_thread():
                self._wait_for_it()
            self._stopped.wait(self._interval_s)

    def _wait_for_it(self) -> None:
        while _libc.sem_wait(_semaphore) != 0:  # a signal came between
            pass
        self._stamps.automatic()  # also if it was `stop`, which the main thread calls


def _ask_main_thread() -> bool:
    """False if more calls are pending already than the interpreter takes: then the next interval tries again."""
    return bool(_add_pending_call(_post_address, ctypes.addressof(_semaphore)) == 0)
