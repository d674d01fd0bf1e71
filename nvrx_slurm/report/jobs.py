"""The jobs of a base folder, or of this user: which there are, and how each stands."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from nvrx_slurm.cluster.base import DEFAULT_FOLDER, folder_name
from nvrx_slurm.cluster.tasks import first_failed, is_job, results_of_tasks
from nvrx_slurm.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_RESTART,
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_TIMEOUT,
    UNREADABLE,
    UsageError,
)
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.job_index import IndexedJob, forget_job, index_folder, indexed_jobs
from nvrx_slurm.report.model import JobView

# Exit code → the state of a job that ended with it; any other is `failed`.
ENDINGS = {
    EXIT_DONE: "completed",
    EXIT_TIMEOUT: "timeout",
    EXIT_INTERRUPTED: "cancelled",
    EXIT_TERMINATED: "cancelled",
    EXIT_RETRY: "lost",
    EXIT_NO_RESTART: "stopped",
}

MOST_NAMED = 8

# What a user may write for the id of the newest job.
NEWEST = "last"


def known_jobs(base: Path) -> list[JobFolder]:
    """This user's job folders below `base`, newest first. A base folder that does not exist holds none."""
    folders = [JobFolder(path) for path in _paths_in(base) if is_job(path)]
    return sorted(folders, key=lambda folder: (started_at(folder) or 0.0, folder.job_id), reverse=True)


def named_job(base: Path, job_id: str) -> JobFolder:
    """The folder of a job, whether it is there or not. Slurm is asked on the cluster that the id names, if it does.
    Raises UsageError for what is no job id."""
    return JobFolder(base / folder_name(job_id), job_id.partition(";")[2])


def find_job(base: Path, job_id: str) -> JobFolder:
    """The folder of a job. Raises UsageError with the jobs that there are, or for what is no job id; UnsafePath where
    it is another user's."""
    folder = named_job(base, job_id)
    # Before it counts as missing: the folder of another user raises UnsafePath, which says so.
    if os.path.isdir(folder.path):
        with folder.opened():
            pass
    if is_job(folder.path):
        return folder
    known = [job.job_id for job in known_jobs(base)]
    if not known:
        raise UsageError(f"no job {job_id!r}: {base} holds no jobs; --folder names another base folder")
    near = difflib.get_close_matches(job_id, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    raise UsageError(f"no job {job_id!r} in {base}{hint}; it holds {', '.join(known[:MOST_NAMED])}{more}")


def refuse_array(job: JobFolder, command: str | None = None) -> None:
    """Raises UsageError where the job is a whole array, which has neither journal nor logs. The message names a task,
    the first that has failed if there is one, and the command for it."""
    if results := results_of_tasks(job):
        task = first_failed(results) or next(iter(results))
        instead = f"nvrx-slurm {command} {task}" if command else f"name one, such as {task}"
        raise UsageError(f"job {job.job_id} is an array, and each of its tasks a job of its own: {instead}")


def error_without_folder(base: Path, job_id: str, slurm_says: str) -> UsageError:
    """The error about a job that Slurm has started and that has no folder here. Slurm knows the jobs of all users."""
    return UsageError(
        f"no job {job_id!r} in {base}. Slurm has a job of this id ({slurm_says}); if it is one of nvrx-slurm,"
        " --folder names its base folder"
    )


def base_of(job_id: str) -> Path:
    """The base folder of a job that no base folder was named for: `nvrx-jobs` here, if it holds the job; else the one
    in which the index has it; else `nvrx-jobs`. Raises UsageError where several folders hold a job of this id."""
    name = folder_name(job_id)
    if is_job(DEFAULT_FOLDER / name):
        return DEFAULT_FOLDER
    found = [each.folder for each in _in_index(name) if _is_there(each)]
    if len(found) > 1:
        there = ", ".join(str(folder.parent) for folder in found[:MOST_NAMED])
        raise UsageError(f"there are {len(found)} jobs {job_id}, in {there}; --folder names the one that is meant")
    return found[0].parent if found else DEFAULT_FOLDER


def newest_job(base: Path | None = None) -> JobFolder:
    """The job that was submitted last: of a base folder, or, without one, of all that this user has. Raises
    UsageError where there is none."""
    for job in my_jobs(base):
        return job
    if base is not None:
        raise UsageError(f"there is no job yet: {base} holds none; --folder names another base folder")
    raise UsageError(
        f"there is no job yet: {DEFAULT_FOLDER} holds none, and neither does the index of your jobs"
        f" ({index_folder()}); --folder names the folder that holds jobs"
    )


def my_jobs(base: Path | None = None) -> Iterator[JobFolder]:
    """This user's jobs, the last submitted first: those of a base folder, or, without one, those of the index and of
    `nvrx-jobs` here."""
    here = (DEFAULT_FOLDER if base is None else base).absolute()
    entries = {each.folder: each for each in _in_index() if base is None or each.folder.parent == here}
    # Older versions made no entries, nor does a job whose user has a read-only home: what lies here counts too.
    for path in _paths_in(here):
        if path not in entries and is_job(path):
            with contextlib.suppress(FileNotFoundError):  # `rm` may have removed it meanwhile
                at = started_at(JobFolder(path)) or path.stat().st_mtime
                entries[path] = IndexedJob(path.name, path, at)
    for each in sorted(entries.values(), key=lambda each: (each.at, each.job_id), reverse=True):
        if _is_there(each):
            yield JobFolder(each.folder)


def _paths_in(base: Path) -> list[Path]:
    try:
        return list(base.iterdir())
    except OSError:  # no look beforehand: the folder may be removed at any moment
        return []


def _in_index(job_id: str | None = None) -> list[IndexedJob]:
    try:
        return indexed_jobs(job_id)
    except (OSError, UsageError):  # UnsafePath: another user could have written it
        return []


def _is_there(entry: IndexedJob) -> bool:
    """Whether the job's folder is still there; if it was removed, its entry goes too."""
    if is_job(entry.folder):
        return True
    # Not on a file system that is not mounted now.
    if os.path.isdir(entry.folder.parent) and not os.path.exists(entry.folder):
        forget_job(entry.folder)
    return False


def read_plan(folder: JobFolder) -> Plan | None:
    """The job's plan, if its folder has it."""
    return folder.read_plan() if os.path.isfile(folder.plan_path) else None


def started_at(folder: JobFolder) -> float | None:
    """When the job was started: as its batch host says, or else by the age of its plan. None: not yet."""
    with contextlib.suppress(*UNREADABLE):
        if (info := folder.read_info()) is not None:
            return info.started_at
    try:
        return folder.plan_path.stat().st_mtime
    except OSError:
        return None


def state_of(view: JobView, exit_code: int | None, *, started: bool, over: bool) -> str:
    """One word for how the job stands: `pending` until it has `started`; `starting`, `joining`, `running`,
    `recovering`, `stopping` while it lives; `completed`, `failed`, `cancelled`, `timeout`, `lost`, `stopped` by its
    exit code; `died` if no process runs it and it left none."""
    if exit_code is not None:
        return ENDINGS.get(exit_code, "failed")
    if over:
        return "died"
    if not view.replicas:
        return "starting" if started or view.n else "pending"
    if view.shutdown is not None:
        return "stopping"
    opening = [r for r in view.replicas.values() if r.phase in ("joining", "stopping", "starting")]
    if any(replica.cycle for replica in opening):
        return "recovering"
    return "joining" if opening else "running"
