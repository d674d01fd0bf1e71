"""`nvrx-slurm dump`: what the workers are doing now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option, seconds_of

if TYPE_CHECKING:
    from nvrx_slurm.api.stack_request import Answer, RankStacks


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="One rank; may be given repeatedly.")
@click.option("--replica", help="One replica's ranks, such as main-0.")
@click.option(
    "--timeout",
    metavar="DURATION",
    default="30s",
    show_default=True,
    help="Give up (exit code 124) after this long.",
)
@click.option("--json", "as_json", is_flag=True, help="One object, when all have answered.")
@folder_option
def dump(job_id: str, ranks: tuple[int, ...], replica: str | None, timeout: str, as_json: bool, folder: Path) -> None:
    """Stacks of live workers now, without stopping them.

    Prints each rank's stacks, its children's included. They stay in files below the job folder.
    """
    from nvrx_slurm.api.stack_request import StackRequest
    from nvrx_slurm.report.jobs import find_job
    from nvrx_slurm.report.words import ranks_of

    bound_s = seconds_of("--timeout", timeout)
    request = StackRequest(find_job(folder, job_id), ranks=ranks, replica=replica)
    if request.without_worker:
        _note(f"{ranks_of(request.without_worker)}: no worker now")
    come: list[Answer] = []
    try:
        come.extend(request.answers(bound_s, _note))
    finally:  # also what came before an error, which is shown afterwards
        if as_json:
            from nvrx_slurm.report.model import to_json
            from nvrx_slurm.util.sanitize import json_text

            click.echo(json_text(to_json({"nodes": come})))
        else:
            from nvrx_slurm.util.sanitize import shown

            # In the order of ranks, not of arrival.
            every = [stacks for answer in come for stacks in answer.stacks]
            for stacks in sorted(every, key=lambda stacks: (stacks.replica, stacks.rank)):
                print(_heading(stacks), shown(stacks.text.rstrip("\n")), sep="\n", end="\n\n", flush=True)
            for answer in come:
                for problem in answer.problems:
                    _note(f"{answer.node}: {problem}")


def _heading(stacks: RankStacks) -> str:
    from nvrx_slurm.util.sanitize import one_line

    where = f", in {stacks.where}" if stacks.where else ""
    return one_line(f"── {stacks.replica} rank {stacks.rank} on {stacks.node}{where} ── {stacks.file}")


def _note(text: str) -> None:
    from nvrx_slurm.util.sanitize import one_line

    print(one_line(text), file=sys.stderr, flush=True)
