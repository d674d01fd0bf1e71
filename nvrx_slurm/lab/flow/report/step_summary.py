"""The page that GitHub shows for a step, in its Markdown. It stays under GitHub's limit whatever there is to tell."""

from __future__ import annotations

import html
import re
from pathlib import Path

from nvrx_slurm.lab.flow.outcome import Attempt, FlowOutcome, Status, SuiteOutcome
from nvrx_slurm.lab.flow.report.words import (
    STATUS_WORDS,
    block,
    facts,
    headline,
    in_all,
    place,
    plain,
    recovery,
    told,
    worst_first,
)
from nvrx_slurm.report.words import plural, seconds

LIMIT_BYTES = 1 << 20
"""Of one step's summary. GitHub drops the whole page of a step that writes more."""

MARKS: dict[Status, str] = {
    "passed": "✅",
    "flaky": "⚠️",
    "failed": "❌",
    "broken": "💥",
    "out_of_time": "⌛",
    "interrupted": "🛑",
    "left_out": "➖",
}
LONGEST_CELL = 300
SPARE_BYTES = 300  # for the sentence that says what was cut
COLUMNS = ("", "flow", "stage", "attempts", "took", "recovered in", "note")
_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>()&|~#!@$:]")


def markdown(outcome: SuiteOutcome, base: Path | None = None, room_bytes: int = LIMIT_BYTES) -> str:
    """A table with a line a flow, those that went wrong first, and the findings of each to unfold.

    Never more than `room_bytes` of UTF-8: first details are left out, then lines of the table, and it says so.
    """
    flows = worst_first(outcome)
    page = _Page(room_bytes - SPARE_BYTES)
    if not page.add(_head(outcome)):
        return ""
    without_line = [flow for flow in flows if not page.add(_row(flow))]
    page.add("\n")
    without_details = _add_details(page, [flow for flow in flows if told(flow)], base)
    return "".join(page.parts) + _cut(without_line, without_details)


class _Page:
    """Parts of a text, as many as fit."""

    def __init__(self, room_bytes: int) -> None:
        self.parts: list[str] = []
        self._room = room_bytes

    def add(self, part: str) -> bool:
        """False: it does not fit, and nothing has changed."""
        self.parts.append("")
        if self.swap(len(self.parts) - 1, part):
            return True
        self.parts.pop()
        return False

    def swap(self, index: int, part: str) -> bool:
        """Put a part in another's place; false as above."""
        room = self._room + _bytes(self.parts[index]) - _bytes(part)
        if room < 0:
            return False
        self.parts[index], self._room = part, room
        return True


def _bytes(text: str) -> int:
    return len(text.encode(errors="backslashreplace"))


def _head(outcome: SuiteOutcome) -> str:
    note = f"\n\n{_cell(outcome.note)}" if outcome.note else ""
    title = f"## {in_all(outcome)} on {_cell(outcome.stage)} in {seconds(outcome.took_s)}{note}"
    return f"{title}\n\n{_line(COLUMNS)}{_line(('---',) * len(COLUMNS))}"


def _row(flow: FlowOutcome) -> str:
    last = flow.attempts[-1] if flow.attempts else None
    cells = (
        MARKS[flow.status],
        f"<b>{_cell(flow.name)}</b>",
        _cell(flow.stage),
        str(len(flow.attempts)),
        seconds(flow.took_s) if last else "",
        _cell(recovery(last)) if last else "",
        _cell(headline(flow)),
    )
    return _line(cells)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    """Text as it is, in one line: what Markdown or HTML would read as a sign is written as an entity."""
    flat = " ".join(plain(text).split())
    short = flat if len(flat) <= LONGEST_CELL else f"{flat[:LONGEST_CELL]}…"
    return _MARKDOWN.sub(lambda sign: f"&#{ord(sign[0])};", short)


def _add_details(page: _Page, flows: list[FlowOutcome], base: Path | None) -> list[FlowOutcome]:
    """Everybody's findings before anybody's journal. Returns those for whom there was no room at all."""
    no_journal = ("the journal is left out here, the page would be too long",)
    places = {}
    for index, flow in enumerate(flows):
        if page.add("".join(_details(flow, attempt, base, no_journal) for attempt in told(flow))):
            places[index] = len(page.parts) - 1
    for index, part in places.items():
        page.swap(part, "".join(_details(flows[index], each, base, each.excerpt) for each in told(flows[index])))
    return [flow for index, flow in enumerate(flows) if index not in places]


def _details(flow: FlowOutcome, attempt: Attempt, base: Path | None, journal: tuple[str, ...]) -> str:
    title = f"{MARKS[attempt.verdict]} <b>{_cell(flow.name)}</b>: {_cell(facts(flow, attempt))}"
    lines = [STATUS_WORDS[attempt.verdict]]
    for finding in attempt.findings:
        lines += [f"{place(finding, base)}: {finding.message}", *(f"    {line}" for line in finding.detail)]
    lines += ["", *journal] if journal else []
    return f"<details><summary>{title}</summary>\n\n<pre>{html.escape(block(lines))}</pre>\n\n</details>\n\n"


def _cut(without_line: list[FlowOutcome], without_details: list[FlowOutcome]) -> str:
    parts = [
        f"{plural(len(flows), 'flow')} without {what}"
        for flows, what in ((without_line, "a line in the table"), (without_details, "details"))
        if flows
    ]
    if not parts:
        return ""
    return f"\nCut, because GitHub shows {LIMIT_BYTES >> 10} KiB: {', '.join(parts)}. The HTML report has them all.\n"
