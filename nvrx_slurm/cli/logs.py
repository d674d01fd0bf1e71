"""`nvrx-slurm logs` and `events`: what the ranks printed, and the journal, an event a line."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.completion import complete_events, complete_ranks, complete_replicas
from nvrx_slurm.cli.job_argument import job_argument
from nvrx_slurm.cli.options import since_option
from nvrx_slurm.cli.output import only_reads
from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.sanitize import TerminalOutput, json_text, not_command_bytes

if TYPE_CHECKING:
    from nvrx_slurm.report.line_filter import LineFilter
    from nvrx_slurm.report.logs import Chunk, RankLog


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on, from cycle to cycle, until the job has ended.")
@click.option(
    "--rank", type=click.IntRange(min=0), shell_complete=complete_ranks, help="One rank's output, unmarked."
)
@click.option("--cycle", type=click.IntRange(min=0), help="One cycle's output; default: all, in order.")
@click.option("--replica", shell_complete=complete_replicas, help="One replica's output, such as main-0.")
@click.option("--stdout/--stderr", "stdout", default=None, help="One of the two only.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Of what there is so far, the last N lines.")
@since_option("Lines since then: 10m, 14:30, 2026-11-23T14:30.")
@click.option("--grep", "pattern", metavar="REGEX", help="Lines that match; (?i) in front ignores case.")
@click.option(
    "--raw",
    is_flag=True,
    help="Exact bytes on a terminal, too: it interprets all escape sequences of the workers.",
)
def logs(
    job_id: str,
    follow: bool,
    rank: int | None,
    cycle: int | None,
    replica: str | None,
    stdout: bool | None,
    tail: int | None,
    since: float | None,
    pattern: str | None,
    raw: bool,
    folder: Path,
) -> None:
    """Output of the ranks. Without any choice: the job's merged log, each line marked [replica rank].

    Where a new cycle begins, stderr says so. Into a pipe or a file the output goes to the byte. On a terminal its
    colours are kept, and every other control character is shown as \\x1b and the like.

    --since goes by the time stamps that the lines begin with. Of ranks that print none, what their agent has read
    since then is shown, and up to ten seconds more; all of a cycle that ended within its first ten seconds of output.
    """
    from nvrx_slurm.report.jobs import find_job, read_plan, refuse_array
    from nvrx_slurm.report.logs import MergedReader, Reader, Selection, choose, follow_logs

    job = find_job(folder, job_id)
    refuse_array(job, "logs")
    streams = {None: ("out", "err"), True: ("out",), False: ("err",)}[stdout]
    selection = Selection(replica=replica, rank=rank, cycle=cycle, streams=streams)
    try:
        matching = None if pattern is None else re.compile(os.fsencode(pattern))  # as it was typed: logs are bytes
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--grep {pattern}: is no regular expression: {error}") from None
    if selection.whole_job and since is None:
        reader: Reader = MergedReader(job)
    else:
        reader = Reader(job, choose(selection, read_plan(job), job, may_come=follow))
    if tail is not None and since is None and matching is None:
        # Before anything is read: of long files only the ends are read then.
        reader.skip_to_last(tail)
        tail = None
    marked = set() if since is None else reader.skip_to(since)
    so_far, later = reader.read(), follow_logs(job, reader) if follow else reader.rest()
    chunks: Iterator[Chunk] = chain(so_far, later)
    if tail is not None or since is not None or matching is not None:
        from nvrx_slurm.report.line_filter import LineFilter

        lines = LineFilter(pattern=matching, since=since, marked=marked)
        # With a filter, --tail counts lines that match: which these are is known once all has been read.
        chunks = _filtered(lines, so_far, later, tail, follow)
    # A terminal obeys escape sequences and a runner of GitHub Actions obeys commands; a file obeys nothing.
    if raw:
        output: _Exact | _OnTerminal = _Exact()
    elif sys.stdout.isatty():
        output = _OnTerminal()
    else:
        to_runner = env.github() is not None and not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
        output = _ToRunner() if to_runner else _Exact()
    say_cycles = not selection.whole_job and cycle is None
    said: tuple[int, int] | None = None
    with only_reads(job_id, folder):
        for chunk in chunks:
            shown = (chunk.file.generation, chunk.file.cycle)
            if say_cycles and shown != said:
                said = shown
                generation = f"generation {chunk.file.generation}, " if chunk.file.generation else ""
                click.echo(f"── {generation}cycle {chunk.file.cycle} ──", err=True)
            output.write(chunk)
        output.end()


def _filtered(
    lines: LineFilter, so_far: Iterator[Chunk], later: Iterator[Chunk], tail: int | None, follow: bool
) -> Iterator[Chunk]:
    """What the filter passes on; of what there is so far, the last lines only."""
    found: Iterator[Chunk] = (kept for chunk in so_far for kept in lines.feed(chunk))
    if not follow:  # then `later` is what ends without a newline
        # `rest` runs when it is asked for its first line: by then all else has been fed.
        found = chain(found, (kept for chunk in later for kept in lines.feed(chunk)), lines.rest())
    if tail is None:
        yield from found
    else:
        single = (replace(kept, data=line) for kept in found for line in kept.data.splitlines(keepends=True))
        yield from deque(single, maxlen=tail)
    if lines.is_untimed:
        click.echo("nvrx-slurm: some ranks print no times: all that they wrote in their cycle is shown", err=True)
    if follow:
        lines.caught_up()
        for chunk in later:
            yield from lines.feed(chunk)
        yield from lines.rest()


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
        # What was held back as the begin of a character or a colour, and never went on.
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
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until the job has ended.")
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="EVENT",
    shell_complete=complete_events,
    help="These events only, such as node_lost or 'node_*'; repeatable, and a list with commas.",
)
@since_option("Events since then: 10m, 14:30, 2026-11-23T14:30.")
@click.option("--utc", is_flag=True, help="Times in UTC instead of local time.")
@click.option("--json", "as_json", is_flag=True, help="The journal's own lines, JSON objects, one an event.")
def events(
    job_id: str, follow: bool, types: tuple[str, ...], since: float | None, utc: bool, as_json: bool, folder: Path
) -> None:
    """The journal of a job: what happened, what was decided, and why.

    Each line has the time, and the seconds since the job's start. Every event and its fields: docs/journal.md.
    """
    from datetime import UTC, datetime

    from nvrx_slurm.journal.records import entry_to_json
    from nvrx_slurm.report import source
    from nvrx_slurm.report.jobs import find_job, refuse_array
    from nvrx_slurm.report.sentences import Lines
    from nvrx_slurm.report.words import chosen_events, event_name

    wanted = chosen_events(types)
    job = find_job(folder, job_id)
    refuse_array(job, "events")
    entries = source.follow(job) if follow else source.so_far(job)
    lines = Lines()
    with only_reads(job_id, folder):
        for entry in entries:
            if (wanted and event_name(entry.record) not in wanted) or (since is not None and entry.t < since):
                lines.pass_over(entry)  # times count from the first
                continue
            if as_json:
                line = json_text(entry_to_json(entry))
            else:
                at = datetime.fromtimestamp(entry.t, UTC if utc else None)
                line = lines.in_words(entry)
                line = f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}{'Z' if utc else ''}  {line}"
            print(line, flush=follow)
