"""`nvrx-slurm report`: a job, or all jobs, as one HTML file that opens offline."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_slurm.cli.completion import complete_jobs
from nvrx_slurm.cli.job_argument import FIND_JOB, chosen_job
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.sanitize import one_line


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False, shell_complete=complete_jobs)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write the page [default: report-JOB.html]; - is standard output.",
)
@click.option("--open", "opens", is_flag=True, help="Show the page in the browser.")
@folder_option
def report(job_id: str | None, output: Path | None, opens: bool, folder: Path) -> None:
    """One HTML file that opens offline: the timeline of each node, goodput, failures, recoveries, the journal.

    The page loads nothing, and nothing runs in it that a job has written. Of a job that runs, it shows how the job
    stands now.
    """
    import gc

    from nvrx_slurm.report.job_report import job_report, write_page
    from nvrx_slurm.report.jobs import find_job

    gc.disable()  # a journal of 100,000 entries has no cycle in it, and to look for one takes a fifth of the time
    job_id, folder = chosen_job(job_id, folder)
    job = find_job(folder, job_id)
    page = job_report(job).html
    if output == Path("-"):
        if opens:
            raise UsageError("--open shows a file: leave out -o -")
        click.get_binary_stream("stdout").write(page)
        return
    path = write_page(output or Path(f"report-{job.job_id}.html"), page)
    click.echo(one_line(str(path)))
    if opens:
        show(path)


report.help = f"{(report.help or '').rstrip()}\n\n{FIND_JOB}"


def show(path: Path) -> None:
    """Open a file in the user's browser. Raises UsageError where there is none: the file is written all the same."""
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        raise UsageError(f"no browser can be started here; the page is {path.absolute()}")
