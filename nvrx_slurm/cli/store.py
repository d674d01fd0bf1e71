"""`nvrx-slurm store`: what a site's own store must allow its users."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_slurm.cli.completion import complete_jobs
from nvrx_slurm.cli.job_argument import chosen_job
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.errors import UsageError


@click.group()
def store() -> None:
    """The site's own Redis or Valkey, where jobs of several users share it."""


@store.command()
@click.argument("user", metavar="USER")
@click.option("--namespace", metavar="NAME", help="As `store.namespace` in the user's job.yaml. [default: USER]")
@click.option(
    "--job",
    "job_id",
    metavar="JOB",
    shell_complete=complete_jobs,
    help="For the keys of this job alone, which must run.",
)
@folder_option
def acl(user: str, namespace: str | None, job_id: str | None, folder: Path) -> None:
    """Print the command that makes an ACL user for jobs, for the server's administrator.

    It allows the keys of the namespace's jobs and the commands that jobs send, and nothing else. Replace PASSWORD in
    it. In job.yaml: `store: {url: "redis://USER@host:6379/0", namespace: NAME}`. The server must be Redis 7 or
    Valkey.
    """
    from nvrx_slurm.store.acl import pattern_of_job, pattern_of_namespace, rule

    if job_id is None:
        click.echo(rule(user, pattern_of_namespace(user if namespace is None else namespace)))
        return
    if namespace is not None:
        raise UsageError("--namespace and --job name different keys: give one of the two")
    from nvrx_slurm.report.jobs import find_job

    job_id, folder = chosen_job(job_id, folder)
    address = find_job(folder, job_id).read_store()
    if address is None:
        raise UsageError(f"job {job_id} has no store now: it has ended, or has not started yet")
    click.echo(rule(user, pattern_of_job(address.job)))
