"""`nvrx-slurm analyze` and `explain`: why a job failed, from its logs alone, and from its journal."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.completion import complete_replicas
from nvrx_slurm.cli.job_argument import job_argument
from nvrx_slurm.cli.output import note, print_facts, print_json
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
@click.option(
    "--last", type=click.IntRange(min=1), metavar="N", help="Of a job's folder the last N cycles, each on its own."
)
@click.option(
    "--exit-code", is_flag=True, help="Exit with 10 for RESTART, 11 for UNKNOWN, 93 for STOP, 0 if nothing failed."
)
def analyze(
    paths: tuple[Path, ...],
    as_json: bool,
    schema: bool,
    rules: tuple[Path, ...],
    ranks: tuple[int, ...],
    last: int | None,
    exit_code: bool,
) -> None:
    """Why a job failed, and whether a restart can help, from its logs alone.

    Takes files and folders, of any launcher, packed or not, `-` for standard input, and flight-recorder dumps of
    PyTorch. Exits with 0 for each verdict, unless --exit-code is given.
    """
    if schema:
        import msgspec

        from nvrx_slurm.journal.verdicts import Attribution

        click.echo(json.dumps(msgspec.json.schema(Attribution), indent=2))
        return
    if not paths:
        raise click.UsageError("name a log file, a folder of logs, or - for standard input")
    from msgspec.structs import replace

    from nvrx_slurm.api.analysis import examination, examine_cycles

    with _spooled(paths) as (readable, names):
        if last is None:
            results = [examination(readable, rules=rules, ranks=ranks)]
        else:
            results = examine_cycles(readable, last, rules=rules, ranks=ranks)
        answers = [_renamed(each.attribution, names) for each in results]
        if ranks and not any(answer.read is not None and answer.read.files for answer in answers):
            raise click.UsageError(f"--rank {', '.join(map(str, ranks))}: no log, nor a line in one, is of it")
        if ranks and not any(answer.read is not None and answer.read.ranks for answer in answers):
            note(f"nvrx-slurm: --rank {', '.join(map(str, ranks))}: no line that a rule recognises names it")
        for problem in (problem for each in results for problem in each.problems):
            note(f"nvrx-slurm: {_with_names(problem, names)}")
        if as_json:
            said = [replace(each, meaning=meaning(each)) for each in answers]
            print_json(said[0] if last is None else said)
        else:
            width = min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else None
            pages = ["\n".join(page(each.attribution, width, names)) for each in results]
            click.echo("\n\n".join(pages))
    if exit_code:
        sys.exit(_EXIT_CODES[answers[-1].verdict] if failed(answers[-1]) else 0)


_EXIT_CODES = {"RESTART": 10, "UNKNOWN": 11, "TIMEOUT": 11, "STOP": 93}


def failed(answer: Attribution) -> bool:
    """Whether the logs tell of a failure at all."""
    return answer.verdict in ("RESTART", "STOP") or answer.fault != "unknown" or answer.primary is not None


@contextlib.contextmanager
def _spooled(paths: Sequence[Path]) -> Iterator[tuple[list[Path], dict[str, str]]]:
    """The paths, with a copy in place of standard input and of each pipe, which can be read once only; and of each
    copy what it is a copy of."""
    with tempfile.TemporaryDirectory(prefix="nvrx-analyze-") as folder:
        readable, names = list[Path](), dict[str, str]()
        for path in paths:
            is_stdin = str(path) == "-"
            try:
                is_pipe = path.is_fifo()
            except OSError:  # of a folder that may not be searched, say: the analysis names the path, and says why
                is_pipe = False
            if not (is_stdin or is_pipe):
                readable.append(path)
                continue
            copy = Path(folder) / f"{'stdin' if is_stdin else 'pipe'}-{len(names)}.log"
            source = contextlib.nullcontext(sys.stdin.buffer) if is_stdin else path.open("rb")
            with source as pipe, copy.open("wb") as file:
                shutil.copyfileobj(pipe, file)
            readable.append(copy)
            names[str(copy)] = "stdin" if is_stdin else str(path)
        yield readable, names


def _with_names(text: str, names: Mapping[str, str]) -> str:
    for copy, name in names.items():
        text = text.replace(copy, name)
    return text


def _renamed(answer: Attribution, names: Mapping[str, str]) -> Attribution:
    """The same, with the names that the user knows instead of those of copies."""
    from msgspec.structs import replace

    if not names:
        return answer

    def renamed(line: Evidence) -> Evidence:
        return replace(line, file=names.get(line.file, line.file))

    read = answer.read
    return replace(
        answer,
        primary=answer.primary and renamed(answer.primary),
        runner_up=answer.runner_up and renamed(answer.runner_up),
        secondary=tuple(map(renamed, answer.secondary)),
        read=read and replace(read, problems=tuple(_with_names(each, names) for each in read.problems)),
    )


MEANINGS = {
    "STOP": "a restart would fail the same way",
    "RESTART": "it need not happen again: restart",
    "UNKNOWN": "it is not known whether a restart helps",
    "TIMEOUT": "the analysis did not end in time",
}


def meaning(answer: Attribution) -> str:
    """What the verdict means, as the first line says it."""
    without = f", without {', '.join(answer.nodes)}" if answer.verdict == "RESTART" and answer.nodes else ""
    return f"{MEANINGS[answer.verdict]}{without}" if failed(answer) else "no line tells of a failure"


def page(answer: Attribution, width: int | None = None, names: Mapping[str, str] | None = None) -> Iterator[str]:
    """The lines that `analyze` prints; `width` None: nothing is wrapped. `names`: of copies, by their paths."""
    from datetime import UTC, datetime

    names = names or {}
    verdict = click.style(answer.verdict, fg=_COLOURS[answer.verdict], bold=True)
    yield f"{verdict}  {one_line(meaning(answer))}"
    if failed(answer):
        yield one_line(f"{answer.fault}, of {answer.scope.replace('_', ' ')}, confidence {answer.confidence:.2f}")
    yield ""
    if (first := answer.primary) is not None:
        rank = "" if first.rank is None else f"rank {first.rank}"
        at = "" if first.t is None else f"{datetime.fromtimestamp(first.t, UTC):%Y-%m-%d %H:%M:%S}Z"
        where = (rank, first.node, at, _place(first, names), first.rule and f"rule {first.rule}")
        yield from _labelled("first", ", ".join(filter(None, where)), width)
        yield from (_fitted(line, width) for line in _in_context(first))
        yield ""
    if answer.secondary:
        from nvrx_slurm.report.words import by_consequence

        yield click.style("then", bold=True)
        for each, more in by_consequence(answer.secondary):
            rank = "" if each.rank is None else f" rank {each.rank}"
            others = f"  (and {more} more)" if more else ""
            yield _fitted(one_line(f"  {_place(each, names)}{rank}: {each.text.strip()}"), width, others)
        yield ""
    other = answer.runner_up
    facts = {
        "what": answer.explanation,
        "blamed": ", ".join((*(f"rank {rank}" for rank in answer.ranks), *answer.nodes)),
        "missing": ", ".join(f"rank {rank}" for rank in answer.missing),
        "or else": f"{_place(other, names)}: {other.text.strip()} (rule {other.rule})" if other else "",
        "settle": answer.settle if failed(answer) else "",
        "hint": answer.hint,
        "reference": answer.reference,
        "problem": answer.problem,
        "read": _read(answer),
    }
    for label, text in facts.items():
        if text or label == "what":
            yield from _labelled(label, text or "", width)


def _read(answer: Attribution) -> str:
    """`12 files, 8 ranks; no log of ranks 6, 7; 1 file is not whole`."""
    from nvrx_slurm.report.words import plural

    read = answer.read
    if read is None:
        return ""
    silent = f"rank{'s'[: len(read.silent) != 1]} {', '.join(map(str, read.silent))}"
    parts = (
        f"{plural(read.files, 'file')}, {read.size_bytes:,} bytes",
        read.agents and f"of {plural(read.agents, 'node')} by their agents",
        read.ranks and plural(read.ranks, "rank"),
        read.silent and f"no log of {silent}",
        read.problems and f"{len(read.problems)} not read to the end",
    )
    return "; ".join(part for part in parts if part)


def _fitted(line: str, width: int | None, end: str = "") -> str:
    """A line cut to the terminal, without its colour if it is cut."""
    bare = click.unstyle(line)
    if width is None or len(bare) + len(end) <= width:
        return line + end
    return bare[: max(1, width - len(end) - 1)] + "…" + end


def _labelled(label: str, text: str, width: int | None) -> list[str]:
    """A label and its text, wrapped beside it."""
    text = one_line(text)
    room = None if width is None else max(20, width - LABEL_WIDTH)
    lines = [text] if room is None else textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    labels = [click.style(f"{label:<{LABEL_WIDTH}}", bold=True)]
    labels += [" " * LABEL_WIDTH] * (len(lines) - 1)
    return [name + line for name, line in zip(labels, lines, strict=False)]


def _place(evidence: Evidence, names: Mapping[str, str]) -> str:
    """The file, from here if it lies below, and the line."""
    path = Path(names.get(evidence.file, evidence.file))
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
    from nvrx_slurm.report.jobs import find_job, refuse_array
    from nvrx_slurm.report.presence import Presence

    # Absolute, as in the evidence: the paths of logs are shown from the job's folder on.
    job = find_job(folder.absolute(), job_id)
    result = job.read_result()
    # Slurm's own word: of a job that was cancelled in the queue, and left no result.
    end = job.read_slurm_end() if result is None else None
    exit_code = result.exit_code if result is not None else state_of_word(end.state).exit_code if end else None
    try:
        report, plan = explain_job(job, cycle=cycle, replica=replica)
    except UsageError as error:
        # A user who names a cycle or a replica asks for a failure: how the job ended is no answer to that.
        if cycle is not None or replica is not None:
            raise
        refuse_array(job, "explain")
        if exit_code is None:  # it runs, or it died with its batch host
            outside = Presence(job).ask()
            if outside.over and outside.exit_code is None:
                raise UsageError(f"{error}; its host process is gone and left no result") from None
            exit_code, end = outside.exit_code, job.read_slurm_end()
        if not exit_code:
            raise
        # It was cancelled, or ended before a worker could fail.
        if as_json:
            print_json(result or end)
        else:
            # Without the last line, which recommends the command that runs here.
            click.echo("\n".join([*end_lines(job, exit_code)][:-1]))
        return
    if result is not None and result.exit_code in NOT_BY_A_FAILURE:
        click.echo(next(end_lines(job, result.exit_code)), err=True)
    if as_json:
        print_json(report)
    else:
        print_facts(explanation.facts(report, plan.fault_tolerance, str(job.path)), explanation.verdicts(report))
