"""`nvrx-slurm logs`: what the ranks printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option

if TYPE_CHECKING:
    from nvrx_slurm.report.logs import Chunk, LogFile


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on, from cycle to cycle, until the job has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="One rank's output, unmarked.")
@click.option("--cycle", type=click.IntRange(min=0), help="One cycle's output; default: all, in order.")
@click.option("--replica", help="One replica's output, such as main-0.")
@click.option("--stdout/--stderr", "stdout", default=None, help="One of the two only.")
@folder_option
def logs(
    job_id: str,
    follow: bool,
    rank: int | None,
    cycle: int | None,
    replica: str | None,
    stdout: bool | None,
    folder: Path,
) -> None:
    """Output of the ranks. Without any choice: the job's merged log, each line marked [replica rank].

    Where a new cycle begins, stderr says so.
    """
    from nvrx_slurm.report.follow_logs import follow_logs
    from nvrx_slurm.report.jobs import find_job, read_plan
    from nvrx_slurm.report.logs import MergedReader, Reader, Selection, choose

    job = find_job(folder, job_id)
    streams = {None: ("out", "err"), True: ("out",), False: ("err",)}[stdout]
    selection = Selection(replica=replica, rank=rank, cycle=cycle, streams=streams)
    if selection.whole_job:
        reader: Reader = MergedReader(job)
    else:
        reader = Reader(job, choose(selection, read_plan(job), job, may_come=follow))
    chunks = follow_logs(job, reader) if follow else chain(reader.read(), reader.rest())
    _print(chunks, say_cycles=not selection.whole_job and cycle is None)


def _print(chunks: Iterable[Chunk], *, say_cycles: bool) -> None:
    stdout = sys.stdout.buffer
    said: tuple[int, int] | None = None
    for chunk in chunks:
        cycle = (chunk.file.generation, chunk.file.cycle)
        if say_cycles and cycle != said:
            said = cycle
            click.echo(_heading(chunk.file), err=True)
        stdout.write(chunk.data)
        stdout.flush()


def _heading(file: LogFile) -> str:
    generation = f"generation {file.generation}, " if file.generation else ""
    return f"── {generation}cycle {file.cycle} ──"
