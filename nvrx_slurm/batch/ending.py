"""By which signals a job was told to end, and how long it may take. Pure.

Two clocks run. One is the job's own: what its teardown may take, and a margin. The other is Slurm's, when Slurm ends
the job: SIGKILL comes KillWait after SIGTERM, to the batch host too, and by then the result must be written.
"""

from __future__ import annotations

import signal

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_RETRY, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.jobspec import budgets
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.util.processes import AGAIN_S

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
