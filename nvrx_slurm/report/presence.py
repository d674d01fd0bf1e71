"""Whether a process still runs a job: so that a reader stops waiting when its journal has no end.

A batch host that is killed, or whose node dies, journals no end. Then its own process (a local job) or Slurm says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvrx_slurm.errors import NvrxError, SlurmUnreachable
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.durations import DAY_S

if TYPE_CHECKING:
    from nvrx_slurm.cluster.queue_place import QueuePlace
    from nvrx_slurm.cluster.states import JobState

ASK_SLURM_EVERY_S = 30.0
# How long after its submission a job may be unknown to Slurm.
FORGOTTEN_S = 60.0
# How long after a job's end Slurm may still have it, and how long after a requeue, which waits in the queue.
LINGERS_S, MAY_WAIT_S = 600.0, 30 * DAY_S


@dataclass(frozen=True, slots=True)
class OutsideState:
    """What others than the job itself say of it. In doubt (no answer from Slurm, another host) it lives."""

    over: bool = False
    slurm_says: str | None = None
    exit_code: int | None = None  # what stands for Slurm's state, where the job left no result
    queue: QueuePlace | None = None  # of a job that is pending


def ask_slurm(job_ids: Sequence[str]) -> Mapping[str, JobState]:
    """Slurm's state of each job, in one call to each cluster; nothing where Slurm cannot be asked."""
    from nvrx_slurm.cluster.slurm import SlurmCluster
    from nvrx_slurm.cluster.slurm_text import by_cluster

    found: dict[str, JobState] = {}
    for numbers in by_cluster(job_ids).values():
        with contextlib.suppress(NvrxError):
            found |= SlurmCluster(patience_s=0).states(list(numbers.values()))
    return found


def ask_queue(job_ids: Sequence[str]) -> Mapping[str, QueuePlace]:
    """Why each of these jobs is pending, in one call; nothing where Slurm cannot be asked."""
    from nvrx_slurm.cluster.queue_place import queue_places

    return queue_places(job_ids)


class Presence:
    """One job, seen from outside. Cheap to ask: Slurm itself is asked every 30 s at most.

    `slurm` answers for Slurm: the state of a job id; None where there is no answer; `queue` says why a job is
    pending, and is asked as seldom. With `gives_up_s`, a job that has reported nothing while Slurm answered nothing,
    for so long, is an error.
    """

    def __init__(
        self,
        folder: JobFolder,
        *,
        clock: Clock | None = None,
        slurm: Callable[[str], JobState | None] | None = None,
        queue: Callable[[str], QueuePlace | None] | None = None,
        gives_up_s: float | None = None,
    ) -> None:
        self._folder, self._gives_up_s = folder, gives_up_s
        self._clock = clock or SystemClock()
        self._slurm = slurm or (lambda job_id: ask_slurm([job_id]).get(job_id))
        self._queue = queue or (None if slurm else lambda job_id: ask_queue([job_id]).get(job_id))
        self._ask_at = float("-inf")
        self._unanswered_since: float | None = None  # the first question after which neither Slurm nor the job spoke
        self._answer = OutsideState()
        self._info: JobInfo | None = None

    def gone(self) -> bool:
        """Whether no process runs the job any more."""
        return self.ask().over

    def heard(self) -> None:
        """The job itself has just spoken: Slurm need not be asked for a while."""
        self._info = self._info or self._folder.read_info()
        self._ask_at, self._unanswered_since = self._clock.monotonic() + ASK_SLURM_EVERY_S, None

    def ask(self) -> OutsideState:
        """What is known from outside. Raises SlurmUnreachable after `gives_up_s`."""
        # Of a folder that was removed under its job, the last that was read says which process runs the job.
        info = self._info = self._folder.read_info() or self._info
        if (result := self._folder.read_result()) is not None:
            # The batch host writes the result first and removes the store's address last: until then it clears away.
            # One that was killed in between leaves the address, and on another host only its age says so.
            may_live = self._clock.wall() - result.ended_at <= LINGERS_S
            if info is not None and info.is_here:
                may_live = info.host_lives()
            return OutsideState(over=not may_live or self._folder.read_store() is None)
        # A local job, and a run in the user's own allocation, end with their batch host's process.
        if info is not None and (info.cluster == "local" or (info.allocation is not None and info.is_here)):
            return OutsideState(over=info.is_here and not info.host_lives())
        # A run in the user's own allocation is no job of Slurm's; that of the allocation is.
        allocation = None if info is None else info.allocation
        job_id = allocation or self._folder.full_id
        if not job_id[:1].isdigit() or self._clock.monotonic() < self._ask_at:
            return self._answer
        now = self._clock.monotonic()  # of the question: squeue itself waits up to a minute for slurmctld
        state = self._slurm(job_id)
        self._ask_at = self._clock.monotonic() + ASK_SLURM_EVERY_S
        if state is not None or self._folder.read_slurm_end() is not None:
            from nvrx_slurm.cluster.ending import last_known
            from nvrx_slurm.cluster.states import JobState
            from nvrx_slurm.cluster.tasks import exit_code_of, exit_code_of_tasks

            self._unanswered_since = None
            if state is not None and state.terminal and allocation is not None:
                state = JobState.NODE_FAIL  # how the user's allocation ended says nothing of a lost run
            state = last_known(self._folder, state or JobState.UNKNOWN, self._clock.wall())
            place = self._queue(job_id) if self._queue and state == "PENDING" else None
            over, code = state.terminal, exit_code_of(self._folder, state)
            if state == "UNKNOWN" and info is None:
                # Of an array that Slurm has forgotten its tasks say how it ended. Another job was submitted, by its
                # folder, and never started: it was cancelled in the queue, and no reader saw it before that.
                code = exit_code_of_tasks(self._folder)
                over = code is not None
                with contextlib.suppress(OSError):
                    submitted_at = self._folder.plan_path.stat().st_mtime
                    over |= self._clock.wall() - submitted_at > FORGOTTEN_S
            self._answer = OutsideState(over=over, slurm_says=state.value, exit_code=code, queue=place)
            return self._answer
        if self._unanswered_since is None:
            self._unanswered_since = now
        if self._gives_up_s is not None and now - self._unanswered_since >= self._gives_up_s:
            raise SlurmUnreachable(
                f"Slurm has not answered for {self._gives_up_s / 60:g} minutes, and job {job_id} has reported"
                f" nothing; it may still run: `squeue` says so once Slurm answers"
            )
        return self._answer


def still_in_slurm(
    folder: JobFolder, *, clock: Clock | None = None, slurm: Callable[[str], JobState | None] | None = None
) -> str | None:
    """Slurm's state of a job that has left a result, while Slurm still has it: after the loss of a node, many seconds
    longer, and after a requeue, as long as it goes on. None: Slurm does not have it any more, or does not answer.
    `slurm` as for `Presence`."""
    now = (clock or SystemClock()).wall()
    result = folder.read_result()
    if result is None or not in_slurm(folder.job_id, folder.read_info()):
        return None
    if now - result.ended_at > LINGERS_S and not may_be_requeued(folder, result, now):
        return None
    job_id = folder.full_id
    state = slurm(job_id) if slurm else ask_slurm([job_id]).get(job_id)
    if state is None:
        return None
    from nvrx_slurm.cluster.ending import last_result

    last_result(folder, result, lambda: state, now)
    return None if state.terminal or state == "UNKNOWN" else state.value


def may_be_requeued(folder: JobFolder, result: Result, now: float) -> bool:
    """Whether Slurm may have requeued the job that has left this result, as far as the folder says."""
    from nvrx_slurm.cluster.ending import MAY_GO_ON

    is_recent = now - result.ended_at <= MAY_WAIT_S
    return result.exit_code in MAY_GO_ON and is_recent and folder.read_slurm_end() is None


def in_slurm(job_id: str, info: JobInfo | None) -> bool:
    """Whether Slurm can know the job: its ids begin with a number."""
    return job_id[:1].isdigit() and (info is None or (info.cluster == "slurm" and info.allocation is None))
