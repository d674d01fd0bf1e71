"""The tasks of a job array, by their folders. A task is a job of its own; the array as a whole leaves no result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nvrx_slurm.cluster.base import SCRIPT_NAME
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import EXIT_DONE, UNREADABLE
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.util.ownership import is_ours


def is_job(path: Path) -> bool:
    """Whether it is the folder of a job of this user's."""
    # Before any look inside: several users may share the base folder, and the folder may be another user's.
    if not is_ours(path) or path.is_symlink():
        return False
    names = ("plan.json", "job.json", SCRIPT_NAME)
    return os.path.isdir(path) and any(os.path.isfile(path / name) for name in names)


def tasks_of(base: Path, number: str) -> list[JobFolder]:
    """The folders of a job array's tasks, as far as these have started, in the order of their numbers."""
    if not os.path.isdir(base):
        return []
    tasks = {path.name.removeprefix(f"{number}_"): path for path in base.glob(f"{number}_[0-9]*")}
    # Not `1_3-run1`: that job runs in the allocation of a task, and is none itself.
    numbers = sorted((task for task, path in tasks.items() if task.isdecimal() and is_job(path)), key=int)
    return [JobFolder(tasks[task]) for task in numbers]


def results_of_tasks(job: JobFolder) -> dict[str, Result | None]:
    """Of a whole job array the id and the result of each task that has started, in the order of their numbers; None:
    it has left none, or none that can be read. Of another job nothing."""
    if not job.job_id.isdecimal():
        return {}
    results: dict[str, Result | None] = {}
    for task in tasks_of(job.path.parent, job.job_id):
        results[task.job_id] = None
        with contextlib.suppress(*UNREADABLE):
            results[task.job_id] = task.read_result()
    return results


def first_failed(results: Mapping[str, Result | None]) -> str | None:
    """The id of the first task that has failed, of `results_of_tasks`."""
    return next((task for task, result in results.items() if result and result.exit_code), None)


def first_failure(exit_codes: Iterable[int | None]) -> int:
    """The first exit code that is not 0; else 0. None: the task has none yet."""
    return next((code for code in exit_codes if code), EXIT_DONE)


def exit_code_of_tasks(job: JobFolder) -> int | None:
    """Of a whole job array that of the first task that failed, once each task that has started has left a result; of
    another job None. For an array that Slurm has forgotten."""
    results = results_of_tasks(job).values()
    return None if not results or None in results else first_failure(_codes(results))


def exit_code_of(job: JobFolder, state: JobState) -> int | None:
    """The exit code of a job that left no result itself, by Slurm's state; None while it lives. Of a whole job array
    that of the first task that failed: Slurm knows only 0, 1 and signals, and may have forgotten that task."""
    code = state.exit_code
    return code if code is None else first_failure(_codes(results_of_tasks(job).values())) or code


def _codes(results: Iterable[Result | None]) -> Iterator[int | None]:
    return (None if result is None else result.exit_code for result in results)
