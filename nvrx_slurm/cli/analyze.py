"""`nvrx-slurm analyze` and `explain`: why a job failed, from its logs alone, and from its journal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.completion import complete_replicas
from nvrx_slurm.cli.job_argument import job_argument
from nvrx_slurm.cli.output import print_facts, print_json
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.sanitize import one_line

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
        print_json(found.attribution)
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else None
        click.echo("\n".join(page(found.attribution, width)))


def page(answer: Attribution, width: int | None = None) -> Iterator[str]:
    """The lines that `analyze` prints; `width` None: nothing is wrapped."""
    verdict = click.style(answer.verdict, fg=_COLOURS[answer.verdict], bold=True)
    known = f"{answer.fault}, of {answer.scope.replace('_', ' ')}, confidence {answer.confidence:.2f}"
    yield f"{verdict}  {'cause unknown' if answer.fault == 'unknown' else one_line(known)}"
    yield ""
    if (first := answer.primary) is not None:
        rank = "" if first.rank is None else f"rank {first.rank}"
        yield from _labelled(
            "first", ", ".join(filter(None, (rank, first.node, _time(first.t), _place(first)))), width
        )
        yield from _in_context(first)
        yield ""
    if answer.secondary:
        yield click.style("then", bold=True)
        for each in answer.secondary:
            rank = "" if each.rank is None else f" rank {each.rank}"
            yield one_line(f"  {_place(each)}{rank}: {each.text.strip()}")
        yield ""
    facts = {
        "what": answer.explanation,
        "blamed": ", ".join((*(f"rank {rank}" for rank in answer.ranks), *answer.nodes)),
        "missing": ", ".join(f"rank {rank}" for rank in answer.missing),
        "hint": answer.hint,
        "reference": answer.reference,
        "problem": answer.problem,
    }
    for label, text in facts.items():
        if text or label == "what":
            yield from _labelled(label, text or "", width)


def _labelled(label: str, text: str, width: int | None) -> list[str]:
    """A label and its text, wrapped beside it."""
    text = one_line(text)
    room = None if width is None else max(20, width - LABEL_WIDTH)
    lines = [text] if room is None else textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    labels = [click.style(f"{label:<{LABEL_WIDTH}}", bold=True)]
    labels += [" " * LABEL_WIDTH] * (len(lines) - 1)
    return [name + line for name, line in zip(labels, lines, strict=False)]


def _time(seconds: float | None) -> str:
    from datetime import UTC, datetime

    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"


def _place(evidence: Evidence) -> str:
    """The file, from here if it lies below, and the line."""
    path = Path(evidence.file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{evidence.line}" if evidence.line else str(shown)


def _in_context(evidence: Evidence) -> Iterator[str]:
    """The line, and those around it as far as the file still has them."""
    from nvrx_slurm.attribution.analyze.evidence import context

    lines = context(Path(evidence.file), evidence.line) if evidence.line else []
    for number, text in lines or [(evidence.line, evidence.text)]:
        is_it = number == evidence.line
        line = f"{'>' if is_it else ' '} {number:>8} | {one_line(text)}"
        yield click.style(line, fg="red") if is_it else line


# ------------------------------------------------------------------------------------------------ explain


@click.command()
@job_argument
@click.option("--cycle", type=click.IntRange(min=0), help="The cycle that failed. Without it: the last that did.")
@click.option(
    "--replica", shell_complete=complete_replicas, help="Whose cycle it was, in a job with several replicas."
)
@click.option("--json", "as_json", is_flag=True, help="One documented object (docs/attribution.md).")
def explain(job_id: str, cycle: int | None, replica: str | None, as_json: bool, folder: Path) -> None:
    """Why a job failed, and what was done about it: the first failure, what followed from it, the verdict of each
    source, progress, budget, the decision and who made it.

    Where the rules were not asked while the job ran they are asked now.
    """
    from nvrx_slurm.api.explaining import explain_job
    from nvrx_slurm.cluster.states import state_of_word
    from nvrx_slurm.report import explanation
    from nvrx_slurm.report.ending import NOT_BY_A_FAILURE, end_lines
    from nvrx_slurm.report.jobs import find_job

    job = find_job(folder.absolute(), job_id)
    result = job.read_result()
    # Slurm's own word: of a job that was cancelled in the queue, and left no result.
    end = job.read_slurm_end() if result is None else None
    exit_code = result.exit_code if result is not None else state_of_word(end.state).exit_code if end else None
    try:
        report, plan = explain_job(job, cycle=cycle, replica=replica)
    except UsageError:
        if not exit_code or cycle is not None or replica is not None:
            raise
        # It was cancelled, or ended before a worker could fail.
        if as_json:
            print_json(result or end)
        else:
            click.echo("\n".join([*end_lines(job, exit_code)][:-1]))
        return
    if result is not None and result.exit_code in NOT_BY_A_FAILURE:
        click.echo(next(end_lines(job, result.exit_code)), err=True)
    if as_json:
        print_json(report)
    else:
        print_facts(explanation.facts(report, plan.fault_tolerance, str(job.path)), explanation.verdicts(report))
