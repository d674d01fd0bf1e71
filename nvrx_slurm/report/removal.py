"""Removing the folders of jobs that have ended: which may go, and how one goes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.errors import UNREADABLE, UsageError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.job_index import forget_job
from nvrx_slurm.report.presence import Presence, still_in_slurm
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.durations import DAY_S
from nvrx_slurm.util.ownership import private_folder


class Kept(NamedTuple):
    """Why a job's folder is not to be removed. `lives`: the job has not ended; else nothing says whether it has."""

    why: str
    lives: bool = False


def why_kept(job: JobFolder) -> Kept | None:
    """None: the job has ended, and its folder may go."""
    try:
        return _why_kept(job)
    except UNREADABLE as error:
        return Kept(f"{error}; --force removes it")


def _why_kept(job: JobFolder) -> Kept | None:
    info = job.read_info()
    if info is not None and info.host_lives():
        return Kept("it still runs", lives=True)
    outside = Presence(job).ask()
    if job.read_result() is not None:
        state = still_in_slurm(job)
        return None if state is None else Kept(f"Slurm still has it ({state})", lives=True)
    if outside.slurm_says == "UNKNOWN":
        return Kept("it left no result, and this Slurm does not know it; --force removes it")
    if outside.over:
        return None
    if info is not None and info.cluster == "local":
        return Kept(f"only its host, {info.host}, can say whether it has ended; --force removes it")
    if outside.slurm_says is None:
        return Kept("Slurm does not say whether it has ended; --force removes it")
    return Kept(f"it has not ended ({outside.slurm_says} in Slurm)", lives=True)


def ended_at(job: JobFolder) -> float | None:
    """When the job ended, as far as its folder says, and can be read."""
    with contextlib.suppress(*UNREADABLE):
        if (result := job.read_result()) is not None:
            return result.ended_at
        if (end := job.read_slurm_end()) is not None:
            return end.seen_at
    return None


def expired(jobs: Iterable[JobFolder], *, days: int | None, keep: int | None, clock: Clock) -> Iterator[JobFolder]:
    """Of these jobs, the newest first, those that ended more than `days` ago and are not among the newest `keep`. One
    of which it is not known when it ended is kept."""
    for place, job in enumerate(jobs):
        at = ended_at(job)
        if at is not None and place >= (keep or 0) and (days is None or clock.wall() - at > days * DAY_S):
            yield job


def size_of(folder: Path) -> int:
    """The bytes of all files below the folder."""
    size = 0
    for above, _, names in os.walk(folder):  # it follows no symbolic link to a folder
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a process of the job may still remove its own files
                size += (Path(above) / name).lstat().st_size
    return size


def remove(job: JobFolder) -> None:
    """Remove the job's folder and its entry in the index. Readers see the whole folder or none. Raises UsageError."""
    base = job.path.parent
    gone = f".removed-{job.job_id}-{os.urandom(4).hex()}"
    try:
        with private_folder(base.resolve()) as descriptor:
            # Renamed first: a reader that comes while files are deleted finds no job, and not half of one.
            with job.opened():  # raises UnsafePath where it is not this user's folder
                os.rename(job.job_id, gone, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            # Once it is renamed, not before: a folder that could not be renamed stays in the index.
            forget_job(job.path)
            with contextlib.suppress(FileNotFoundError):  # what sbatch's --output of the job script names
                os.unlink(f"slurm-{job.job_id}.out", dir_fd=descriptor)
            shutil.rmtree(gone, dir_fd=descriptor)  # by descriptors: no symbolic link is followed
    except OSError as error:
        raise UsageError(f"{error.filename or job.path} cannot be removed: {error.strerror}") from None
