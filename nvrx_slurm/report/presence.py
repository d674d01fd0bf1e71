"""Whether anybody still runs a job: what tells a reader to stop waiting when its journal just ceases.

A batch host that is killed, or whose node dies, journals no end. Then its own process (a local job) or Slurm tells.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nvrx_slurm.clock import Clock, SystemClock
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.folder import JobFolder, JobInfo

ASK_SLURM_EVERY_S = 10.0
_CLOCKS_DIFFER_S = 2.0


class Presence:
    """Tells whether a job is over, whatever its journal says. Cheap to ask: Slurm is asked every 10 s at most."""

    def __init__(self, folder: JobFolder, *, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._ask_at = self._clock.monotonic()
        self._slurm_says_over = False

    def gone(self) -> bool:
        """Whether nobody runs the job any more. In doubt (an unreachable Slurm, another host's process): no."""
        if self._folder.read_result() is not None:
            return self._folder.read_store() is None
        info = self._folder.read_info()
        if info is None:
            return False
        if info.cluster == "local":
            return info.host == socket.gethostname() and not host_lives(info)
        return self._over_in_slurm(info)

    def _over_in_slurm(self, info: JobInfo) -> bool:
        if self._clock.monotonic() >= self._ask_at:
            self._ask_at = self._clock.monotonic() + ASK_SLURM_EVERY_S
            self._slurm_says_over = slurm_state(info.job_id)[1]
        return self._slurm_says_over


def slurm_state(job_id: str) -> tuple[str | None, bool]:
    """Slurm's word for the job (None: it does not know, or cannot be asked), and whether it is over."""
    from nvrx_slurm.cluster.slurm import SlurmCluster

    try:
        state = SlurmCluster().states([job_id])[job_id]
    except (NvrxError, KeyError):
        return None, False
    return state.name, state.terminal


def host_lives(info: JobInfo) -> bool:
    """Whether the batch host's process lives on this machine; a zombie does not, nor does another with its number."""
    try:
        stat = Path(f"/proc/{info.host_pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = stat.rpartition(")")[2].split()
    started_at = _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] != "Z" and started_at <= info.started_at + _CLOCKS_DIFFER_S


def _boot_time() -> float:
    with Path("/proc/stat").open() as file:
        return next(float(line.split()[1]) for line in file if line.startswith("btime "))
