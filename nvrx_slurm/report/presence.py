"""Whether a process still runs a job: so that a reader stops waiting when its journal has no end.

A batch host that is killed, or whose node dies, journals no end. Then its own process (a local job) or Slurm says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.folder import JobFolder, JobInfo
from nvrx_slurm.util.clock import Clock, SystemClock

if TYPE_CHECKING:
    from nvrx_slurm.cluster.states import JobState

ASK_SLURM_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Outside:
    """What others than the job itself say of it. In doubt (no answer from Slurm, another host) it lives."""

    over: bool = False
    slurm_says: str | None = None
    exit_code: int | None = None  # what stands for Slurm's state, where the job left no result


def ask_slurm(job_ids: Sequence[str]) -> Mapping[str, JobState]:
    """Slurm's state of each job, in one call; nothing where Slurm cannot be asked."""
    from nvrx_slurm.cluster.slurm import SlurmCluster

    try:
        return SlurmCluster(patience_s=0).states(job_ids)
    except NvrxError:
        return {}


class Presence:
    """One job, seen from outside. Cheap to ask: Slurm itself is asked every 30 s at most.

    `slurm` answers for Slurm: the state of a job id.
    """

    def __init__(
        self,
        folder: JobFolder,
        *,
        clock: Clock | None = None,
        slurm: Callable[[str], JobState | None] | None = None,
    ) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._slurm = slurm or (lambda job_id: ask_slurm([job_id]).get(job_id))
        self._ask_at = float("-inf")
        self._answer = Outside()

    def gone(self) -> bool:
        """Whether no process runs the job any more."""
        return self.ask().over

    def heard(self) -> None:
        """The job itself has just spoken: Slurm need not be asked for a while."""
        self._ask_at = self._clock.monotonic() + ASK_SLURM_EVERY_S

    def ask(self) -> Outside:
        """What is known from outside."""
        if self._folder.read_result() is not None:
            return Outside(over=self._folder.read_store() is None)
        info = self._folder.read_info()
        if info is not None and info.cluster == "local":
            return Outside(over=info.is_here and not info.host_lives())
        if in_slurm(self._folder.job_id, info) and self._clock.monotonic() >= self._ask_at:
            self.heard()
            state = self._slurm(self._folder.job_id)
            if state is not None:
                self._answer = Outside(over=state.terminal, slurm_says=state.value, exit_code=state.exit_code)
        return self._answer


def in_slurm(job_id: str, info: JobInfo | None) -> bool:
    """Whether Slurm can know the job: its ids begin with a number."""
    return job_id[:1].isdigit() and (info is None or info.cluster == "slurm")
