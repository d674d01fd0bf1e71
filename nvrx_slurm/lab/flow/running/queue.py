"""An attempt's jobs in a Slurm's queue: found by their ids, or by the folder that their scripts lie in, and ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.cluster.slurm_text import reason_of
from nvrx_slurm.errors import SlurmUnreachable, WaitTimeout
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("ci")

ANSWER_S = 5.0
KILLED_S = 5.0
"""How long Slurm may take to forget a job whose processes were killed."""


class OwnJobs:
    """The jobs of one attempt. `environment`: what Slurm's programs need. None is waited for longer than ANSWER_S."""

    def __init__(self, folder: Path, environment: Mapping[str, str], job_ids: Iterable[str], clock: Clock) -> None:
        self._folder, self._job_ids, self._clock = folder, set(job_ids), clock
        self._runner = SystemRunner(environment)

    def unfinished(self) -> list[str]:
        """Those that wait, run or complete. Raises SlurmUnreachable, FileNotFoundError."""
        listing = self._ask("squeue", "--noheader", "--me", "--format=%i|%o").splitlines()
        jobs = (line.strip().partition("|") for line in listing)
        return [job_id for job_id, _, script in jobs if self._is_ours(job_id, script)]

    def end(self, patience_s: float) -> None:
        """Cancel them; kill those that have not ended in time. Raises WaitTimeout, SlurmUnreachable."""
        self._signal()
        try:
            self._wait(patience_s)
        except WaitTimeout:
            self._signal("--full", "--signal=KILL")
            self._wait(KILLED_S)

    def _signal(self, *flags: str) -> None:
        if left := self.unfinished():
            log.info("scancel %s", " ".join([*flags, *left]))
            self._ask("scancel", *flags, *left)

    def _wait(self, timeout_s: float) -> None:
        what = f"jobs of {self._folder} to leave the queue"
        wait_until(lambda: not self.unfinished(), timeout_s=timeout_s, what=what, clock=self._clock)

    def _is_ours(self, job_id: str, script: str) -> bool:
        return job_id in self._job_ids or Path(script).is_relative_to(self._folder)

    def _ask(self, *command: str) -> str:
        output = self._runner(command, timeout_s=ANSWER_S)
        if not output.ok:
            raise SlurmUnreachable(f"{command[0]} failed: {reason_of(output)}")
        return output.stdout
