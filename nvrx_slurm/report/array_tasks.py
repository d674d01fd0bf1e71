"""A whole job array: how each of its tasks stands. A task is a job of its own, with a folder and a journal; the array
has a folder only where `submit` made one, and no journal."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nvrx_slurm.cluster.base import SCRIPT_NAME
from nvrx_slurm.cluster.states import JobState, state_of_word
from nvrx_slurm.cluster.tasks import first_failure, tasks_of
from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.jobs import ENDINGS, error_without_folder, find_job, named_job
from nvrx_slurm.report.presence import OutsideState, Presence, ask_queue
from nvrx_slurm.report.snapshot import QUEUED, JobLine, Snapshot, lines_of, snap, take
from nvrx_slurm.report.view import new_view


def take_with_tasks(base: Path, job_id: str) -> Snapshot:
    """The job as `snapshot.take` has it; of a whole array also its tasks, from which its state follows.

    A job that has no folder yet, and that is in Slurm's queue, is pending. Raises UsageError for any other without a
    folder.
    """
    folder = named_job(base, job_id)
    tasks = _tasks(folder)
    try:
        shot = take(find_job(base, job_id))
    except UsageError:
        outside = OutsideState()
        with contextlib.suppress(OSError):  # a base folder that cannot be entered
            outside = Presence(folder).ask()
        if outside.slurm_says in (None, "UNKNOWN") and not tasks:
            raise
        if not tasks and state_of_word(outside.slurm_says or "") not in QUEUED:
            raise error_without_folder(base, job_id, str(outside.slurm_says)) from None
        shot = snap(new_view(), folder, outside=outside)
    if not tasks:
        return shot
    shot = replace(shot, tasks=tasks)
    codes = [task.exit_code for task in tasks]
    if None not in codes:
        code = first_failure(codes)
        return replace(shot, state=ENDINGS.get(code, "failed"), exit_code=code)
    if any(task.exit_code is None and task.state not in ("pending", "died") for task in tasks):
        return replace(shot, state="running", exit_code=None)
    return shot


def _tasks(folder: JobFolder) -> tuple[JobLine, ...]:
    """Those that have a folder, and those that only Slurm knows. None of a job that is no array."""
    number = folder.job_id
    if not number.isdecimal():
        return ()
    base = folder.path.parent
    own = tasks_of(base, number)
    if not own:
        # Whether the script that was submitted makes an array, of which no task has started.
        try:
            script = folder.read(SCRIPT_NAME)
        except (OSError, NvrxError):
            return ()
        if not re.search(rb"^#SBATCH --array=", script, re.MULTILINE):
            return ()
    from nvrx_slurm.cluster.slurm import SlurmCluster  # most jobs are no array

    lines = {line.job: line for line in lines_of(own)}
    elements: Mapping[str, JobState] = {}
    with contextlib.suppress(NvrxError):  # then those that have started are all that is known
        elements = SlurmCluster(patience_s=0).elements(folder.full_id)
    unstarted = {name: state for name, state in elements.items() if name not in lines}
    cluster = folder.full_id.removeprefix(number)
    places = ask_queue([f"{name}{cluster}" for name, state in unstarted.items() if state is JobState.PENDING])
    for name, state in unstarted.items():
        code = state.exit_code if state.terminal else None
        word = "pending" if state in QUEUED else "starting"
        lines[name] = JobLine(
            job=name,
            name="",
            cluster="slurm",
            state=word if code is None else ENDINGS.get(code, "failed"),
            nodes="-",
            exit_code=code,
            folder=str((base / name).absolute()),
            pending=place.reason if (place := places.get(f"{name}{cluster}")) else None,
        )
    # By number: as text, task 10 would stand before task 9.
    return tuple(sorted(lines.values(), key=lambda line: int(line.job.rpartition("_")[2])))
