"""`nvrx-slurm ls` and `rm`: a user's jobs, wherever their folders lie."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import click

from nvrx_slurm.cli.job_argument import folder_of_user, found_jobs, jobs_argument
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.cli.output import note, print_json, print_problems, print_table
from nvrx_slurm.errors import EXIT_DONE, EXIT_USAGE, UsageError
from nvrx_slurm.util.sanitize import one_line


@click.command()
@click.option("-n", "--last", "most", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@click.option("--all", "is_all", is_flag=True, help="All of them.")
@click.option("--live", is_flag=True, help="Only those that have not ended.")
@click.option("--json", "as_json", is_flag=True, help="One object, with all that `status --json` says of each.")
@folder_option
def ls(most: int, is_all: bool, live: bool, as_json: bool, folder: Path) -> None:
    """Your jobs, the newest first, wherever you are: those of the index, and of `nvrx-jobs` here.

    With --folder or NVRX_SLURM_FOLDER: the jobs of that folder.
    """
    from nvrx_slurm.report import snapshot
    from nvrx_slurm.report.jobs import my_jobs

    found = my_jobs(folder_of_user(folder))
    # Of those that left no end only their state says whether they live.
    if live:
        found = iter(snapshot.not_ended(found))
    shown = list(found if is_all else islice(found, most))
    lines = snapshot.lines_of(shown)
    if live:
        lines = [line for line in lines if line.exit_code is None and line.state != "died"]
    if as_json:
        print_json({"jobs": lines})
    elif not lines:
        click.echo("no jobs", err=True)
    else:
        from nvrx_slurm.report import page

        print_table(page.my_job_table(lines))
        print_problems(lines)
    # `found` goes on behind the last one that was taken from it.
    if not is_all and next(iter(found), None) is not None:
        click.echo(f"older jobs are left out: --all, or --last N with more than {most}", err=True)


@click.command()
@jobs_argument
@click.option("--expired", "is_expired", is_flag=True, help="Jobs that the retention in the site file has expired.")
@click.option("--days", type=click.IntRange(min=1), help="With --expired: ended longer ago than this.")
@click.option("--keep", type=click.IntRange(min=1), help="With --expired: but never the newest so many.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--force", is_flag=True, help="Also a named job whose end is not known.")
@folder_option
def rm(
    job_ids: tuple[str, ...],
    is_expired: bool,
    days: int | None,
    keep: int | None,
    dry_run: bool,
    force: bool,
    folder: Path,
) -> int:
    """Remove the folders of jobs that have ended: logs, journal, stacks, and all other files in them.

    A job that runs, or may still run, is left alone, and the exit code is 2. With --expired, the jobs of all folders
    by `retention: {days: 90, keep: 20}` in the site file, ~/.config/nvrx-slurm/config.yaml. Nothing is removed
    without this command; a line for cron: `0 4 * * * nvrx-slurm rm --expired`.
    """
    from nvrx_slurm.report import removal
    from nvrx_slurm.report.jobs import my_jobs
    from nvrx_slurm.report.words import plural
    from nvrx_slurm.util.clock import SystemClock

    if is_expired == bool(job_ids):
        raise UsageError("name the jobs to remove, or --expired")
    if not is_expired and (days or keep):
        raise UsageError("--days and --keep choose among the jobs that --expired looks at")
    if is_expired:
        from nvrx_slurm.jobspec.load import load_without_job

        retention = load_without_job().retention
        days, keep = days or retention.days, keep or retention.keep
        if not (days or keep):
            raise UsageError(
                "there is no retention: set `retention: {days: 90}` in ~/.config/nvrx-slurm/config.yaml, or --days"
            )
        jobs = list(removal.expired(my_jobs(folder_of_user(folder)), days=days, keep=keep, clock=SystemClock()))
    else:
        jobs = found_jobs(job_ids, folder)  # before the first is removed
    exit_code, freed = EXIT_DONE, 0
    for job in jobs:
        kept = removal.why_kept(job)
        if kept is not None and (kept.lives or is_expired or not force):
            note(f"nvrx-slurm: job {job.job_id} is kept: {kept.why}")
            exit_code = EXIT_USAGE
            continue
        size = removal.size_of(job.path)
        freed += size
        if not dry_run:
            removal.remove(job)
        click.echo(one_line(f"{job.job_id}  {size / 1e6:.1f} MB  {job.path}"))
    if is_expired:
        what = "would be removed" if dry_run else "removed"
        click.echo(f"{plural(len(jobs), 'job')}, {freed / 1e6:.1f} MB {what}", err=True)
    return exit_code
