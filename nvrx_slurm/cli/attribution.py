"""`nvrx-slurm attribution`: what the verdicts were worth, and which notices wait to be sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.errors import EXIT_UNREACHABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvrx_slurm.journal.folder import JobFolder
    from nvrx_slurm.report.failures import Failures
    from nvrx_slurm.report.model import JobView


@click.group()
def attribution() -> None:
    """Failure attribution: what its verdicts were worth, and notices that are still to be sent."""


@attribution.command(short_help="Would it have been right to stop?")
@click.argument("job_ids", metavar="[JOB]…", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One object: each would-be STOP and the sums.")
@folder_option
def report(job_ids: tuple[str, ...], as_json: bool, folder: Path) -> None:
    """Would it have been right to stop? Each STOP of a dry run beside what the restart then did.

    Right: the job failed again and had made no new step. Wrong: it made new steps, or completed. Without JOB: all
    jobs of the folder.
    """
    from nvrx_slurm.report import hindsight, plain
    from nvrx_slurm.report.jobs import find_job, known_jobs
    from nvrx_slurm.report.model import to_json
    from nvrx_slurm.util.sanitize import json_text

    jobs = [find_job(folder, job_id) for job_id in job_ids] if job_ids else known_jobs(folder)
    result = hindsight.hindsight(_failures(jobs))
    if as_json:
        click.echo(json_text(to_json(result)))
        return
    rows, table = hindsight.facts(result), hindsight.table(result)
    if sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show_facts(rows, table)
    else:
        click.echo("\n\n".join([plain.pairs(rows), *([plain.table(table)] if table.rows else [])]))


@attribution.command(short_help="Send the notices that are left.")
@click.argument("job_ids", metavar="[JOB]…", nargs=-1)
@folder_option
def flush(job_ids: tuple[str, ...], folder: Path) -> int:
    """Send what jobs could not deliver to Slack or the index while those were down. Without JOB: of all jobs of the
    folder.

    Exits with 69 if something is still left.
    """
    import asyncio

    from nvrx_slurm.attribution.notify import flush as flush_job
    from nvrx_slurm.report.jobs import find_job, known_jobs, read_plan
    from nvrx_slurm.util.sanitize import one_line

    jobs = [find_job(folder, job_id) for job_id in job_ids] if job_ids else known_jobs(folder)
    is_left = False
    for job in jobs:
        plan = read_plan(job)
        if plan is None or not (job.path / "spool").is_dir():
            continue
        for result in asyncio.run(flush_job(plan.fault_tolerance.attribution, job.path)):
            why = f": {result.problem}" if result.problem else ""
            if result.sent or result.left:
                click.echo(one_line(f"{job.job_id}  {result.receiver}: {result.sent} sent, {result.left} left{why}"))
            is_left = is_left or result.left > 0
    return EXIT_UNREACHABLE if is_left else 0


def _failures(jobs: Iterable[JobFolder]) -> Iterator[tuple[str, Failures, JobView]]:
    """Of each job that has a plan."""
    from nvrx_slurm.report import source
    from nvrx_slurm.report.failures import read_failures
    from nvrx_slurm.report.jobs import read_plan

    for job in jobs:
        if plan := read_plan(job):
            yield job.job_id, *read_failures(plan, job, source.so_far(job))
