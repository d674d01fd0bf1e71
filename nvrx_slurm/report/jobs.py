"""The jobs of a base folder: which there are, and how each stands."""

from __future__ import annotations

import difflib
from pathlib import Path

from nvrx_slurm.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_RESTART,
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_TIMEOUT,
    UsageError,
)
from nvrx_slurm.folder import JobFolder, JobInfo
from nvrx_slurm.records import Plan
from nvrx_slurm.report.model import JobView, Value

ENDINGS = {
    EXIT_DONE: "completed",
    EXIT_TIMEOUT: "timeout",
    EXIT_INTERRUPTED: "cancelled",
    EXIT_TERMINATED: "cancelled",
    EXIT_RETRY: "lost",
    EXIT_NO_RESTART: "stopped",
}
"""Exit code → the state of a job that ended with it; any other is `failed`."""

MOST_NAMED = 8


class JobLine(Value, frozen=True, kw_only=True):
    """One job of the table that `status` prints without a job. `age_s`: since it was started."""

    job: str
    name: str
    cluster: str
    state: str
    nodes: str  # present/asked for
    cycle: int | None = None
    restarts: int = 0
    step: int | None = None
    age_s: float | None = None
    exit_code: int | None = None


def known_jobs(base: Path) -> list[JobFolder]:
    """The job folders below `base`, newest first. A base folder that does not exist holds none."""
    if not base.is_dir():
        return []
    folders = [JobFolder(path) for path in base.iterdir() if _is_job(path)]
    return sorted(folders, key=lambda folder: (started_at(folder), folder.job_id), reverse=True)


def find_job(base: Path, job_id: str) -> JobFolder:
    """The folder of a job. Raises UsageError with the jobs that there are."""
    folder = base / job_id
    if job_id and folder.parent == base and _is_job(folder):
        return JobFolder(folder)
    known = [job.job_id for job in known_jobs(base)]
    if not known:
        raise UsageError(f"no job {job_id!r}: {base} holds no jobs; --folder names another base folder")
    near = difflib.get_close_matches(job_id, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    raise UsageError(f"no job {job_id!r} in {base}{hint}; it holds {', '.join(known[:MOST_NAMED])}{more}")


def read_plan(folder: JobFolder) -> Plan | None:
    """What the job was to run, if its folder tells."""
    return folder.read_plan() if folder.plan_path.is_file() else None


def started_at(folder: JobFolder) -> float:
    """When the job was started: as its batch host says, or else by the age of its plan."""
    info = folder.read_info()
    if info is not None:
        return info.started_at
    return folder.plan_path.stat().st_mtime if folder.plan_path.exists() else folder.path.stat().st_mtime


def state_of(view: JobView, folder: JobFolder, *, gone: bool) -> str:
    """One word for how the job stands: `starting`, `joining`, `running`, `recovering`, `stopping` while it lives;
    `completed`, `failed`, `cancelled`, `timeout`, `lost`, `stopped` by its exit code; `died` if it told none."""
    code = exit_code_of(view, folder)
    if code is not None:
        return ENDINGS.get(code, "failed")
    if gone:
        return "died"
    if view.shutdown is not None:
        return "stopping"
    phases = {replica.phase for replica in view.replicas.values()}
    if not phases:
        return "starting"
    open_again = any(r.phase in ("joining", "stopping", "starting") and r.cycle for r in view.replicas.values())
    if open_again:
        return "recovering"
    return "joining" if phases & {"joining", "starting"} else "running"


def exit_code_of(view: JobView, folder: JobFolder) -> int | None:
    """How the job ended: its result says, or its journal; None while it runs."""
    result = folder.read_result()
    return view.exit_code if result is None else result.exit_code


def line_of(view: JobView, folder: JobFolder, info: JobInfo | None, *, gone: bool, now: float) -> JobLine:
    """The job's line in the table of all jobs."""
    wanted = view.plan.total_nodes if view.plan else len(view.nodes)
    return JobLine(
        job=folder.job_id,
        name=view.name or (info.name if info else ""),
        cluster=info.cluster if info else "",
        state=state_of(view, folder, gone=gone),
        nodes=f"{len(view.present)}/{wanted}",
        cycle=view.cycle if view.replicas else None,
        restarts=view.restarts,
        step=view.step,
        age_s=max(0.0, now - started_at(folder)),
        exit_code=exit_code_of(view, folder),
    )


def _is_job(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("plan.json", "job.json"))
