"""`nvrx-slurm status` and `dump`: how a job stands, and what its workers are doing now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.completion import complete_jobs, complete_ranks, complete_replicas
from nvrx_slurm.cli.job_argument import chosen_job, job_argument
from nvrx_slurm.cli.options import duration_option, folder_option
from nvrx_slurm.cli.output import note, only_reads, print_facts, print_json, print_problems, print_table
from nvrx_slurm.cli.recorded_signals import exit_on_sigterm
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.sanitize import one_line, shown

if TYPE_CHECKING:
    from nvrx_slurm.api.stack_request import NodeStacks


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False, shell_complete=complete_jobs)
@click.option(
    "--watch", is_flag=True, help="Keep the screen up to date until the job ends; exits with its exit code."
)
@click.option("--json", "as_json", is_flag=True, help="One documented object (docs/journal.md).")
@folder_option
def status(job_id: str | None, watch: bool, as_json: bool, folder: Path) -> int:
    """How a job stands: nodes, ranks, cycle, spares, last failure and decision. Without JOB: all jobs of the folder.
    Of a whole job array: each of its tasks.
    `ls` lists your jobs of all folders. `status last`, or --watch without JOB, shows the newest.

    BEAT is the age of a node's last sign of life. LAG: how many steps a rank is behind the fastest of its replica;
    QUIET: how long ago it made progress last.
    """
    from nvrx_slurm.report.ending import print_end
    from nvrx_slurm.report.jobs import named_job

    if watch:
        if as_json:
            raise UsageError("--watch shows one job on the screen: leave --json out")
        from nvrx_slurm.report import live

        job_id, folder = chosen_job(job_id, folder)
        exit_on_sigterm()  # the terminal is restored on the way out
        with only_reads(job_id, folder):
            exit_code = live.watch(folder, job_id)
        # Behind the screen: the last thing on the terminal says why the job ended.
        print_end(named_job(folder, job_id), exit_code)
        return exit_code
    from nvrx_slurm.report import page, snapshot

    if job_id is None:
        lines = snapshot.list_jobs(folder)
        if as_json:
            print_json({"jobs": lines})
        elif not lines:
            click.echo(f"no jobs in {folder}", err=True)
        else:
            print_table(page.job_table(lines))
            print_problems(lines)
        return 0
    from nvrx_slurm.report.array_tasks import take_with_tasks

    job_id, folder = chosen_job(job_id, folder)
    shot = take_with_tasks(folder, job_id)
    if as_json:
        print_json(snapshot.as_status(shot))
        return 0
    if shot.tasks:
        print_facts(page.array_facts(shot), page.job_table(shot.tasks))
        print_problems(shot.tasks)
    elif sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show(screen.render(shot))
    else:
        from nvrx_slurm.report import plain

        click.echo(plain.page(shot))
    if shot.exit_code is not None:
        print_end(shot.folder, shot.exit_code, slurm_says=shot.slurm_state)
    return 0


@click.command()
@job_argument
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    shell_complete=complete_ranks,
    help="One rank; may be given repeatedly.",
)
@click.option("--replica", shell_complete=complete_replicas, help="One replica's ranks, such as main-0.")
@duration_option("--timeout", "Give up (exit code 124) after this long.", "30s")
@click.option("--json", "as_json", is_flag=True, help="One object, when all have answered.")
def dump(
    job_id: str, ranks: tuple[int, ...], replica: str | None, timeout: float, as_json: bool, folder: Path
) -> None:
    """Stacks of live workers now, without stopping them.

    Prints each rank's stacks, its children's included. They stay in files below the job folder.
    """
    from nvrx_slurm.api.stack_request import StackRequest
    from nvrx_slurm.report.jobs import find_job
    from nvrx_slurm.report.words import ranks_of

    request = StackRequest(find_job(folder, job_id), ranks=ranks, replica=replica)
    if request.without_worker:
        note(f"{ranks_of(request.without_worker)}: no worker now")
    arrived: list[NodeStacks] = []
    try:
        arrived.extend(request.answers(timeout, note))
    finally:  # also what arrived before an error, which is shown afterwards
        if as_json:
            print_json({"nodes": arrived})
        else:
            # In the order of ranks, not of arrival.
            every = [stacks for node in arrived for stacks in node.stacks]
            for stacks in sorted(every, key=lambda stacks: (stacks.replica, stacks.rank)):
                where = f", in {stacks.where}" if stacks.where else ""
                click.echo(
                    one_line(f"── {stacks.replica} rank {stacks.rank} on {stacks.node}{where} ── {stacks.file}")
                )
                click.echo(shown(stacks.text.rstrip("\n")) + "\n")
            for node in arrived:
                for problem in node.problems:
                    note(f"{node.node}: {problem}")
