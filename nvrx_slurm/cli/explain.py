"""`nvrx-slurm explain`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.errors import UsageError

if TYPE_CHECKING:
    from nvrx_slurm.report.failures import FailureTimeline
    from nvrx_slurm.report.model import JobView


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--cycle", type=click.IntRange(min=0), help="The cycle that failed. Without it: the last that did.")
@click.option("--replica", help="Whose cycle it was, in a job with several replicas.")
@click.option("--json", "as_json", is_flag=True, help="One documented object (docs/attribution.md).")
@folder_option
def explain(job_id: str, cycle: int | None, replica: str | None, as_json: bool, folder: Path) -> None:
    """Why a job failed, and what was done about it: the first failure, what followed from it, the verdict of each
    source, progress, budget, the decision and who made it.

    Where the rules were not asked while the job ran they are asked now.
    """
    from nvrx_slurm.report import explanation, source
    from nvrx_slurm.report.failures import read_failures
    from nvrx_slurm.report.jobs import find_job, read_plan
    from nvrx_slurm.report.model import to_json
    from nvrx_slurm.util.sanitize import json_text

    job = find_job(folder.absolute(), job_id)
    plan = read_plan(job)
    if plan is None:
        raise UsageError(f"job {job_id} has not started yet: there is nothing to explain")
    history, view = read_failures(plan, job, source.so_far(job))
    each = _chosen(history.timelines, view, job_id, cycle, replica)
    now = None
    if not any(answer.attribution.primary for answer in each.answers):
        from nvrx_slurm.attribution.analyze.analyzer import analyze_sync

        now = analyze_sync(each.inquiry)
    report = explanation.explanation(each, job=job_id, name=plan.name, now=now)
    if as_json:
        click.echo(json_text(to_json(report)))
        return
    rows, table = explanation.facts(report, plan.fault_tolerance, str(job.path)), explanation.verdicts(report)
    if sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show_facts(rows, table)
    else:
        from nvrx_slurm.report import plain

        click.echo("\n\n".join([plain.pairs(rows), *([plain.table(table)] if table.rows else [])]))


def _chosen(
    timelines: list[FailureTimeline], view: JobView, job_id: str, cycle: int | None, replica: str | None
) -> FailureTimeline:
    """The last failure that fits. Raises UsageError with those that there are."""
    from nvrx_slurm.report.words import plural

    keys = [each.inquiry.key for each in timelines]
    for each, key in zip(reversed(timelines), reversed(keys), strict=True):
        if cycle in (None, key.cycle) and replica in (None, key.replica):
            return each
    if timelines:
        known = ", ".join(f"{key.replica} cycle {key.cycle}" for key in keys[-8:])
        raise UsageError(f"no such failure in job {job_id}; it has: {known}")
    end = f"; it ended with {view.shutdown.exit_code}" if view.shutdown else ""
    count = view.restarts_in_process
    inside = f"; its ranks restarted in process {plural(count, 'time')}, as `events` shows" if count else ""
    raise UsageError(f"nothing has failed in job {job_id}{inside}{end}")
