"""All jobs of a base folder, a line each."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.jobs import known_jobs
from nvrx_slurm.report.model import Value
from nvrx_slurm.report.presence import ask_slurm, in_slurm
from nvrx_slurm.report.snapshot import Snapshot


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


def list_jobs(base: Path) -> list[JobLine]:
    """Every job of the folder, newest first. A running job's step comes from its store, if that answers."""
    folders = known_jobs(base)
    asked = [folder.job_id for folder in folders if _only_slurm_knows(folder)]
    states = ask_slurm(asked) if asked else {}  # one call for all of them
    return [line_of(snapshot.take(folder, slurm=states.get)) for folder in folders]


def _only_slurm_knows(folder: JobFolder) -> bool:
    return folder.read_result() is None and in_slurm(folder.job_id, folder.read_info())


def line_of(shot: Snapshot) -> JobLine:
    """A job in one line."""
    view = shot.view
    wanted = view.plan.total_nodes if view.plan else len(view.nodes)
    return JobLine(
        job=shot.folder.job_id,
        name=view.name or (shot.info.name if shot.info else ""),
        cluster=shot.info.cluster if shot.info else "",
        state=shot.state,
        nodes=f"{len(view.present)}/{wanted}",
        cycle=view.cycle if view.replicas else None,
        restarts=view.restarts,
        step=view.step,
        age_s=None if shot.started_at is None else max(0.0, shot.now - shot.started_at),
        exit_code=shot.exit_code,
    )
