"""What a process uses, as the kernel counts it."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.util.clock import Clock


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far, of all its threads; resident bytes now; and the moment."""

    at_s: float
    cpu_s: float
    resident_bytes: int

    def share_since(self, earlier: Usage) -> float:
        """The share of one core between two moments."""
        return (self.cpu_s - earlier.cpu_s) / (self.at_s - earlier.at_s)


def spent_s(who: int) -> float:
    """CPU seconds so far of this process (RUSAGE_SELF), or of its children that have ended (RUSAGE_CHILDREN)."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def of(pid: int, clock: Clock, *, main_thread: bool = True) -> Usage:
    """What a process uses now; without `main_thread` by its other threads alone."""
    # By nanoseconds (/proc/…/schedstat): in ticks of 10 ms a share of 1 % is lost in the rounding.
    process = Path("/proc") / str(pid)
    threads = [task for task in (process / "task").iterdir() if main_thread or task.name != str(pid)]
    run_ns = sum(int((task / "schedstat").read_text().split()[0]) for task in threads)
    pages = int((process / "statm").read_text().split()[1])
    return Usage(clock.monotonic(), run_ns / 1e9, pages * os.sysconf("SC_PAGE_SIZE"))
