"""`nvrx-slurm wait`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option, seconds_of

if TYPE_CHECKING:
    from nvrx_slurm.cluster.states import JobState


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--timeout", metavar="DURATION", help="Give up (exit code 124) after this long: 90s, 10m, 2h.")
@folder_option
def wait(job_id: str, timeout: str | None, folder: Path) -> int:
    """Wait for a job's end, and exit with its exit code. Ctrl-C ends the wait, not the job."""
    from nvrx_slurm.api.handle import job

    bound_s = None if timeout is None else seconds_of("--timeout", timeout)

    def tell(state: JobState) -> None:
        click.echo(f"job {job_id}: {state}", err=True)

    return job(job_id, folder=folder).wait(bound_s, on_state=tell)
