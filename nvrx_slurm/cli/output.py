"""What several commands print alike: notes, JSON, and facts with a table. Nothing is loaded before it is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:
    from nvrx_slurm.report.snapshot import JobLine
    from nvrx_slurm.report.tables import Row, Table


def note(text: str) -> None:
    """A line on standard error."""
    click.echo(one_line(text), err=True)


def print_json(value: Any) -> None:
    """One object, indented for people."""
    import msgspec

    from nvrx_slurm.util.sanitize import json_text

    click.echo(json_text(msgspec.json.format(msgspec.json.encode(value), indent=2)))


@contextmanager
def only_reads(job_id: str, folder: Path) -> Iterator[None]:
    """Of a command that follows a job: Ctrl-C ends it and not the job, and stderr says so. `folder`: the job's base
    folder."""
    try:
        yield
    except KeyboardInterrupt:
        from nvrx_slurm.report.jobs import named_job

        job = named_job(folder, job_id)
        if not job.has_end:
            here = f"; its logs: {job.path}" if os.path.isdir(job.path) else ""
            click.echo(nl=sys.stderr.isatty(), err=True)  # the terminal has shown ^C
            note(f"job {job_id} goes on{here}; to end it: nvrx-slurm cancel {job_id}")
        raise click.Abort from None


def print_table(table: Table) -> None:
    """In colour on a terminal."""
    if sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show(screen.grid(table))
    else:
        from nvrx_slurm.report import plain

        click.echo(plain.table(table))


def print_problems(lines: Iterable[JobLine]) -> None:
    """What keeps jobs from being read, a line each on standard error."""
    for line in lines:
        if line.problem is not None:
            note(f"{line.job}: {line.problem}")


def print_facts(rows: Sequence[Row], table: Table) -> None:
    """Labels with their texts, then the table, if it has rows: in colour on a terminal."""
    if sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show_facts(rows, table)
    else:
        from nvrx_slurm.report import plain

        click.echo("\n\n".join([plain.pairs(rows), *([plain.table(table)] if table.rows else [])]))
