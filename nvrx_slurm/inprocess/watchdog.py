"""Automatic progress: a thread that asks again and again whether the main thread still runs Python code.

It hands the interpreter a *pending call*, which only the main thread carries out, and only between two bytecodes. A
main thread that is stuck in C does not, nor does one that waits for a GIL which native code holds. The call is
`sem_post` of libc: no Python runs on the main thread for it, so no restart, tracer or error can strike there.
"""

from __future__ import annotations

import ctypes
import threading

from nvrx_slurm.inprocess.stamps import Stamps

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
