"""Signs of progress: when a rank last showed one, and the watchdog that looks whether its main thread runs Python.

`ProgressStamps` are a few words of memory that the rank shares with its monitor. The `Watchdog` stamps the automatic
progress.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

AUTOMATIC, MANUAL, SUSPENDED, INTERRUPTED, ENDING, KILL_PENDING = range(6)
CELLS = 6
CELL_BYTES = 8


class ProgressStamps:
    """The rank writes, its monitor reads (`kill_pending` the other way round); times are nanoseconds of
    CLOCK_MONOTONIC, one clock for a host.

    Only these words are shared, and no lock. So the monitor can also read those of a rank that is stopped, or whose
    GIL is held. `fd` is for the monitor to inherit, and belongs to this object. After `close` stamps are dropped, so
    that a function which still pings does not fail.
    """

    def __init__(self, fd: int) -> None:
        """For the monitor: the stamps of the rank whose `fd` it has inherited. The rank's own: `create`."""
        self.fd = fd
        self._memory = mmap.mmap(fd, CELLS * CELL_BYTES)
        self._cells = memoryview(self._memory).cast("q")
        self._suspensions = self._begun = 0
        self._lock = threading.Lock()
        # A closure, since that is the fastest call there is: no attribute is looked up.
        cells = self._cells

        def manual() -> None:
            try:
                cells[MANUAL] = monotonic_ns()
            except ValueError:  # closed: a released view refuses
                return

        self.manual = manual
        """The function reports progress, and from now on in this iteration has to. Takes well under a microsecond."""

    @classmethod
    def create(cls) -> ProgressStamps:
        """For the rank: new stamps; the time at which they are made is the first sign of progress."""
        fd = os.memfd_create("nvrx-stamps")
        os.ftruncate(fd, CELLS * CELL_BYTES)
        stamps = cls(fd)
        stamps.automatic()
        return stamps

    def close(self) -> None:
        """Release memory and descriptor; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            shared, self._cells = self._cells, memoryview(bytearray(CELLS * CELL_BYTES)).cast("q")
            shared.release()
            self._memory.close()

    def automatic(self) -> None:
        """The main thread makes progress."""
        self._cells[AUTOMATIC] = monotonic_ns()

    def begin_iteration(self) -> None:
        """Start again: no ping is expected before the first one, no end is expected, and nothing is suspended."""
        with self._lock:
            self._suspensions = 0
            self._begun += 1
            self.automatic()
            self._cells[MANUAL] = self._cells[INTERRUPTED] = self._cells[ENDING] = 0
            # After the stamps: silence from before no longer counts.
            self._cells[SUSPENDED] = 0

    def interrupted(self) -> None:
        """The iteration is: a suspension must end, also in an atomic part, which may go on as long as it makes
        progress."""
        self._cells[INTERRUPTED] = monotonic_ns()

    def expect_end(self) -> None:
        """The function must be left: from now on only the next `begin_iteration` is progress."""
        self._cells[ENDING] = monotonic_ns()

    def suspend(self) -> int:
        """No progress is expected until `resume`, which takes what this returns; both nest, in any thread."""
        with self._lock:
            self._suspensions += 1
            self._cells[SUSPENDED] = self._suspensions
            return self._begun

    def resume(self, suspended: int | None = None) -> None:
        """End a suspension. Silence counts from now, not from before the suspension. Without one nothing happens.

        `suspended`: what `suspend` has returned. One of an iteration that is over has ended with it: a thread that is
        left of that iteration changes nothing."""
        with self._lock:
            if suspended not in (None, self._begun):
                return
            if self._suspensions == 1:
                self.automatic()
                if self._cells[MANUAL]:
                    self.manual()
            self._suspensions = max(0, self._suspensions - 1)
            self._cells[SUSPENDED] = self._suspensions

    @property
    def kill_pending(self) -> bool:
        """Whether the monitor is about to end the rank's process. The monitor writes it, the rank reads it: it must
        not go on to another iteration, only to be killed there."""
        return bool(self._cells[KILL_PENDING])

    @kill_pending.setter
    def kill_pending(self, is_pending: bool) -> None:
        self._cells[KILL_PENDING] = is_pending

    def silent_s(self, now_ns: int) -> float:
        """How long there has been no progress, in seconds, by the oldest stamp that counts. While suspended 0; or,
        once the iteration is interrupted or an end is expected, since then: no suspension puts that off."""
        automatic, manual, ending = self._cells[AUTOMATIC], self._cells[MANUAL], self._cells[ENDING]
        if self._cells[SUSPENDED]:
            since = ending or self._cells[INTERRUPTED]
            return max(0.0, (now_ns - since) / 1e9) if since else 0.0
        return max(0.0, (now_ns - min(automatic, manual or automatic, ending or automatic)) / 1e9)


SEMAPHORE_BYTES = 32  # the size of `sem_t` in 64-bit glibc; musl's is no larger
_libc = ctypes.CDLL(None)
_post_address = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_add_pending_call: Any = getattr(ctypes.pythonapi, "Py_AddPendingCall", None)  # CPython has it, others may not
if HAS_PENDING_CALLS := _add_pending_call is not None:
    _add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

# One for the life of the process, since a call may still be pending after its watchdog has stopped.
_semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
_libc.sem_init(_semaphore, 0, 0)


class Watchdog:
    """Stamps `automatic` once an interval for as long as the main thread makes progress, from `start` to `stop`.

    It gives the interpreter a *pending call*, which only the main thread executes, between two bytecodes. A process
    has one watchdog at a time.
    """

    def __init__(self, stamps: ProgressStamps, interval_s: float) -> None:
        self._stamps, self._interval_s = stamps, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nvrx-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; once in the watchdog's life."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; for the main thread. A call that is still pending afterwards does no harm."""
        self._stopped.set()
        _libc.sem_post(_semaphore)
        self._thread.join()

    def _watch(self) -> None:
        # An earlier watchdog may have left a post. It is removed here, before `stopped` is read: so the post of this
        # watchdog's own `stop` is never lost.
        while _libc.sem_trywait(_semaphore) == 0:
            pass
        while not self._stopped.is_set():
            # The call is `sem_post` of libc: no Python runs in the main thread for it, so no restart, tracer or error
            # can interfere. It is refused where too many calls are pending: then the next interval tries again.
            if _add_pending_call(_post_address, ctypes.addressof(_semaphore)) == 0:
                # A main thread that is stuck in C, or that waits for a GIL which native code holds, does not execute
                # the call. Then it stays pending, and this thread waits here, without polling. Not 0: a signal has
                # interrupted the wait.
                while _libc.sem_wait(_semaphore) != 0:
                    pass
                # Also if the post came from `stop`: the main thread calls that.
                self._stamps.automatic()
            self._stopped.wait(self._interval_s)


class SignalWatchdog:
    """The same without CPython's pending calls, only by what the Python manual promises: a signal's Python handler
    runs in the main thread, between two bytecodes, also if another thread received the signal.

    `ask` raises that signal in the watchdog's own thread, so no system call of the main thread is interrupted. The
    handler stamps. Unlike a pending call it is Python code: tracers see it, and `signal.set_wakeup_fd` writes a byte
    each time, which wakes an event loop that has set it (asyncio's with `add_signal_handler`, trio's).
    """

    def __init__(self, ask: Callable[[], None], interval_s: float) -> None:
        self._ask, self._interval_s = ask, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nvrx-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; once in the watchdog's life."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Afterwards no signal is raised."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._ask()
            self._stopped.wait(self._interval_s)
