"""The argument JOB: a job's id, or nothing for the newest, found from any folder."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvrx_slurm.cli.completion import complete_jobs
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.cli.output import note

if TYPE_CHECKING:
    from nvrx_slurm.journal.folder import JobFolder

_F = TypeVar("_F", bound=Callable[..., Any])

FIND_JOB = "JOB is found from any folder. Without it, or as `last`: the newest."

# Several jobs, or none: see `found_jobs`.
jobs_argument = click.argument("job_ids", metavar="[JOB]…", nargs=-1, shell_complete=complete_jobs)


def with_find_job(text: str | None) -> str:
    """A command's help, and how its JOB is found."""
    # Without the indentation of a docstring, which Python 3.13 removes and older ones keep: click would take a
    # paragraph with less of it for the margin.
    return f"{inspect.cleandoc(text or '')}\n\n{FIND_JOB}"


def job_argument(command: _F) -> _F:
    """Give a command the argument JOB and the option --folder; it is called with `job_id: str` and `folder: Path`,
    the base folder in which the job lies. JOB may be left out, or be `last`: then it is the newest, and stderr says
    which that is.

    See `chosen_job`. A command whose JOB is followed by other arguments reads them as it needs.
    """

    @click.argument("job_id", metavar="[JOB]", required=False, shell_complete=complete_jobs)
    @folder_option
    @functools.wraps(command)
    def wrapper(*args: Any, job_id: str | None, folder: Path, **rest: Any) -> Any:
        job_id, folder = chosen_job(job_id, folder)
        return command(*args, job_id=job_id, folder=folder, **rest)

    wrapper.__doc__ = with_find_job(command.__doc__)
    return wrapper  # type: ignore[return-value]


def chosen_job(job_id: str | None, folder: Path) -> tuple[str, Path]:
    """The job that the user means, and the base folder in which it lies: the one that --folder or NVRX_SLURM_FOLDER
    names, else the default folder if it holds the job, else where the index of the user's jobs has it.

    The id of an allocation of the user's stands for the newest run in it.

    A job that no folder holds may still wait in Slurm's queue: the caller finds out. Raises UsageError.
    """
    from nvrx_slurm.report import jobs

    base = folder_of_user(folder)
    if job_id is not None and (job_id != jobs.NEWEST or os.path.isdir(folder / job_id)):
        where = jobs.base_of(job_id) if base is None else folder
        # A number that has no folder may be an allocation, or an array.
        if not job_id.isdecimal() or os.path.isdir(where / job_id):
            return job_id, where
        for run in jobs.my_jobs(base):  # the user's own job, in whose allocation this job ran; or a whole array
            if run.job_id.startswith(f"{job_id}_"):
                return job_id, run.path.parent
            if run.job_id.startswith(f"{job_id}-run"):
                note(f"nvrx-slurm: job {run.job_id}, the newest run in the allocation {job_id}")
                return run.job_id, run.path.parent
        return job_id, where
    newest = jobs.newest_job(base)
    where = newest.path.parent
    note(f"nvrx-slurm: job {newest.job_id}, the newest, in {where}")
    # As the user wrote the folder, where it is that one: messages and printed paths stay short.
    return newest.job_id, folder if where == folder.absolute() else where


def found_jobs(job_ids: Iterable[str | None], folder: Path) -> list[JobFolder]:
    """The folders of these jobs, each once; see `chosen_job`. Raises UsageError where one is not there."""
    from nvrx_slurm.report.jobs import find_job

    chosen = [chosen_job(job_id, folder) for job_id in dict.fromkeys(job_ids)]
    # By the folder: `last` may be one of the others, and so may the id of an allocation.
    return list({job.path.resolve(): job for job in (find_job(base, job_id) for job_id, base in chosen)}.values())


def folder_of_user(folder: Path) -> Path | None:
    """The base folder, if the user named one: by --folder or NVRX_SLURM_FOLDER. None: it is the default."""
    from click.core import ParameterSource

    named = click.get_current_context().get_parameter_source("folder")
    return None if named in (None, ParameterSource.DEFAULT) else folder
