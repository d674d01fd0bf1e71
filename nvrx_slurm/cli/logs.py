"""`nvrx-slurm logs` and `events`: what the ranks printed, and the journal, an event a line."""

from __future__ import annotations

import os
import stat
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.sanitize import TerminalOutput, json_text, not_command_bytes

if TYPE_CHECKING:
    from nvrx_slurm.report.logs import Chunk, RankLog


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on, from cycle to cycle, until the job has ended.")
@click.option("--rank", type=click.IntRange(min=0), help="One rank's output, unmarked.")
@click.option("--cycle", type=click.IntRange(min=0), help="One cycle's output; default: all, in order.")
@click.option("--replica", help="One replica's output, such as main-0.")
@click.option("--stdout/--stderr", "stdout", default=None, help="One of the two only.")
@click.option(
    "--raw",
    is_flag=True,
    help="To the byte on a terminal, too: it obeys all escape sequences of the workers.",
)
@folder_option
def logs(
    job_id: str,
    follow: bool,
    rank: int | None,
    cycle: int | None,
    replica: str | None,
    stdout: bool | None,
    raw: bool,
    folder: Path,
) -> None:
    """Output of the ranks. Without any choice: the job's merged log, each line marked [replica rank].

    Where a new cycle begins, stderr says so. Into a pipe or a file the output goes to the byte. On a terminal its
    colours are kept, and every other control character is shown as \\x1b and the like.
    """
    from nvrx_slurm.report.jobs import find_job, read_plan
    from nvrx_slurm.report.logs import MergedReader, Reader, Selection, choose, follow_logs

    job = find_job(folder, job_id)
    streams = {None: ("out", "err"), True: ("out",), False: ("err",)}[stdout]
    selection = Selection(replica=replica, rank=rank, cycle=cycle, streams=streams)
    if selection.whole_job:
        reader: Reader = MergedReader(job)
    else:
        reader = Reader(job, choose(selection, read_plan(job), job, may_come=follow))
    chunks = follow_logs(job, reader) if follow else chain(reader.read(), reader.rest())
    if raw:
        output: _Exact | _OnTerminal = _Exact()
    elif sys.stdout.isatty():
        output = _OnTerminal()
    else:
        to_runner = env.github() is not None and not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
        output = _ToRunner() if to_runner else _Exact()
    say_cycles = not selection.whole_job and cycle is None
    said: tuple[int, int] | None = None
    for chunk in chunks:
        shown = (chunk.file.generation, chunk.file.cycle)
        if say_cycles and shown != said:
            said = shown
            generation = f"generation {chunk.file.generation}, " if chunk.file.generation else ""
            click.echo(f"── {generation}cycle {chunk.file.cycle} ──", err=True)
        output.write(chunk)
    output.end()


class _Exact:
    """For a pipe or a file: to the byte."""

    def write(self, chunk: Chunk) -> None:
        sys.stdout.buffer.write(chunk.data)
        sys.stdout.buffer.flush()

    def end(self) -> None: ...


class _OnTerminal:
    """A terminal obeys what it is sent: all but colours becomes visible."""

    def __init__(self) -> None:
        self._parts: dict[RankLog, TerminalOutput] = {}

    def write(self, chunk: Chunk) -> None:
        sys.stdout.write(self._parts.setdefault(chunk.file, TerminalOutput()).feed(chunk.data))
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("".join(part.feed(b"", final=True) for part in self._parts.values()))


class _ToRunner(_Exact):
    """A runner of GitHub Actions obeys some lines: these are changed, so that it prints them. The rest is exact."""

    def __init__(self) -> None:
        self._partial = b""

    def write(self, chunk: Chunk) -> None:
        *lines, self._partial = (self._partial + chunk.data).split(b"\n")
        sys.stdout.buffer.write(b"".join(not_command_bytes(line) + b"\n" for line in lines))
        sys.stdout.buffer.flush()

    def end(self) -> None:
        sys.stdout.buffer.write(not_command_bytes(self._partial))
        sys.stdout.buffer.flush()


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="The journal's own lines, JSON objects, one an event.")
@folder_option
def events(job_id: str, follow: bool, as_json: bool, folder: Path) -> None:
    """The journal of a job: what happened, what was decided, and why.

    Times count from the job's start. Every event and its fields: docs/journal.md.
    """
    from nvrx_slurm.journal.records import entry_to_json
    from nvrx_slurm.report import source
    from nvrx_slurm.report.jobs import find_job
    from nvrx_slurm.report.sentences import Lines

    job = find_job(folder, job_id)
    entries = source.follow(job) if follow else source.so_far(job)
    lines = Lines()
    for entry in entries:
        print(json_text(entry_to_json(entry)) if as_json else lines.in_words(entry), flush=follow)
