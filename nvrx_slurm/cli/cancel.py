"""`nvrx-slurm cancel`"""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_slurm.cli.options import folder_option

GONE_TIMEOUT_S = 120.0
"""Longer than the longest teardown that Slurm's own KillWait (30 s by default) allows."""


@click.command()
@click.argument("job_id", metavar="JOB")
@folder_option
def cancel(job_id: str, folder: Path) -> None:
    """Cancel a job, wait until its workers are gone, and print its state. A job that has ended is left alone."""
    from nvrx_slurm.api.handle import job

    found = job(job_id, folder=folder)
    found.cancel()
    click.echo(found.wait_until_gone(GONE_TIMEOUT_S))
