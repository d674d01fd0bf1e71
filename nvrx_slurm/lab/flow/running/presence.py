"""Whether a job is over, as those see it who run it: Slurm, or this machine.

The journal alone does not tell: a requeued job goes on after its `job_ended`, and one whose batch host was killed
never says that it has ended.
"""

from __future__ import annotations

from nvrx_slurm.api.handle import Job
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.report.presence import ask_slurm
from nvrx_slurm.util.clock import Clock

SOON_S, SELDOM_S = 0.2, 2.0
"""How long between two questions: when the journal says that the job has ended, and otherwise."""


class Presence:
    """One job, asked about as seldom as will do. `state`: the last answer; None: there was none yet."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.job, self._clock = job, clock
        self.state: JobState | None = None
        self._asked_at = clock.monotonic()
        self._pause_s = SELDOM_S

    def is_over(self, *, hint: bool) -> bool:
        """Whether the job is over; `hint`: the journal says so."""
        self._pause_s = SOON_S if hint else SELDOM_S
        if self.pause_s() <= 0.0:
            self.ask()
        return self.state is not None and self.state.terminal

    def ask(self) -> JobState | None:
        """The job's state now; None: nobody answers."""
        local = self.job.cluster == "local"
        states = LocalCluster(self.job.folder.parent).states if local else ask_slurm
        self.state = states([self.job.job_id]).get(self.job.job_id)
        self._asked_at = self._clock.monotonic()
        return self.state

    def pause_s(self) -> float:
        """How long until the next question."""
        return max(0.0, self._asked_at + self._pause_s - self._clock.monotonic())
