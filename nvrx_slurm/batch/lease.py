"""The job's lease: whether somebody still touches the file that says so.

A shared file system wakes nobody, so the file is looked at. What counts is that it has changed since the last look,
and how long ago that was by this process's own clock: no clock is compared with another's, and a file that is missing
or cannot be read is one that nobody touches.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from nvrx_slurm.jobspec.model import LeaseSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.threads import awaitable_thread

FIRST_LOOKS, LOOKS = 40, 4
"""How often the file is looked at within the timeout: until the first touch, since the job waits for it; and then."""

Version = tuple[int, int]
"""Of a file: when it was last touched (ns), and its size."""

MISSING: Version = (0, 0)


def version_of(path: str) -> Version | None:
    """The file's version; None: it cannot be told.

    The file is opened, since only then does NFS ask the server what is new (close-to-open consistency, nfs(5)).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return MISSING
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        return state.st_mtime_ns, state.st_size
    finally:
        os.close(descriptor)


class Watch:
    """What was seen of the file. Moments are seconds on one monotonic clock. `touched`: at least once so far."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s, self._touched_at = timeout_s, now
        self._version: Version | None = None
        self.touched = False

    def see(self, version: Version | None, now: float) -> bool:
        """What the file is like now; whether it has been touched since the last look. One that comes into being was
        touched, one that goes was not, and the first look only tells what to compare with."""
        if version is None or version == self._version:
            return False
        is_touch = self._version is not None and version != MISSING
        self._version = version
        if is_touch:
            self._touched_at, self.touched = now, True
        return is_touch

    def lapsed(self, now: float) -> bool:
        """Whether nobody has touched the file for the timeout."""
        return now - self._touched_at >= self._timeout_s

    def pause_s(self, now: float) -> float:
        """How long until the next look; never beyond the moment at which the lease lapses."""
        pause_s = self._timeout_s / (LOOKS if self.touched else FIRST_LOOKS)
        return max(0.0, min(pause_s, self._timeout_s - (now - self._touched_at)))


async def kept(lease: LeaseSpec, clock: Clock, on_touch: Callable[[], None]) -> None:
    """Return once the lease has lapsed. `on_touch` is called whenever the file is seen to have been touched.

    The last look begins when the lease is due: who stood still meanwhile does not take that for silence.
    """
    watch = Watch(lease.timeout, clock.monotonic())
    while True:
        looked_at = clock.monotonic()
        if watch.see(await _look(lease), clock.monotonic()):
            on_touch()
        if watch.lapsed(looked_at):
            return
        await asyncio.sleep(watch.pause_s(clock.monotonic()))


async def _look(lease: LeaseSpec) -> Version | None:
    try:
        async with asyncio.timeout(lease.timeout / LOOKS):
            return await awaitable_thread(lambda: version_of(lease.file), "look at the lease")
    except TimeoutError:  # a file system that does not answer
        return None
