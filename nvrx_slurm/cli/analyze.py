"""`nvrx-slurm analyze`: why a job failed, from its logs alone."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.util.sanitize import json_text, one_line

if TYPE_CHECKING:
    from nvrx_slurm.journal.verdicts import Attribution, Evidence

LABEL_WIDTH = 11
WIDEST = 100
_COLOURS = {"STOP": "red", "RESTART": "green", "UNKNOWN": "yellow", "TIMEOUT": "yellow"}


@click.command()
@click.argument("paths", metavar="PATH…", type=click.Path(path_type=Path), nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="The answer as one object; --schema says what it holds.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the answer, and read nothing.")
@click.option(
    "--rules",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Rules of your own, beside the shipped ones; may be given repeatedly.",
)
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank's lines; repeatable."
)
def analyze(
    paths: tuple[Path, ...], as_json: bool, schema: bool, rules: tuple[Path, ...], ranks: tuple[int, ...]
) -> None:
    """Why a job failed, and whether a restart can help, from its logs alone.

    Takes files and folders, of any launcher, packed or not, and flight-recorder dumps of PyTorch. Exits with 0
    for each verdict.
    """
    if schema:
        from nvrx_slurm.journal.verdicts import attribution_schema

        click.echo(json.dumps(attribution_schema(), indent=2))
        return
    if not paths:
        raise click.UsageError("name a log file or a folder of logs")
    from nvrx_slurm.api.analysis import examination

    found = examination(paths, rules=rules, ranks=ranks)
    for problem in found.problems:
        click.echo(one_line(f"nvrx-slurm: {problem}"), err=True)
    if as_json:
        import msgspec

        click.echo(json_text(msgspec.json.format(msgspec.json.encode(found.attribution), indent=2)))
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else None
        click.echo("\n".join(page(found.attribution, width)))


def page(answer: Attribution, width: int | None = None) -> Iterator[str]:
    """The report's lines; `width` None: nothing is wrapped."""
    yield _headline(answer)
    yield ""
    if answer.primary is not None:
        yield from _labelled("first", _where(answer.primary), width)
        yield from _in_context(answer.primary)
        yield ""
    if answer.secondary:
        yield from _followed(answer.secondary)
        yield ""
    yield from _labelled("what", answer.explanation, width)
    for label, text in _facts(answer):
        yield from _labelled(label, text, width)


def _headline(answer: Attribution) -> str:
    verdict = click.style(answer.verdict, fg=_COLOURS[answer.verdict], bold=True)
    if answer.fault == "unknown":
        return f"{verdict}  cause unknown"
    said = f"{answer.fault}, of {answer.scope.replace('_', ' ')}, confidence {answer.confidence:.2f}"
    return f"{verdict}  {one_line(said)}"


def _facts(answer: Attribution) -> Iterator[tuple[str, str]]:
    facts = {
        "blamed": ", ".join((*(f"rank {rank}" for rank in answer.ranks), *answer.nodes)),
        "missing": ", ".join(f"rank {rank}" for rank in answer.missing),
        "hint": answer.hint,
        "reference": answer.reference,
        "problem": answer.problem or "",
    }
    yield from ((label, text) for label, text in facts.items() if text)


def _labelled(label: str, text: str, width: int | None) -> list[str]:
    """A label and its text, wrapped beside it."""
    text = one_line(text)
    room = None if width is None else max(20, width - LABEL_WIDTH)
    lines = [text] if room is None else textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    labels = [click.style(f"{label:<{LABEL_WIDTH}}", bold=True)]
    labels += [" " * LABEL_WIDTH] * (len(lines) - 1)
    return [name + line for name, line in zip(labels, lines, strict=False)]


def _where(evidence: Evidence) -> str:
    """Whose line it is, when it was written, and where it stands."""
    rank = "" if evidence.rank is None else f"rank {evidence.rank}"
    node = evidence.node or ""
    when = "" if evidence.t is None else _time(evidence.t)
    return ", ".join(part for part in (rank, node, when, _place(evidence)) if part)


def _time(seconds: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"


def _place(evidence: Evidence) -> str:
    """The file, from here if it lies below, and the line."""
    path = Path(evidence.file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{evidence.line}" if evidence.line else str(shown)


def _in_context(evidence: Evidence) -> Iterator[str]:
    from nvrx_slurm.attribution.analyze.evidence import context

    lines = context(Path(evidence.file), evidence.line) if evidence.line else []
    for number, text in lines or [(evidence.line, evidence.text)]:
        is_it = number == evidence.line
        line = f"{'>' if is_it else ' '} {number:>8} | {one_line(text)}"
        yield click.style(line, fg="red") if is_it else line


def _followed(secondary: Sequence[Evidence]) -> Iterator[str]:
    yield click.style("then", bold=True)
    for each in secondary:
        rank = "" if each.rank is None else f" rank {each.rank}"
        yield one_line(f"  {_place(each)}{rank}: {each.text.strip()}")
