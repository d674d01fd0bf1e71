"""Waiting for a job's end without being a burden: its folder is looked at often, the cluster seldom.

The result in the job folder is the best witness, since it carries the exit code; Slurm's state stands in for a job
that left none. A shared file system sends no event for a change: hence the looks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from nvrx_slurm.cluster.states import JobState, state_of_word
from nvrx_slurm.cluster.tasks import exit_code_of, exit_code_of_tasks, results_of_tasks
from nvrx_slurm.errors import (
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_UNREACHABLE,
    BatchHostLost,
    NvrxError,
    SlurmUnreachable,
    UsageError,
    WaitTimeout,
)
from nvrx_slurm.journal.folder import CLOCKS_DIFFER_S, JobFolder, Result, SlurmEnd
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("wait")

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.1, 1.0, 1.25
# How long the result of a job that ran, and is over, may take to show on a shared file system.
RESULT_GRACE_S = 5.0

# How long a job that Slurm does not know, and that left no result, is waited for.
LOST_AFTER_S = 60.0

# How often a job that Slurm calls RUNNING, and that has started no agent, is asked about its batch host.
NOT_BEGUN_S = 120.0

# How a generation ends that Slurm requeues: then its result is not the job's. Only Slurm can say which it is.
MAY_GO_ON = (EXIT_UNREACHABLE, EXIT_RETRY, EXIT_TERMINATED)

OnState = Callable[[JobState], None]


def read_result(job: JobFolder) -> Result | None:
    """The result, if there is one."""
    # Opening the folder first makes an NFS client forget that there was no such file.
    with contextlib.suppress(OSError):
        os.scandir(job.path).close()
    return job.read_result()


def last_known(job: JobFolder, state: JobState, now: float) -> JobState:
    """The state of a job that left no result, or one that is perhaps not its last, given what Slurm says of it now.
    What it says of a job that is over is kept in the folder; once Slurm has forgotten the job (UNKNOWN), that is the
    answer."""
    if state is JobState.UNKNOWN:
        end = job.read_slurm_end()
        return state if end is None else state_of_word(end.state)
    if state.terminal and os.path.isdir(job.path):
        with contextlib.suppress(OSError, UsageError):  # a folder that cannot be written: then it is not kept
            if job.read_slurm_end() is None:
                job.write_slurm_end(SlurmEnd(state=state.value, seen_at=now))
    return state


def goes_on(result: Result, state: JobState | None) -> bool:
    """Whether Slurm still has a job that has left this result: it requeues the job, or clears it away and may yet
    requeue it. `state`: what Slurm says now; None: nothing."""
    alive = state is not None and state is not JobState.UNKNOWN and not state.terminal
    return result.exit_code in MAY_GO_ON and alive


def last_result(job: JobFolder, result: Result, ask: Callable[[], JobState | None], now: float) -> Result | None:
    """The job's result, where a generation of it has left `result`; None: it goes on. Slurm is asked only where a
    requeue may have left the result."""
    if result.exit_code not in MAY_GO_ON:
        return result
    state = ask()
    if goes_on(result, state):
        return None
    if state is None:
        return result
    last_known(job, state, now)
    return read_result(job)


class EndWatch:
    """One wait for one job's end: `look`, and until it returns the exit code, wait for `pause_s()` and look again.

    `ask` returns the state and may be called at every look. `on_state` is called with each change,
    `on_pending` at each look that finds the job in the queue. `lost_batch_host`: the node, where Slurm has taken it
    from the running job.
    """

    def __init__(
        self,
        job: JobFolder,
        ask: Callable[[], JobState],
        clock: Clock,
        *,
        timeout_s: float | None = None,
        on_state: OnState | None = None,
        on_pending: Callable[[], None] | None = None,
        lost_batch_host: Callable[[], str | None] | None = None,
    ) -> None:
        self._job, self._ask, self._clock, self._on_state = job, ask, clock, on_state
        self._on_pending, self._lost_batch_host = on_pending, lost_batch_host
        self._ask_for_host_after_s = NOT_BEGUN_S
        self._began = clock.monotonic()
        self._timeout_s = timeout_s
        self._pause_s = FIRST_PAUSE_S
        self._state: JobState | None = None
        self._state_since = self._began
        self._unanswered = False

    def look(self) -> int | None:
        """The exit code, or None while the job lives.

        Raises WaitTimeout once `timeout_s` has passed, BatchHostLost where the job will never begin, and NvrxError
        where it is not known any more how it ended.
        """
        result = read_result(self._job)
        if result is None:
            code = self._look_at_cluster()
        elif (last := last_result(self._job, result, self._noted, self._clock.wall())) is not None:
            return last.exit_code
        else:
            code = None
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

    def _noted(self) -> JobState | None:
        """The state, if there is an answer."""
        try:
            state = self._ask()
        except SlurmUnreachable:
            return None
        self._note(state)
        return state

    def _look_at_cluster(self) -> int | None:
        try:
            self._note(last_known(self._job, self._ask(), self._clock.wall()))
            self._look_at_batch_host()
        except SlurmUnreachable as error:
            # A job does not end because slurmctld is away: wait on, and say so once.
            if not self._unanswered:
                log.warning("%s; still waiting for job %s", error, self._job.job_id)
            self._unanswered = True
            return None
        self._unanswered = False
        assert self._state is not None
        if self._state is JobState.PENDING and self._on_pending:
            self._on_pending()
        if self._state.terminal:
            state = self._state
            # The job may have written its result between the first look and the question.
            result = read_result(self._job)
            if result is not None:
                return result.exit_code
            # A state that the folder has kept is no news: that job's result would be there.
            has_started = self._job.read_info() is not None or None in results_of_tasks(self._job).values()
            may_come = has_started and state in (JobState.COMPLETED, JobState.FAILED)
            if may_come and self._lasted_s() < RESULT_GRACE_S:
                return None
            return exit_code_of(self._job, state)
        if self._state is JobState.UNKNOWN and self._lasted_s() > LOST_AFTER_S:
            if (code := exit_code_of_tasks(self._job)) is not None:
                return code
            if (info := self._job.read_info()) is not None and info.cluster == "local":
                raise UsageError(
                    f"whether job {info.job_id} still runs only its host, {info.host}, can say: wait there"
                )
            raise NvrxError(
                f"how job {self._job.job_id} ended is not known: Slurm does not know it any more, keeps no"
                f" accounting of it, and {self._job.path} holds no result"
            )
        return None

    def _look_at_batch_host(self) -> None:
        """Raises BatchHostLost where the job will never begin."""
        # The node of the batch host may be lost in the moment in which Slurm starts the job: then no agent of it ever
        # runs, and `--no-kill` keeps the job RUNNING until its time limit. An agent that runs has Slurm requeue it.
        if self._lost_batch_host is None or self._state is not JobState.RUNNING:
            return
        if self._lasted_s() < self._ask_for_host_after_s or self._has_agents():
            return
        self._ask_for_host_after_s = self._lasted_s() + NOT_BEGUN_S
        if (host := self._lost_batch_host()) is not None:
            number = self._job.job_id
            raise BatchHostLost(
                f"job {number} never began: Slurm lost its batch host {host} while it started the job, and keeps it"
                f" RUNNING, empty; `scontrol requeue {number}` starts it again, `scancel {number}` ends it"
            )

    def _has_agents(self) -> bool:
        """Whether an agent of this generation has begun its log."""
        info = self._job.read_info()
        if info is None:
            return False
        logs = (self._job.node_log(node) for node in info.nodes)
        # A node may have a log of an earlier generation: it counts only if it was written in this one.
        newest = max((log.stat().st_mtime for log in logs if log.is_file()), default=0.0)
        return info.allocation is not None or newest > info.started_at - CLOCKS_DIFFER_S

    def _note(self, state: JobState) -> None:
        if state is self._state:
            return
        self._state, self._state_since = state, self._clock.monotonic()
        self._ask_for_host_after_s = NOT_BEGUN_S
        if self._on_state:
            self._on_state(state)

    def _lasted_s(self) -> float:
        return self._clock.monotonic() - self._state_since

    def _left_s(self) -> float:
        if self._timeout_s is None:
            return float("inf")
        return self._began + self._timeout_s - self._clock.monotonic()
