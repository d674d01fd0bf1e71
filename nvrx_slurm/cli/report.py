"""`nvrx-slurm report` and `trace`: a job, or all jobs, as one HTML file; a job as a trace for Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nvrx_slurm.cli.completion import complete_jobs
from nvrx_slurm.cli.job_argument import chosen_job, folder_of_user, job_argument, with_find_job
from nvrx_slurm.cli.options import folder_option, output_option, since_option
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.sanitize import one_line


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False, shell_complete=complete_jobs)
@output_option("page", "report-JOB.html, or report.html")
@since_option("All jobs that were active since then, on one page: 30d, 2026-11-01T00:00.")
@click.option("--open", "opens", is_flag=True, help="Show the page in the browser.")
@folder_option
def report(job_id: str | None, output: Path | None, since: float | None, opens: bool, folder: Path) -> None:
    """One HTML file that opens offline: the timeline of each node, goodput, failures, recoveries, the journal.

    The page loads nothing, and nothing runs in it that a job has written. Of a job that runs, it shows how the job
    stands now. With --since: failures by cause, node and hour, repairs, and what verdicts were worth, of all your
    jobs, or of those in --folder; what was read once is kept in ~/.cache/nvrx-slurm.
    """
    import gc

    from nvrx_slurm.report.job_report import job_report
    from nvrx_slurm.report.jobs import find_job

    gc.disable()  # a journal of 100,000 entries has no cycle in it, and to look for one takes a fifth of the time
    if since is None:
        job_id, folder = chosen_job(job_id, folder)
        job = find_job(folder, job_id)
        page, name = job_report(job).html, f"report-{job.job_id}.html"
    elif job_id is not None:
        raise UsageError("--since shows all jobs: leave JOB out")
    else:
        from nvrx_slurm.report.fleet import read_fleet
        from nvrx_slurm.report.jobs import my_jobs
        from nvrx_slurm.report.web.fleet_page import fleet_page
        from nvrx_slurm.util.clock import SystemClock

        fleet = read_fleet(my_jobs(folder_of_user(folder)), since=since)
        page, name = fleet_page(fleet, since=since, now=SystemClock().wall()), "report.html"
    if output == Path("-") and opens:
        raise UsageError("--open shows a file: leave out -o -")
    path = _written(page, output or Path(name))
    if opens:
        show(path)


report.help = with_find_job(report.help)


def _written(data: bytes, path: Path) -> Path:
    """Write a file, and print where; `-` is standard output. Raises UsageError."""
    from nvrx_slurm.report.job_report import write_page

    if path == Path("-"):
        sys.stdout.buffer.write(data)
    else:
        click.echo(one_line(str(write_page(path, data))))
    return path


def show(path: Path) -> None:
    """Open a file in the user's browser. Raises UsageError where there is none: the file is written all the same."""
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        raise UsageError(f"no browser can be started here; the page is {path.absolute()}")


@click.command()
@job_argument
@output_option("trace", "trace-JOB.json")
def trace(job_id: str, output: Path | None, folder: Path) -> None:
    """A trace for Perfetto: a track for each node and rank, slices for what they did, flows from failure to recovery.

    Open it in https://ui.perfetto.dev, which reads the file in the browser, or in chrome://tracing.
    """
    import gc

    from nvrx_slurm.report import snapshot
    from nvrx_slurm.report.history import JobTimeline
    from nvrx_slurm.report.jobs import find_job
    from nvrx_slurm.report.trace import WorkerStarts
    from nvrx_slurm.report.trace import trace as trace_of

    gc.disable()  # as above
    job = find_job(folder, job_id)
    history, workers = JobTimeline(), WorkerStarts()
    shot = snapshot.take(job, history, workers)
    history.finish(shot.view, shot.until)
    data = trace_of(shot.view, history, workers, shot.until or shot.view.t)
    _written(data, output or Path(f"trace-{job.job_id}.json"))
