"""`python -m ci.corpus` (`make corpus`): is the analysis right? Every labelled case of tests/corpus, in one table.

`tests/corpus/dev` and `tests/corpus/fresh` are there to write rules by; `tests/corpus/held_out` and
`tests/corpus/unseen` test them on what their author has not seen.
Of the held-out part the promise is: a STOP is true in 98 of 100 cases, and nine of ten true ones are found.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ci.labels import PARTS, Case, Label, Part, folders, read_case
from nvrx_slurm.attribution.analyzer import Analyzer
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict

LEAST_PRECISION, LEAST_RECALL = 0.98, 0.9
NO_LINE = "        (no line)"

# ------------------------------------------------------------------------------------------- the judgment


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer beside what is true. None: the label does not say."""

    case: Case
    answer: Attribution

    @property
    def said_stop(self) -> bool:
        return self.answer.verdict is Verdict.STOP

    @property
    def verdict(self) -> bool:
        return self.answer.verdict in self.case.label.verdict

    @property
    def fault(self) -> bool:
        return self.answer.fault in self.case.label.fault

    @property
    def scope(self) -> bool | None:
        return self.answer.scope in self.case.label.scope if self.case.label.scope else None

    @property
    def blame(self) -> bool | None:
        """Whether ranks, nodes and missing ranks are the true ones, all of them and no other."""
        label, answer = self.case.label, self.answer
        pairs: tuple[tuple[Iterable[object] | None, Iterable[object]], ...] = (
            (label.blamed_ranks, answer.ranks),
            (label.blamed_nodes, answer.nodes),
            (label.missing, answer.missing),
        )
        told = [set(true) == set(said) for true, said in pairs if true is not None]
        return all(told) if told else None

    @property
    def primary(self) -> bool | None:
        true, said = self.case.label.primary, self.answer.primary
        if true is None:
            return None
        if said is None or not fnmatch(Path(said.file).name, true.file):
            return False
        return any(text in said.text for text in true.text)


COLUMNS: dict[str, Callable[[Judged], bool | None]] = {
    "verdict": lambda each: each.verdict,
    "fault": lambda each: each.fault,
    "scope": lambda each: each.scope,
    "blame": lambda each: each.blame,
    "line": lambda each: each.primary,
}


def precision(judged: Sequence[Judged]) -> float | None:
    """How many of the STOPs are true; None where none was said."""
    return _share(Verdict.STOP in each.case.label.verdict for each in judged if each.said_stop)


def recall(judged: Sequence[Judged]) -> float | None:
    """How many of the true STOPs were said; None where there is none."""
    return _share(each.said_stop for each in judged if each.case.must_stop)


def _share(told: Iterable[bool | None]) -> float | None:
    known = [each for each in told if each is not None]
    return sum(known) / len(known) if known else None


async def judge(cases: Sequence[Case]) -> list[Judged]:
    """Analyse each case as the library does it, one after the other, so that each one's time is its own."""
    analyzer = Analyzer()
    try:
        return [Judged(case, await analyzer.analyze(case.inquiry())) for case in cases]
    finally:
        await analyzer.close()


# ------------------------------------------------------------------------------------------- the table


def classes(judged: Sequence[Judged], by: str) -> Iterator[tuple[str, list[Judged]]]:
    """The cases by the first scope or fault of their labels; then those that cut across."""

    def name(each: Judged) -> str:
        return each.case.label.fault[0] if by == "fault" else (*each.case.label.scope, Scope.UNKNOWN)[0].value

    for key, group in groupby(sorted(judged, key=name), name):
        yield key, list(group)
    yield "look-alikes", [each for each in judged if each.case.label.lookalike]
    yield "several ranks", [each for each in judged if each.case.multi_rank]
    yield "all", list(judged)


def table(part: Part, judged: Sequence[Judged], by: str) -> Table:
    """One row a class."""
    shown = Table(title=f"tests/corpus/{part}", title_justify="left")
    shown.add_column("class")
    for column in ("cases", "STOP precision", "STOP recall", *COLUMNS, "seconds"):
        shown.add_column(column, justify="right")
    for name, group in classes(judged, by):
        if name == "look-alikes":
            shown.add_section()
        shares = (precision(group), recall(group), *(_share(map(right, group)) for right in COLUMNS.values()))
        seconds = sum(each.answer.latency_s for each in group)
        shown.add_row(name, str(len(group)), *map(_percent, shares), f"{seconds:.2f}")
    return shown


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def misses(judged: Sequence[Judged]) -> Iterator[str]:
    """What was said instead of what is true, a paragraph a case."""
    for each in judged:
        wrong = [name for name, right in COLUMNS.items() if right(each) is False]
        if wrong:
            label, answer = each.case.label, each.answer
            yield f"{each.case.name}: {', '.join(wrong)}"
            true = ("|".join(names) for names in (label.verdict, label.fault, label.scope))
            yield f"  true: {' '.join(true)} {_blamed(label)}"
            yield f"        {label.primary.file}: {' | '.join(label.primary.text)}" if label.primary else NO_LINE
            said = f"ranks={answer.ranks} nodes={answer.nodes} missing={answer.missing}"
            yield f"  said: {answer.verdict} {answer.fault} {answer.scope} {said} ({answer.confidence:.2f})"
            line = answer.primary
            yield (
                f"        {Path(line.file).name}:{line.line}: {line.text} [{line.rule}]"
                if line
                else "        (no line)"
            )


def _blamed(label: Label) -> str:
    pairs = (("ranks", label.blamed_ranks), ("nodes", label.blamed_nodes), ("missing", label.missing))
    return " ".join(f"{name}={value}" for name, value in pairs if value is not None)


def kept(judged: Sequence[Judged]) -> bool:
    """Whether the promise about the held-out part holds."""
    return (precision(judged) or 0.0) >= LEAST_PRECISION and (recall(judged) or 0.0) >= LEAST_RECALL


def main() -> int:
    """0: the promise about the held-out part holds, or it was not looked at. 1: it does not. 2: a label is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ci.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--by", choices=("scope", "fault"), default="scope", help="what makes a row")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose name has these words")
    parser.add_argument("--failures", action="store_true", help="list each miss, with what was said instead")
    chosen = parser.parse_args()
    console, held = Console(highlight=False, width=None if sys.stdout.isatty() else 140), True
    for part in [chosen.part] if chosen.part else PARTS:
        try:
            judged = asyncio.run(judge([read_case(folder) for folder in folders(part) if chosen.only in folder.name]))
        except NvrxError as error:
            print(f"ci.corpus: {error}", file=sys.stderr)
            return error.exit_code
        if chosen.failures:
            print("\n".join(misses(judged)))
        console.print(table(part, judged, chosen.by))
        held = held and (part != "held_out" or bool(chosen.only) or kept(judged))
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
