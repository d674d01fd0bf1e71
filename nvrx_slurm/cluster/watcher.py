"""submitit's watcher, with our question: one call for all jobs of a process, rarely at first, more rarely later.

What it keeps: handles register with it, an ended job is not asked about again, and Slurm is asked after 2 s, 4 s, …
`delay_s`. What it does otherwise: squeue is asked before sacct, a preempted job is over, and one that was requeued
is what squeue says of it now.
"""

from __future__ import annotations

from submitit.slurm.slurm import SlurmInfoWatcher

from nvrx_slurm.clock import Clock, SystemClock
from nvrx_slurm.cluster.base import Cluster
from nvrx_slurm.cluster.states import JobState

SLOWEST_S = 10


class StateWatcher(SlurmInfoWatcher):
    """Shared by one process's handles to jobs of one Slurm. It serves submitit's own jobs too:
    `job.watcher = StateWatcher(…)`."""

    def __init__(self, cluster: Cluster, *, delay_s: int = SLOWEST_S, clock: Clock | None = None) -> None:
        super().__init__(delay_s=delay_s)
        self._cluster = cluster
        self._clock = clock or SystemClock()

    def register_job(self, job_id: str) -> None:
        """Ask about it from now on, whatever was known of a job of this number."""
        super().register_job(job_id)
        self._finished.discard(job_id)
        self._info_dict.pop(job_id, None)

    def update(self) -> None:
        """Ask about every registered job that has not ended. Raises SlurmUnreachable, and asks no sooner for that."""
        asked = sorted(self._registered - self._finished)
        self._last_status_check = self._clock.wall()
        if not asked:
            return
        self._num_calls += 1
        states = self._cluster.states(asked)
        self._info_dict |= {job_id: {"JobID": job_id, "State": state.value} for job_id, state in states.items()}
        self._finished |= {job_id for job_id, state in states.items() if state.terminal}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job is over, in the sense of `JobState.terminal`."""
        return self.state(job_id, mode=mode).terminal

    def state(self, job_id: str, mode: str = "standard") -> JobState:
        """The job's state. `mode` as `get_state` has it: `force` asks now, `cache` does not ask."""
        return JobState(self.get_state(job_id, mode=mode))
