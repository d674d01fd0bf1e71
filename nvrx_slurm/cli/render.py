"""`nvrx-slurm render`"""

from __future__ import annotations

import sys

import click

from nvrx_slurm.cli.options import JobChoice, job_options


@click.command()
@job_options
@click.option("--local", is_flag=True, help="The script for this machine, without Slurm.")
def render(choice: JobChoice, local: bool) -> None:
    """Print the job script of JOB_YAML.

    The script is all there is: `sbatch` of it does what `nvrx-slurm submit` does.
    """
    from nvrx_slurm.render.script import render_job

    loaded = choice.load()
    plan = choice.plan(loaded)
    cluster = "local" if local else "slurm"
    click.echo(render_job(loaded.spec, plan, cluster=cluster, python=sys.executable), nl=False)  # type: ignore[arg-type]
