"""`nvrx-slurm submit`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli import signals
from nvrx_slurm.cli.options import JobChoice, JobCommand, job_options
from nvrx_slurm.errors import EXIT_DONE, EXIT_INTERRUPTED, NvrxError, UsageError
from nvrx_slurm.util.sanitize import shown
from nvrx_slurm.util.terminal import write_exactly

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import ClusterName, Job
    from nvrx_slurm.api.prepared import PreparedJob
    from nvrx_slurm.cluster.states import JobState


@click.command(cls=JobCommand)
@job_options
@click.option("--wait", is_flag=True, help="Wait for the job's end, and exit with its exit code. Ctrl-C cancels it.")
@click.option("--watch", is_flag=True, help="Show the job live until it ends. Ctrl-C leaves it running.")
@click.option("--dry-run", is_flag=True, help="Print the script that would be submitted, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the id.")
@click.option("--local", is_flag=True, help="Run it in the background of this machine, without Slurm.")
@click.option("--exclude-suspects", is_flag=True, help="Ask for none of the nodes that `nvrx-slurm nodes` lists.")
def submit(
    choice: JobChoice, wait: bool, watch: bool, dry_run: bool, as_json: bool, local: bool, exclude_suspects: bool
) -> int:
    """Submit JOB_YAML to Slurm, and print the job's id."""
    if wait and watch:
        raise UsageError("--wait and --watch both follow the job: choose one")
    cluster: ClusterName = "local" if local else "slurm"
    if local and exclude_suspects:
        raise UsageError("--exclude-suspects chooses among Slurm's nodes, and --local runs on none of them")
    prepared = _prepared(choice, cluster, exclude_suspects=exclude_suspects)
    if dry_run:
        write_exactly(prepared.script)
        return EXIT_DONE
    if not (wait or watch):
        _submitted(prepared, cluster, as_json)
        return EXIT_DONE
    from nvrx_slurm.api.handle import Job

    if watch:
        from nvrx_slurm.report import live

        job = Job(_submitted(prepared, cluster, as_json), folder=prepared.folder, cluster=cluster)
        try:
            return live.watch(job.folder.parent, job.folder.name)
        except KeyboardInterrupt:
            click.echo(f"job {job.job_id} goes on; to end it: nvrx-slurm cancel {job.job_id}", err=True)
            return EXIT_INTERRUPTED
    with signals.recorded() as interruption:  # from before there is a job that a signal must cancel
        job = Job(_submitted(prepared, cluster, as_json), folder=prepared.folder, cluster=cluster)
        exit_code = _wait(job, interruption)
    if exit_code is None:
        # Cancel the job, and stay until it is gone; a second Ctrl-C does not stay.
        click.echo(f"cancelling job {job.job_id}", err=True)
        try:
            job.cancel()
            click.echo(f"job {job.job_id}: {job.wait_until_gone()}", err=True)
        except NvrxError as error:  # the exit code reports the interruption all the same
            click.echo(f"nvrx-slurm: error: {shown(str(error))}", err=True)
    return exit_code if exit_code is not None else interruption.exit_code or EXIT_INTERRUPTED


def _prepared(choice: JobChoice, cluster: ClusterName, *, exclude_suspects: bool) -> PreparedJob:
    """The job's script and plan. Says on stderr which suspect nodes are excluded."""
    from nvrx_slurm.api.prepared import prepare

    loaded = choice.load()
    plan, spec = choice.plan(loaded), loaded.spec
    if exclude_suspects:
        from nvrx_slurm.api.suspicion import avoiding

        spec = avoiding(spec, plan.fault_tolerance.attribution.ledger, lambda text: click.echo(text, err=True))
    return prepare(spec, plan, cluster=cluster)


def _submitted(prepared: PreparedJob, cluster: ClusterName, as_json: bool) -> str:
    """Submit, and print the job's id."""
    from nvrx_slurm.api.submission import hand_over
    from nvrx_slurm.cluster.base import folder_name

    job_id = hand_over(prepared, cluster=cluster)
    answer = {"job": job_id, "cluster": cluster, "folder": str(Path(prepared.folder) / folder_name(job_id))}
    click.echo(json.dumps(answer) if as_json else job_id)
    return job_id


def _wait(job: Job, interruption: signals.RecordedSignal) -> int | None:
    """The job's exit code; None: a signal ended the wait before the job had ended."""

    def tell(state: JobState) -> None:
        click.echo(f"job {job.job_id}: {state}", err=True)

    watch = job.end_watch(None, tell)
    try:
        while (exit_code := watch.look()) is None and not interruption.wait(watch.pause_s()):
            pass
    except NvrxError:
        if interruption.exit_code is None:
            raise
        return None  # Ctrl-C reaches a squeue that is just being asked, too
    return exit_code
