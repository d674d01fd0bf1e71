"""`nvrx-slurm submit`"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import click

from nvrx_slurm.cli.options import JobChoice, job_options
from nvrx_slurm.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, NvrxError, UsageError

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import ClusterName, Job
    from nvrx_slurm.cluster.states import JobState


@click.command()
@job_options
@click.option("--wait", is_flag=True, help="Wait for the job's end, and exit with its exit code. Ctrl-C cancels it.")
@click.option("--watch", is_flag=True, help="Show the job live until it ends. Ctrl-C leaves it running.")
@click.option("--dry-run", is_flag=True, help="Print the script that would be submitted, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the id.")
@click.option("--local", is_flag=True, help="Run it in the background of this machine, without Slurm.")
def submit(choice: JobChoice, wait: bool, watch: bool, dry_run: bool, as_json: bool, local: bool) -> int:
    """Submit JOB_YAML to Slurm, and print the job's id."""
    from nvrx_slurm.api.submission import render, submit_planned

    if wait and watch:
        raise UsageError("--wait and --watch both follow the job: choose one")
    cluster: ClusterName = "local" if local else "slurm"
    loaded = choice.load()
    plan = choice.plan(loaded)
    if dry_run:
        click.echo(render(loaded.spec, plan, cluster=cluster), nl=False)
        return EXIT_DONE
    job = submit_planned(loaded.spec, plan, cluster=cluster)
    click.echo(_as_json(job) if as_json else job.job_id)
    if watch:
        return _watch(job)
    return _wait(job) if wait else EXIT_DONE


def _as_json(job: Job) -> str:
    return json.dumps({"job": job.job_id, "cluster": job.cluster, "folder": str(job.folder)})


def _watch(job: Job) -> int:
    from nvrx_slurm.report.live import watch

    try:
        return watch(job.folder.parent, job.folder.name)
    except KeyboardInterrupt:
        click.echo(f"job {job.job_id} goes on; to end it: nvrx-slurm cancel {job.job_id}", err=True)
        return EXIT_INTERRUPTED


def _wait(job: Job) -> int:
    def tell(state: JobState) -> None:
        click.echo(f"job {job.job_id}: {state}", err=True)

    with _sigterm_interrupts():
        try:
            return job.wait(on_state=tell)
        except KeyboardInterrupt:
            _cancel(job)
            return EXIT_INTERRUPTED
        except _Terminated:
            _cancel(job)
            return EXIT_TERMINATED


def _cancel(job: Job) -> None:
    """Cancel the job, and stay until it is gone; a second Ctrl-C does not stay."""
    click.echo(f"cancelling job {job.job_id}", err=True)
    try:
        job.cancel()
        click.echo(f"job {job.job_id}: {job.wait_until_gone()}", err=True)
    except NvrxError as error:  # the exit code tells of the interruption all the same
        click.echo(f"nvrx-slurm: error: {error}", err=True)


class _Terminated(BaseException):
    """SIGTERM came."""


def _raise_terminated(*_: object) -> NoReturn:
    raise _Terminated


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
