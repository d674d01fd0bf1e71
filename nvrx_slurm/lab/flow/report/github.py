"""The report for a step of GitHub Actions: annotations at the flow's lines, log groups, a summary page, outputs.

Formats: "Workflow commands for GitHub Actions" in GitHub's documentation. The summary stays under its limit.
"""

from __future__ import annotations

import html
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click

from nvrx_slurm.jobspec.env import GitHub
from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowFinding, FlowOutcome, Status, SuiteOutcome
from nvrx_slurm.lab.flow.report.text import (
    STATUS_WORDS,
    WELL,
    block,
    facts,
    headline,
    in_all,
    not_passed,
    of_attempt,
    path_from,
    place,
    plain,
    recovery,
    worst_first,
)
from nvrx_slurm.report.words import plural, seconds
from nvrx_slurm.util.terminal import as_is

Tails = Callable[[FlowAttempt], Mapping[str, Sequence[str]]]


def announce(
    outcome: SuiteOutcome, places: GitHub, artifacts: Path, say: Callable[[str], object] | None = None
) -> None:
    """Tell GitHub all of it: commands through `say`, the summary and the outputs in the files that it gave us.

    The files are appended to: earlier commands of the same step may have written there. Raises OSError.
    """
    say = say or _to_runner
    token = secrets.token_hex(16)
    for line in (*groups(outcome, token, log_tails), *annotate(outcome, places.workspace)):
        say(line)
    if places.step_summary:
        written = places.step_summary.stat().st_size if places.step_summary.exists() else 0
        room = LIMIT_BYTES - written
        _append(places.step_summary, markdown(outcome, places.workspace, room))
    if places.output:
        _append(places.output, output_text(outputs(outcome, artifacts), token))


def _to_runner(line: str) -> None:
    """Workflow commands are for the runner to obey; the guard of standard output would make them text."""
    as_is(sys.stdout).write(line + "\n")
    sys.stdout.flush()


def annotate(outcome: SuiteOutcome, workspace: Path | None) -> list[str]:
    """One `::error` a flow that went wrong, one `::warning` a flaky one, at the line that was not met.

    One each, the wrong ones first, because GitHub shows ten of a kind for a step.
    """
    return [_annotation(flow, workspace) for flow in worst_first(outcome) if not_passed(flow)]


def _annotation(flow: FlowOutcome, workspace: Path | None) -> str:
    kind = "warning" if flow.status in WELL else "error"
    found = [finding for attempt in reversed(not_passed(flow)) for finding in attempt.findings]
    file, line = (found[0].file, found[0].line) if found else (flow.file, flow.line)
    title = f"{flow.name} {STATUS_WORDS[flow.status]} on {flow.stage}"
    where = {"file": path_from(workspace, file), "line": str(line), "title": title}
    said = ",".join(f"{name}={_as_property(plain(value))}" for name, value in where.items())
    return f"::{kind} {said}::{_as_data(plain(_message(flow, found)))}"


def _message(flow: FlowOutcome, found: Sequence[FlowFinding]) -> str:
    others = [f"also: {finding.message}" for finding in found[1:]]
    return "\n".join([headline(flow), *(found[0].detail if found else ()), *others])


def _as_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _as_property(text: str) -> str:
    return _as_data(text).replace(":", "%3A").replace(",", "%2C")


def groups(outcome: SuiteOutcome, token: str, tails: Tails = lambda attempt: {}) -> list[str]:
    """One fold of the log for each attempt that did not pass: findings, the journal, the ends of the logs."""
    lines = []
    for flow in outcome.flows:
        for attempt in not_passed(flow):
            lines.append(f"::group::{_as_data(plain(f'{flow.name}: {facts(flow, attempt)}'))}")
            lines += quoted(_story(flow, attempt, tails(attempt)), token)
            lines.append("::endgroup::")
    return lines


def quoted(lines: Iterable[str], token: str) -> list[str]:
    """Lines that the runner prints and does not obey: a job's log may hold `::error::` or `##[group]` itself.

    `token`: something that those who wrote the lines cannot know.
    """
    return [f"::stop-commands::{token}", *lines, f"::{token}::"]


def _story(flow: FlowOutcome, attempt: FlowAttempt, tails: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [click.unstyle(line) for line in of_attempt(flow, attempt)]
    for title, text in {"journal": attempt.excerpt, **tails}.items():
        lines += ["", plain(title), *(f"  {plain(line)}" for line in text)]
    return lines


def outputs(outcome: SuiteOutcome, artifacts: Path) -> dict[str, str]:
    """What later steps can read as `steps.<id>.outputs.<name>`."""
    statuses = [flow.status for flow in outcome.flows]
    jobs = [attempt.job_id for flow in outcome.flows for attempt in flow.attempts if attempt.job_id is not None]
    return {
        "passed": str(statuses.count("passed")),
        "flaky": str(statuses.count("flaky")),
        "failed": str(sum(status not in WELL for status in statuses)),
        "left_out": str(statuses.count("left_out")),
        "exit_code": str(outcome.exit_code),
        "artifacts": str(artifacts),
        "job_ids": " ".join(jobs),
    }


def output_text(values: Mapping[str, str], token: str) -> str:
    """The form that `$GITHUB_OUTPUT` wants. `token`: a line that no value can hold."""
    return "".join(f"{name}<<{token}\n{value}\n{token}\n" for name, value in values.items())


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


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
    page = _BoundedText(room_bytes - SPARE_BYTES)
    if not page.add(_head(outcome)):
        return ""
    without_line = [flow for flow in flows if not page.add(_row(flow))]
    page.add("\n")
    without_details = _add_details(page, [flow for flow in flows if not_passed(flow)], base)
    return "".join(page.parts) + _cut(without_line, without_details)


class _BoundedText:
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


def _add_details(page: _BoundedText, flows: list[FlowOutcome], base: Path | None) -> list[FlowOutcome]:
    """All findings come before any journal. Returns the flows for which there was no room at all."""
    no_journal = ("the journal is left out here, the page would be too long",)
    places = {}
    for index, flow in enumerate(flows):
        if page.add("".join(_details(flow, attempt, base, no_journal) for attempt in not_passed(flow))):
            places[index] = len(page.parts) - 1
    for index, part in places.items():
        page.swap(
            part, "".join(_details(flows[index], each, base, each.excerpt) for each in not_passed(flows[index]))
        )
    return [flow for index, flow in enumerate(flows) if index not in places]


def _details(flow: FlowOutcome, attempt: FlowAttempt, base: Path | None, journal: tuple[str, ...]) -> str:
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


SUFFIXES = frozenset({".log", ".out", ".err"})
MOST_FILES = 12
LAST_LINES = 20
READ_BYTES = 16 << 10


def log_tails(attempt: FlowAttempt) -> dict[str, tuple[str, ...]]:
    """The last lines of the logs in the attempt's artifacts, by path; those written last come first.

    A file that cannot be read is not there: this is for looking, not for deciding.
    """
    if attempt.artifacts is None:
        return {}
    top = Path(attempt.artifacts)
    found = [(_written_at(path), path) for path in top.rglob("*") if path.suffix in SUFFIXES]
    newest = [path for at, path in sorted(found, reverse=True) if at][:MOST_FILES]
    return {str(path.relative_to(top)): _tail(path) for path in newest}


def _written_at(path: Path) -> int:
    """0: nothing to read there."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_mtime_ns if status.st_size else 0


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - READ_BYTES))
            text = file.read(READ_BYTES)
    except OSError as error:
        return (f"not readable: {error.strerror}",)
    return tuple(text.decode(errors="replace").splitlines()[-LAST_LINES:])
