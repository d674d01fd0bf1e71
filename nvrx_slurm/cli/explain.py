"""`nvrx-slurm explain`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.errors import UsageError

if TYPE_CHECKING:
    from nvrx_slurm.journal.verdicts import Attribution, Inquiry
    from nvrx_slurm.report.failures import Failures, FailureTimeline


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
    from nvrx_slurm.report.failures import failures
    from nvrx_slurm.report.jobs import find_job, read_plan
    from nvrx_slurm.util.sanitize import json_text

    job = find_job(folder.absolute(), job_id)
    plan = read_plan(job)
    if plan is None:
        raise UsageError(f"job {job_id} has not started yet: there is nothing to explain")
    history = failures(plan, job, source.so_far(job))
    each = _chosen(history, job_id, cycle, replica)
    now = None if any(answer.attribution.primary for answer in each.answers) else _analyzed(each.inquiry)
    report = explanation.explanation(each, job=job_id, name=plan.name, now=now)
    if as_json:
        click.echo(json_text(explanation.as_json(report)))
        return
    rows, table = explanation.facts(report, plan.fault_tolerance, str(job.path)), explanation.verdicts(report)
    if sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show_facts(rows, table)
    else:
        from nvrx_slurm.report import plain

        click.echo("\n\n".join([plain.pairs(rows), *([plain.table(table)] if table.rows else [])]))


def _chosen(history: Failures, job_id: str, cycle: int | None, replica: str | None) -> FailureTimeline:
    """The last failure that fits. Raises UsageError with those that there are."""
    fits = [each for each in history.timelines if cycle in (None, each.key[2]) and replica in (None, each.key[1])]
    if fits:
        return fits[-1]
    if not history.timelines:
        end = "" if history.exit_code is None else f"; it ended with {history.exit_code}"
        raise UsageError(f"nothing has failed in job {job_id}{_in_process(history)}{end}")
    known = ", ".join(f"{each.key[1]} cycle {each.key[2]}" for each in history.timelines[-8:])
    raise UsageError(f"no such failure in job {job_id}; it has: {known}")


def _in_process(history: Failures) -> str:
    count = sum(record.times for records in history.in_process.values() for record in records)
    return f"; `events` has what its ranks restarted for in process ({count} so far)" if count else ""


def _analyzed(inquiry: Inquiry) -> Attribution:
    from nvrx_slurm.attribution.analyze.analyzer import analyze_sync

    return analyze_sync(inquiry)
