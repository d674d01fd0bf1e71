"""Another process: whether it lives, how it ended, and signals that reach no later one of the same number."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable

from nvrx_slurm.util.processes import started_ticks, stat_fields

# Places in `stat_fields`: fields 9 and 52 of /proc/PID/stat (proc(5)).
_FLAGS, _EXIT_CODE = 6, 49
_PF_EXITING = 0x4


def find(pid: int, began_at: int) -> int | None:
    """A pidfd of the process that began then; None if it is not there (any more), or cannot be seen from here."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        if started_ticks(pid) == began_at:
            return pidfd
        os.close(pidfd)
    return None


def ended_within(pidfd: int, seconds: float) -> bool:
    """Wait so long for a process's end. Returns whether it has come."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


class WatchedProcess:
    """One process, by a pidfd: it is readable once the process has ended, reaped or not."""

    def __init__(self, pidfd: int, pid: int) -> None:
        self.pidfd, self.pid = pidfd, pid
        self._began = started_ticks(pid)

    def send(self, signals: Iterable[signal.Signals]) -> None:
        """Signals, in order; none if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            for number in signals:
                signal.pidfd_send_signal(self.pidfd, number)

    def ended_within(self, seconds: float) -> bool:
        """Wait so long for its end. Returns whether it has come."""
        return ended_within(self.pidfd, seconds)

    def is_ending(self) -> bool:
        """Whether it is on its way out: it has closed its descriptors, and may yet be at its memory and devices."""
        flags = _field(self.pid, _FLAGS)
        return flags is None or bool(flags & _PF_EXITING)

    def how_it_ended(self) -> str:
        """In words. Its parent may have taken the particulars away."""
        status = _field(self.pid, _EXIT_CODE) if started_ticks(self.pid) == self._began else None
        if status is None:
            return f"process {self.pid} has ended"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            # A real-time signal is not.
            known = number in set(signal.Signals)
            return f"process {self.pid} was ended by {signal.Signals(number).name if known else f'signal {number}'}"
        return f"process {self.pid} ended with exit code {os.WEXITSTATUS(status)} and had not left the call"


def _field(pid: int, place: int) -> int | None:
    """One of a process's; None if it is gone. Its exit code is there once it has ended, until it is waited for."""
    fields = stat_fields(pid)
    return None if fields is None else int(fields[place])
