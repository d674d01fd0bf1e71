"""What is left of a job that has ended: processes, folders in memory, a place in Slurm's queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping

from nvrx_slurm.api.handle import Job
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import WaitTimeout
from nvrx_slurm.journal.folder import clear_runtime_folders
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.lab.flow.stages.accounts import described, processes_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.log import get_logger

log = get_logger("ci")


def after(look: Callable[[], list[str]], within_s: float, clock: Clock) -> list[str]:
    """What `look` still finds after so long; empty as soon as it finds nothing."""
    with contextlib.suppress(WaitTimeout):
        wait_until(lambda: not look(), timeout_s=within_s, what="nothing to be left", clock=clock)
        return []
    return look()


def processes_left(job: Job, marks: Mapping[str, str] | None) -> list[str]:
    """The job's processes on this machine. `marks`: variables that tell them, beside the job folder."""
    return [f"{described(pid)} still runs" for pid in processes_of(job.folder, marks)]


def queue_left(job: Job, slurm: SlurmCluster) -> list[str]:
    """The job, if Slurm does not hold it for ended. Raises SlurmUnreachable."""
    state = slurm.states([job.job_id])[job.job_id]
    return [] if state.terminal or state is JobState.UNKNOWN else [f"squeue still lists job {job.job_id}: {state}"]


def folders_left(job: Job, killed: Collection[str]) -> list[str]:
    """The job's folders in this machine's memory. Those of nodes that were killed nobody could clear: that is done
    here."""
    files = JobFiles(job.folder)
    found = files.runtime_folders()
    left = [path for path in found if files.node_of(path) not in killed]
    if found and not left:
        log.info("left by nodes that were killed, and cleared away: %s", ", ".join(map(str, found)))
        clear_runtime_folders(files)
    return [f"{path} was not cleared away" for path in left]
