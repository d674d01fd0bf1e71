"""`nvrx-slurm events`: the journal of a job, an event a line."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_slurm.cli.options import folder_option


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="The journal's own lines, JSON objects, one an event.")
@folder_option
def events(job_id: str, follow: bool, as_json: bool, folder: Path) -> None:
    """The journal of a job: what happened, what was decided, and why.

    Times count from the job's start. Every event and its fields: docs/journal.md.
    """
    from nvrx_slurm.journal.records import entry_to_json
    from nvrx_slurm.report import source
    from nvrx_slurm.report.jobs import find_job
    from nvrx_slurm.report.sentences import Lines
    from nvrx_slurm.util.sanitize import json_text

    job = find_job(folder, job_id)
    entries = source.follow(job) if follow else source.so_far(job)
    lines = Lines()
    for entry in entries:
        print(json_text(entry_to_json(entry)) if as_json else lines.in_words(entry), flush=follow)
