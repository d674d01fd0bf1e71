"""The self-fence timer: the kernel kills this process when its lease has lapsed, even while it is stopped.

A process that is frozen (SIGSTOP, a cgroup's freezer) cannot look at its lease, and if its node is cut off as well
no fence reaches it. A POSIX timer needs neither: its SIGKILL is the kernel's, ends stopped processes too, and takes
along all that die with this one (a supervisor's workers, a monitor's rank), so what thaws later takes no step.
Standard library only.
"""

from __future__ import annotations

import ctypes
import math
import signal

CLOCK_MONOTONIC = 1
SIGEV_SIGNAL = 0
SIGEVENT_BYTES = 64


class _SignalEvent(ctypes.Structure):
    """The head of `struct sigevent` (sigevent(7))."""

    _fields_ = (("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int))


class _Setting(ctypes.Structure):
    """`struct itimerspec`: every so often, and first after; seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


def _library() -> ctypes.CDLL:
    """Where timer_create(2) is: in glibc itself from 2.34 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)


class SelfFenceTimer:
    """A timer of this process; a child does not inherit it. Where the kernel refuses one, nothing is ever killed."""

    def __init__(self) -> None:
        event = ctypes.create_string_buffer(SIGEVENT_BYTES)
        _SignalEvent.from_buffer(event).number = int(signal.SIGKILL)
        _SignalEvent.from_buffer(event).notify = SIGEV_SIGNAL
        self._timer = ctypes.c_void_p()
        try:
            self._library = _library()
            self.works = self._library.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) == 0
        except OSError:
            self.works = False

    def arm(self, seconds: float) -> None:
        """Have the kernel send SIGKILL to this process after `seconds`, unless `arm` or `disarm` is called before."""
        fraction, whole = math.modf(max(seconds, 1e-9))  # zero would disarm it
        self._set(_Setting(0, 0, int(whole), math.ceil(fraction * 1e9)))

    def disarm(self) -> None:
        """Cancel the SIGKILL."""
        self._set(_Setting(0, 0, 0, 0))

    def _set(self, setting: _Setting) -> None:
        if self.works:
            self._library.timer_settime(self._timer, 0, ctypes.byref(setting), None)
