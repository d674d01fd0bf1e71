"""The states of a process's jobs: one question for all of them, often at first, more rarely later."""

from __future__ import annotations

import math

from nvrx_slurm.cluster.base import Cluster
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.util.clock import Clock, SystemClock

SLOWEST_S = 10
_SOONEST_S = 2.0
_FORCED_S = 0.001  # several handles that force a question in the same moment share it


class StateWatcher:
    """Shared by one process's handles to jobs of one Slurm.

    It has the methods of submitit's `InfoWatcher`, so it serves submitit's own jobs too: `job.watcher =
    StateWatcher(…)`. Unlike submitit it asks squeue before sacct, holds a preempted job for over, and believes what
    squeue says of one that was requeued. In all methods `mode` is `standard` (ask when it is time), `force` (ask now)
    or `cache` (do not ask).
    """

    def __init__(self, cluster: Cluster, *, delay_s: int = SLOWEST_S, clock: Clock | None = None) -> None:
        self._cluster, self._delay_s, self._clock = cluster, delay_s, clock or SystemClock()
        self._registered: set[str] = set()
        self._states: dict[str, JobState] = {}
        self._asked_at = -math.inf
        self._newest_at = self._clock.monotonic()
        self.num_calls = 0

    def register_job(self, job_id: str) -> None:
        """Ask about it from now on; what was known of an earlier job of this number is dropped."""
        self._registered.add(job_id)
        self._states.pop(job_id, None)
        self._newest_at, self._asked_at = self._clock.monotonic(), -math.inf

    def update(self) -> None:
        """Ask about every registered job that has not ended. Raises SlurmUnreachable, and asks no sooner for that."""
        # `sorted` copies the set in one step: another thread may register a job meanwhile (`AwaitableJob`).
        asked = [job_id for job_id in sorted(self._registered) if not self._last(job_id).terminal]
        self._asked_at = self._clock.monotonic()
        if asked:
            self.num_calls += 1
            self._states |= self._cluster.states(asked)

    def state(self, job_id: str, mode: str = "standard") -> JobState:
        """The job's state; UNKNOWN as long as Slurm has given none."""
        if job_id not in self._registered:
            self.register_job(job_id)
        now = self._clock.monotonic()
        # A state seldom changes long after the submission, and each question costs slurmctld work.
        # At 0 s, 2 s, 4 s, 8 s, … after the newest job was registered, then every `delay_s`.
        pause_s = min(self._delay_s, max(_SOONEST_S, (now - self._newest_at) / 2))
        if mode != "cache" and now - self._asked_at > (_FORCED_S if mode == "force" else pause_s):
            self.update()
        return self._last(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job is over, in the sense of `JobState.terminal`."""
        return self.state(job_id, mode).terminal

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.state(job_id, mode).value

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        return {"JobID": job_id, "State": self.get_state(job_id, mode)}

    def _last(self, job_id: str) -> JobState:
        return self._states.get(job_id, JobState.UNKNOWN)
