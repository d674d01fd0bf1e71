"""`nvrx-slurm status`: one job, or all jobs of a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.errors import UsageError

if TYPE_CHECKING:
    from nvrx_slurm.report.snapshot import Snapshot


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option(
    "--watch", is_flag=True, help="Keep the screen up to date until the job ends; exits with its exit code."
)
@click.option("--json", "as_json", is_flag=True, help="One documented object (docs/journal.md).")
@folder_option
def status(job_id: str | None, watch: bool, as_json: bool, folder: Path) -> int:
    """How a job stands: nodes, ranks, cycle, spares, last failure and decision. Without JOB: all jobs.

    BEAT is the age of a node's last sign of life. LAG: how many steps a rank is behind the fastest of its replica;
    QUIET: how long ago it made progress last.
    """
    if watch:
        if job_id is None or as_json:
            raise UsageError("--watch shows one job on the screen: name it, and leave --json out")
        from nvrx_slurm.report import live

        return live.watch(folder, job_id)
    from nvrx_slurm.report import snapshot
    from nvrx_slurm.report.model import to_json
    from nvrx_slurm.util.sanitize import json_text

    shot = None if job_id is None else _snapshot(folder, job_id)
    lines = snapshot.list_jobs(folder) if shot is None else []
    if as_json:
        click.echo(json_text(to_json({"jobs": lines}) if shot is None else snapshot.as_json(shot)))
    elif shot is None and not lines:
        click.echo(f"no jobs in {folder}", err=True)
    elif sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show_jobs(lines) if shot is None else screen.show(shot)
    else:
        from nvrx_slurm.report import plain

        click.echo(plain.jobs(lines) if shot is None else plain.page(shot))
    return 0


def _snapshot(base: Path, job_id: str) -> Snapshot:
    """The job from its folder; one that has none yet, but that Slurm knows, is pending."""
    from nvrx_slurm.cluster.base import folder_name
    from nvrx_slurm.journal.folder import JobFolder
    from nvrx_slurm.report import snapshot
    from nvrx_slurm.report.jobs import find_job
    from nvrx_slurm.report.presence import Presence
    from nvrx_slurm.report.view import new_view

    folder_name(job_id)  # raises UsageError
    try:
        return snapshot.take(find_job(base, job_id))
    except UsageError:
        folder = JobFolder(base / job_id)
        outside = Presence(folder).ask()
        if outside.slurm_says in (None, "UNKNOWN"):
            raise
        return snapshot.snap(new_view(), folder, outside=outside)
