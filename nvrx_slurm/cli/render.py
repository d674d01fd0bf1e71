"""`nvrx-slurm render`"""

from __future__ import annotations

import sys

import click

from nvrx_slurm.cli.options import JobChoice, JobCommand, job_options, make_base
from nvrx_slurm.util.terminal import write_exactly


@click.command(cls=JobCommand)
@job_options
@click.option("--local", is_flag=True, help="The script for this machine, without Slurm.")
def render(choice: JobChoice, local: bool) -> None:
    """Print the job script of JOB_YAML.

    The script is all there is: `sbatch` of it does what `nvrx-slurm submit` does. The folder that it logs into is
    made, since Slurm fails a job without a word where that is missing.
    """
    from nvrx_slurm.jobspec.script import render_job

    loaded = choice.load()
    plan = choice.plan(loaded)
    cluster = "local" if local else "slurm"
    script = render_job(loaded.spec, plan, cluster=cluster, python=sys.executable)  # type: ignore[arg-type]
    make_base(choice.folder)
    write_exactly(script)
