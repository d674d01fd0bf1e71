"""Why a job must end, and how long that may take: the signals, Slurm's KillWait, and the job's own lease.

Two clocks run. One is the job's own: what its teardown may take, and a margin. The other is Slurm's, when Slurm ends
the job: SIGKILL comes KillWait after SIGTERM, to the batch host too, and by then the result must be written.

The lease is a file that its owner touches. A shared file system sends no event for that, so the file is polled. What
counts is that it has changed since the last look, and how long ago that was by this process's own clock: clocks
are never compared. A file that is missing or cannot be read counts as not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_NO_RESTART, EXIT_RETRY, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.jobspec import budgets
from nvrx_slurm.jobspec.model import FaultToleranceSpec, LeaseSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import AGAIN_S
from nvrx_slurm.util.threads import awaitable_thread

# What the end of a job may take beyond its teardown: agents that never answer, the kill, the last words.
ENDING_MARGIN_S = 25.0

# What a batch host keeps of KillWait for itself: it writes the result, and clears away.
MOST_LAST_WORDS_S, LAST_WORDS_SHARE = 4.0, 0.25

SHORTEST_WAIT_S = 0.2
# The signals by which Slurm, or the user, ends a job. SIGUSR1 announces the time limit ahead of time.
AT_ONCE = (signal.SIGTERM, signal.SIGINT)

EXIT_CODES = {
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGUSR1: EXIT_TIMEOUT,
    signal.SIGUSR2: EXIT_RETRY,  # every agent is gone
    signal.SIGALRM: EXIT_NO_RESTART,  # no agent can run
    signal.SIGHUP: EXIT_TERMINATED,  # the terminal of `run` was closed
    signal.SIGQUIT: EXIT_TERMINATED,  # the lease has lapsed
}


class Ending:
    """Takes the signals as they arrive. Moments are seconds on one monotonic clock; `kill_wait_s` is Slurm's
    KillWait, None where there is no Slurm, or it did not answer; `again_s`: what comes within so long of the first is
    the same signal."""

    def __init__(self, bounds: FaultToleranceSpec, kill_wait_s: float | None, *, again_s: float = AGAIN_S) -> None:
        self._bounds, self._kill_wait_s, self._again_s = bounds, kill_wait_s, again_s
        self._asked_at = 0.0
        self.asked: signal.Signals | None = None  # the first one: it says why the job ends
        self.give_up_at = float("inf")  # when the batch host ends the job by itself
        self.killed_at = float("inf")  # when Slurm kills the batch host

    def take(self, number: signal.Signals, now: float) -> float | None:
        """A signal arrived. Returns in how many seconds the agents must kill their workers because of it; None: their
        time stays as it is."""
        teardown, kill_wait_s = self._bounds.teardown, self._kill_wait_s
        first, again = self.asked is None, number is self.asked and now - self._asked_at > self._again_s
        sooner = not first and number is not self.asked and number in AT_ONCE
        if first:
            self.asked, self._asked_at = number, now
        saving_s = teardown.checkpoint_s if number is signal.SIGUSR1 else 0.0
        ends_within_s = saving_s + teardown.grace + ENDING_MARGIN_S
        if number in AT_ONCE and kill_wait_s is not None:
            self.killed_at = min(self.killed_at, now + kill_wait_s)
            last_words_s = min(MOST_LAST_WORDS_S, LAST_WORDS_SHARE * kill_wait_s)
            ends_within_s = min(ends_within_s, kill_wait_s - last_words_s)
        self.give_up_at = min(self.give_up_at, now + ends_within_s)
        if again:  # the same signal a second time means "now"
            return 0.0
        if not sooner:
            return None
        # Workers that still save have as long as any teardown has from now on.
        return teardown.grace if kill_wait_s is None else min(teardown.grace, budgets.grace_within(kill_wait_s))

    @property
    def exit_code(self) -> int:
        """Of a job that had to be ended without its controller."""
        assert self.asked is not None
        return EXIT_CODES[self.asked]

    def in_time(self, wait_s: float, now: float) -> float:
        """How long one of the last few waits may take: `wait_s`, or its share of what Slurm leaves."""
        # A quarter of what is left: several waits follow one another, and an end that is cut off leaves files behind.
        return max(SHORTEST_WAIT_S, min(wait_s, (self.killed_at - now) / 4))


# How often the file is looked at within the timeout: until the first touch, since the job waits for it; and then.
FIRST_LOOKS, LOOKS = 40, 4

# Of a file: when it was last touched (ns), and its size.
Version = tuple[int, int]

MISSING: Version = (0, 0)


def version_of(path: str) -> Version | None:
    """The file's version; None: it cannot be read."""
    try:
        # Opened, and no stat(2): only then does NFS ask the server what is new (close-to-open consistency, nfs(5)).
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


class LeaseWatch:
    """What was seen of the file. Moments are seconds on one monotonic clock. `touched`: at least once so far."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s, self._touched_at = timeout_s, now
        self._version: Version | None = None
        self.touched = False

    def see(self, version: Version | None, now: float) -> bool:
        """Take in a look at the file. Returns whether it has been touched since the look before."""
        if version is None or version == self._version:
            return False
        # A file that appears was touched, one that disappears was not. The first look has nothing to compare with.
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
    """Return once the lease has lapsed. `on_touch` is called whenever the file is seen to have been touched."""
    watch = LeaseWatch(lease.timeout, clock.monotonic())
    while True:
        looked_at, version = clock.monotonic(), None
        with contextlib.suppress(TimeoutError):  # a file system that does not answer
            async with asyncio.timeout(lease.timeout / LOOKS):
                version = await awaitable_thread(lambda: version_of(lease.file), "look at the lease")
        if watch.see(version, clock.monotonic()):
            on_touch()
        # Judged by when the look began: after a freeze the host looks once more before the lease counts as lapsed.
        if watch.lapsed(looked_at):
            return
        await asyncio.sleep(watch.pause_s(clock.monotonic()))
