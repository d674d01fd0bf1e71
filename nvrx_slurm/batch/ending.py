"""Why a job must end, and how long that may take: the signals, Slurm's KillWait, and the job's own lease.

Two clocks run. One is the job's own: what its teardown may take, and a margin. The other is Slurm's, when Slurm ends
the job: SIGKILL comes KillWait after SIGTERM, to the batch host too, and by then the result must be written.

The lease is a file that its owner touches. A shared file system sends no event for that, so the file is polled. What
counts is that it has changed since the last look, and how long ago that was by this process's own clock: clocks
are never compared. A file that is missing or cannot be read counts as not touched.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_RETRY, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.jobspec import budgets
from nvrx_slurm.jobspec.model import FaultToleranceSpec, LeaseSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import AGAIN_S
from nvrx_slurm.util.threads import awaitable_thread

ENDING_MARGIN_S = 25.0
"""What the end of a job may take beyond its teardown: agents that never answer, the kill, the last words."""

MOST_LAST_WORDS_S, LAST_WORDS_SHARE = 4.0, 0.25
"""What a batch host keeps of KillWait for itself: it writes the result, and clears away."""

SHORTEST_WAIT_S = 0.2
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
"""The signals by which Slurm, or the user, ends a job. SIGUSR1 tells of the time limit ahead of time."""

EXIT_CODES = {
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGUSR1: EXIT_TIMEOUT,
    signal.SIGUSR2: EXIT_RETRY,  # every agent is gone
    signal.SIGHUP: EXIT_TERMINATED,  # the lease has lapsed
}


class Ending:
    """Takes the signals as they come. Moments are seconds on one monotonic clock; `kill_wait_s` is Slurm's KillWait,
    None where there is no Slurm, or it did not say."""

    def __init__(self, bounds: FaultToleranceSpec, kill_wait_s: float | None) -> None:
        self._bounds, self._kill_wait_s = bounds, kill_wait_s
        self._asked_at = 0.0
        self.asked: signal.Signals | None = None  # the first one: it says why the job ends
        self.give_up_at = float("inf")  # when the batch host ends the job by itself
        self.killed_at = float("inf")  # when Slurm kills the batch host

    def take(self, number: signal.Signals, now: float) -> float | None:
        """A signal came. Returns in how many seconds the agents must kill their workers because of it; None: they
        have the time that they have.

        The same signal again means "now". Another one means that less time is left: for workers that still save, as
        much as any teardown has then.
        """
        first, again = self.asked is None, number is self.asked and now - self._asked_at > AGAIN_S
        sooner = not first and number is not self.asked and number in AT_ONCE
        if first:
            self.asked, self._asked_at = number, now
        if number in AT_ONCE and self._kill_wait_s is not None:
            self.killed_at = min(self.killed_at, now + self._kill_wait_s)
        self.give_up_at = min(self.give_up_at, now + self._ends_within_s(number))
        return 0.0 if again else self._grace_s() if sooner else None

    @property
    def exit_code(self) -> int:
        """Of a job that had to be ended without its controller."""
        assert self.asked is not None
        return EXIT_CODES[self.asked]

    def in_time(self, wait_s: float, now: float) -> float:
        """How long one of the last few waits may take: `wait_s`, or its share of what Slurm leaves. An end that Slurm
        cuts off leaves files behind."""
        return max(SHORTEST_WAIT_S, min(wait_s, (self.killed_at - now) / 4))

    def _ends_within_s(self, number: signal.Signals) -> float:
        bounds, kill_wait_s = self._bounds, self._kill_wait_s
        saving_s = _saving_s(bounds) if number is signal.SIGUSR1 else 0.0
        own_s = saving_s + bounds.teardown.grace + ENDING_MARGIN_S
        if kill_wait_s is None or number not in AT_ONCE:
            return own_s
        return min(own_s, kill_wait_s - min(MOST_LAST_WORDS_S, LAST_WORDS_SHARE * kill_wait_s))

    def _grace_s(self) -> float:
        grace_s, kill_wait_s = self._bounds.teardown.grace, self._kill_wait_s
        return grace_s if kill_wait_s is None else min(grace_s, budgets.grace_within(kill_wait_s))


def notice_s(bounds: FaultToleranceSpec, time_limit_s: float) -> float:
    """How long before its time limit a job without Slurm is told; Slurm is asked for as much (`sbatch --signal`)."""
    return min(time_limit_s, budgets.notice_s(bounds.teardown.grace, _saving_s(bounds), time_limit_s))


def _saving_s(bounds: FaultToleranceSpec) -> float:
    return bounds.teardown.checkpoint_s


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
        """Whether the file has not been touched for the timeout."""
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
