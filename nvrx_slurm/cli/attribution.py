"""`nvrx-slurm attribution` and `mcp`: what verdicts were worth, notices still to be sent, tools for an assistant."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from nvrx_slurm.cli.job_argument import folder_of_user, found_jobs, jobs_argument
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.cli.output import note, print_facts, print_json
from nvrx_slurm.errors import EXIT_UNREACHABLE, UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvrx_slurm.jobspec.plan import Plan
    from nvrx_slurm.journal.folder import JobFolder

MOST_FAILURES = 3


@click.group()
def attribution() -> None:
    """Failure attribution: the precision of its verdicts, and notifications that are still to be sent."""


@attribution.command(short_help="Compare each STOP of a dry run with its restart.")
@jobs_argument
@click.option("--json", "as_json", is_flag=True, help="One object: each would-be STOP and the sums.")
@folder_option
def report(job_ids: tuple[str, ...], as_json: bool, folder: Path) -> None:
    """Would it have been right to stop? Each STOP of a dry run beside what the restart then did.

    Right: the job failed again and had made no new step. Wrong: it made new steps, or completed. Without JOB: all
    jobs of the folder.
    """
    from nvrx_slurm.report import hindsight, source
    from nvrx_slurm.report.failure_replay import read_failures

    unreadable: list[str] = []
    jobs = _jobs_with_plans(folder, job_ids, unreadable)
    told = ((job.job_id, *read_failures(plan, job, source.so_far(job))) for job, plan in jobs)
    result = hindsight.hindsight(told, unreadable)
    if as_json:
        print_json(result)
    else:
        for problem in unreadable:
            note(problem)
        print_facts(hindsight.facts(result), hindsight.table(result))


@attribution.command(short_help="Send the remaining notifications.")
@jobs_argument
@folder_option
def flush(job_ids: tuple[str, ...], folder: Path) -> int:
    """Send what jobs could not deliver to Slack, the index or the ledger of suspect nodes while those were down.
    Without JOB: of all jobs of the folder.

    Exits with 69 if something is still left.
    """
    import asyncio

    from nvrx_slurm.attribution.notify import flush as flush_job
    from nvrx_slurm.util.sanitize import one_line

    is_left, unreadable = False, list[str]()
    for job, plan in _jobs_with_plans(folder, job_ids, unreadable):
        if not (job.path / "spool").is_dir():
            continue
        for result in asyncio.run(flush_job(plan.fault_tolerance.attribution, job.path)):
            why = f": {result.problem}" if result.problem else ""
            if result.sent or result.left:
                click.echo(one_line(f"{job.job_id}  {result.receiver}: {result.sent} sent, {result.left} left{why}"))
            is_left = is_left or result.left > 0
    for problem in unreadable:
        note(problem)
    return EXIT_UNREACHABLE if is_left else 0


def _jobs_with_plans(
    folder: Path, job_ids: tuple[str, ...], unreadable: list[str]
) -> Iterator[tuple[JobFolder, Plan]]:
    """These jobs, or all of the folder whose plan can be read; why one of those cannot be is added to `unreadable`.
    Raises UsageError."""
    from nvrx_slurm.report.jobs import known_jobs, read_plan

    for job in found_jobs(job_ids, folder) if job_ids else known_jobs(folder):
        try:
            plan = read_plan(job)
        except UNREADABLE as error:
            if job_ids:
                raise
            unreadable.append(f"{job.job_id}: {error}")
        else:
            if plan is not None:
                yield job, plan


@click.command()
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read logs below this folder only; repeatable. Without it: all that you may read.",
)
@click.option(
    "--rules",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of your own rules, beside the shipped ones; repeatable.",
)
@folder_option
def mcp(roots: tuple[Path, ...], rules: tuple[Path, ...], folder: Path) -> None:
    """Serve the tools of attribution to an assistant, over standard input and output (MCP).

    Tools: attribute, analyze_paths, explain_job, list_rules, explain_rule.
    """
    from nvrx_slurm.attribution.http_client import need

    need("mcp")
    from nvrx_slurm.attribution.mcp_server import serve

    serve(rules=rules, roots=roots, explain=partial(_explain, folder_of_user(folder)))


def _explain(base: Path | None, job_id: str) -> dict[str, Any]:
    """How the job stands, as `status --json` has it, and its last failures, as `explain --json` has them."""
    import msgspec

    from nvrx_slurm.report import snapshot
    from nvrx_slurm.report.explanation import Explanation, explanation
    from nvrx_slurm.report.failure_replay import FailureReplay
    from nvrx_slurm.report.jobs import base_of, find_job, read_plan

    job = find_job(base_of(job_id) if base is None else base, job_id)
    plan = read_plan(job)
    found: list[Explanation] = []
    if plan is None:
        shot = snapshot.take(job)
    else:
        replay = FailureReplay(plan, job)
        shot = snapshot.take(job, replay)
        # The last ones, backwards: an assistant reads the newest first.
        newest = replay.failures[: -MOST_FAILURES - 1 : -1]
        found = [explanation(failure, shot.view, job=job_id, name=plan.name) for failure in newest]
    answer = {"status": snapshot.as_status(shot), "failures": found}
    return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(answer)))
