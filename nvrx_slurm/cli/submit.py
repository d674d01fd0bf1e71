"""`nvrx-slurm submit`, `wait` and `cancel`: a job's beginning and end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.job_argument import job_argument
from nvrx_slurm.cli.options import JobChoice, JobCommand, duration_option, job_options
from nvrx_slurm.cli.output import note, only_reads
from nvrx_slurm.cli.recorded_signals import RecordedSignals
from nvrx_slurm.errors import EXIT_DONE, EXIT_INTERRUPTED, NvrxError, UsageError
from nvrx_slurm.util.sanitize import shown
from nvrx_slurm.util.terminal import write_exactly

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job
    from nvrx_slurm.api.submission import PreparedJob
    from nvrx_slurm.cluster.base import ClusterName
    from nvrx_slurm.cluster.states import JobState

# Longer than the longest teardown that Slurm's own KillWait (30 s by default) allows.
GONE_TIMEOUT_S = 120.0


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
    """Submit JOB_YAML, or the command after --, to Slurm, and print the job's id.

    \b
    nvrx-slurm submit --spares 2 job.yaml
    nvrx-slurm submit -N 16 --spares 2 -p gpu -t 2d -- python train.py
    """
    if wait and watch:
        raise UsageError("--wait and --watch both follow the job: choose one")
    cluster: ClusterName = "local" if local else "slurm"
    if local and exclude_suspects:
        raise UsageError("--exclude-suspects chooses among Slurm's nodes, and --local runs on none of them")
    from nvrx_slurm.api.submission import prepare

    loaded = choice.load()
    plan, spec = choice.plan(loaded), loaded.spec
    if exclude_suspects:
        from nvrx_slurm.api.suspicion import avoiding

        spec = avoiding(spec, plan.fault_tolerance.attribution.ledger, note)
    prepared = prepare(spec, plan, cluster=cluster, origins=loaded.origins())
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
        with only_reads(job.job_id, job.folder.parent):
            watched = live.watch(job.folder.parent, job.folder.name)
        _print_end(job, watched)
        return watched
    with RecordedSignals() as interruption:  # from before there is a job that a signal must cancel
        job = Job(_submitted(prepared, cluster, as_json), folder=prepared.folder, cluster=cluster)
        exit_code = _wait(job, interruption)
    if exit_code is None:
        # Cancel the job, and stay until it is gone; a second Ctrl-C does not stay.
        click.echo(f"cancelling job {job.job_id}", err=True)
        try:
            job.cancel()
            click.echo(f"job {job.job_id}: {job.wait_until_gone(for_slurm=False)}", err=True)
            _say_if_slurm_has_it(job)
        except NvrxError as error:  # the exit code reports the interruption all the same
            click.echo(f"nvrx-slurm: error: {shown(str(error))}", err=True)
        exit_code = interruption.exit_code or EXIT_INTERRUPTED
    _print_end(job, exit_code)
    return exit_code


def _submitted(prepared: PreparedJob, cluster: ClusterName, as_json: bool) -> str:
    """Submit, and print the job's id."""
    from nvrx_slurm.api.submission import hand_over
    from nvrx_slurm.cluster.base import folder_name

    job_id = hand_over(prepared, cluster=cluster)
    answer = {"job": job_id, "cluster": cluster, "folder": str(Path(prepared.folder) / folder_name(job_id))}
    try:
        click.echo(json.dumps(answer) if as_json else job_id)
    except OSError as error:
        raise UsageError(f"job {job_id} is submitted, and its id cannot be printed: {error.strerror}") from None
    return job_id


def _wait(job: Job, interruption: RecordedSignals) -> int | None:
    """The job's exit code; None: a signal ended the wait before the job had ended."""
    watch = job.end_watch(None, *state_reports(job))
    # `job.wait()` would sleep through a signal, which is only recorded here.
    try:
        while (exit_code := watch.look()) is None and not interruption.wait(watch.pause_s()):
            pass
    except NvrxError:
        if interruption.exit_code is None:
            raise
        return None  # Ctrl-C reaches a squeue that is just being asked, too
    return exit_code


def _print_end(job: Job, exit_code: int) -> None:
    from nvrx_slurm.journal.folder import JobFolder
    from nvrx_slurm.report.ending import print_end

    print_end(JobFolder(job.folder), exit_code)


def _say_if_slurm_has_it(job: Job) -> None:
    """Of a job that has ended."""
    from nvrx_slurm.journal.folder import JobFolder
    from nvrx_slurm.report.presence import still_in_slurm

    if job.cluster == "slurm" and (state := still_in_slurm(JobFolder(job.folder))) is not None:
        click.echo(f"job {job.job_id}: done; Slurm is still completing it ({state})", err=True)


def state_reports(job: Job) -> tuple[Callable[[JobState], None], Callable[[], None] | None]:
    """What tells each state of the job on stderr, and why Slurm keeps it in its queue."""

    def report(text: object) -> None:
        note(f"job {job.job_id}: {text}")

    if job.cluster == "local":
        return report, None
    from nvrx_slurm.cluster.queue_place import QueueReporter

    return report, QueueReporter(job.job_id, lambda why: report(f"PENDING: {why}")).look


@click.command()
@job_argument
@duration_option("--timeout", "Give up (exit code 124) after this long: 90s, 10m, 2h.")
def wait(job_id: str, timeout: float | None, folder: Path) -> int:
    """Wait for a job's end, and exit with its exit code. Ctrl-C ends the wait, not the job."""
    from nvrx_slurm.api.handle import job

    handle = job(job_id, folder=folder)
    on_state, on_pending = state_reports(handle)
    with only_reads(job_id, handle.folder.parent):
        code = handle.wait(timeout, on_state=on_state, on_pending=on_pending)
    _say_if_slurm_has_it(handle)
    _print_end(handle, code)
    return code


@click.command()
@job_argument
def cancel(job_id: str, folder: Path) -> None:
    """Cancel a job, wait until its workers are gone, and print its state. A job that has ended is left alone."""
    from nvrx_slurm.api.handle import job

    found = job(job_id, folder=folder)
    found.cancel()
    click.echo(found.wait_until_gone(GONE_TIMEOUT_S, for_slurm=False))
    _say_if_slurm_has_it(found)
