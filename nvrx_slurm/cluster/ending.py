"""Waiting for a job's end without being a burden: its folder is looked at often, the cluster seldom.

The result in the job folder is the best witness, since it carries the exit code; Slurm's state stands in for a job
that left none. A shared file system sends no event for a change: hence the looks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import (
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_UNREACHABLE,
    NvrxError,
    SlurmUnreachable,
    WaitTimeout,
)
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("wait")

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.1, 1.0, 1.25
RESULT_GRACE_S = 5.0
"""How long the result of a job that ran, and is over, may take to show on a shared file system."""

LOST_AFTER_S = 60.0
"""How long a job that Slurm does not know, and that left no result, is waited for."""

MAY_GO_ON = (EXIT_UNREACHABLE, EXIT_RETRY, EXIT_TERMINATED)
"""How a generation ends that Slurm requeues: then its result is not the job's. Only Slurm can say which it is."""

OnState = Callable[[JobState], None]


def read_result(job: JobFolder) -> Result | None:
    """The result, if there is one. Opening the folder first makes NFS forget that there was no such file."""
    with contextlib.suppress(OSError):
        os.scandir(job.path).close()
    return job.read_result()


class EndWatch:
    """One wait for one job's end: `look`, and until it returns the exit code, wait for `pause_s()` and look again.

    `ask` returns the state and may be called at every look. `on_state` is called with each change.
    """

    def __init__(
        self,
        job: JobFolder,
        ask: Callable[[], JobState],
        clock: Clock,
        *,
        timeout_s: float | None = None,
        on_state: OnState | None = None,
    ) -> None:
        self._job, self._ask, self._clock, self._on_state = job, ask, clock, on_state
        self._began = clock.monotonic()
        self._timeout_s = timeout_s
        self._pause_s = FIRST_PAUSE_S
        self._state: JobState | None = None
        self._state_since = self._began
        self._unanswered = False

    def look(self) -> int | None:
        """The exit code, or None while the job lives.

        Raises WaitTimeout once `timeout_s` has passed, and NvrxError where it is not known any more how it ended.
        """
        result = read_result(self._job)
        if result is None:
            code = self._look_at_cluster()
        elif result.exit_code in MAY_GO_ON and self._is_alive():
            code = None
        else:
            return result.exit_code
        if code is None and self._left_s() <= 0:
            raise WaitTimeout(
                f"job {self._job.job_id} has not ended within {self._timeout_s:g} s:"
                f" it is {self._state or 'in an unknown state, since Slurm does not answer'}"
            )
        return code

    def pause_s(self) -> float:
        """How long to wait before the next look: longer each time, and never beyond the end of the wait."""
        pause, self._pause_s = self._pause_s, min(self._pause_s * PAUSE_GROWTH, LONGEST_PAUSE_S)
        return max(0.0, min(pause, self._left_s()))

    def _is_alive(self) -> bool:
        """Whether Slurm still has the job: it is being cleared away, or goes on as its next generation."""
        try:
            state = self._ask()
        except SlurmUnreachable:
            return False
        self._note(state)
        return state is not JobState.UNKNOWN and not state.terminal

    def _look_at_cluster(self) -> int | None:
        try:
            self._note(self._ask())
        except SlurmUnreachable as error:  # a job does not end because slurmctld is away
            if not self._unanswered:
                log.warning("%s; still waiting for job %s", error, self._job.job_id)
            self._unanswered = True
            return None
        self._unanswered = False
        assert self._state is not None
        if self._state.terminal:
            state = self._state
            result = read_result(self._job)  # written between the first look and the question
            if result is not None:
                return result.exit_code
            may_come = state in (JobState.COMPLETED, JobState.FAILED) and self._job.read_info() is not None
            return None if may_come and self._lasted_s() < RESULT_GRACE_S else state.exit_code
        if self._state is JobState.UNKNOWN and self._lasted_s() > LOST_AFTER_S:
            raise NvrxError(
                f"how job {self._job.job_id} ended is not known: Slurm does not know it any more, keeps no"
                f" accounting of it, and {self._job.path} holds no result"
            )
        return None

    def _note(self, state: JobState) -> None:
        if state is self._state:
            return
        self._state, self._state_since = state, self._clock.monotonic()
        if self._on_state:
            self._on_state(state)

    def _lasted_s(self) -> float:
        return self._clock.monotonic() - self._state_since

    def _left_s(self) -> float:
        if self._timeout_s is None:
            return float("inf")
        return self._began + self._timeout_s - self._clock.monotonic()
