"""The report for a step of GitHub Actions: annotations at the flow's lines, log groups, a summary page, outputs.

Formats: "Workflow commands for GitHub Actions" in GitHub's documentation. The summary stays under its limit.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import secrets
import sys
from pathlib import Path

import click

from nvrx_slurm.jobspec.env import GitHub
from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowOutcome, SuiteOutcome
from nvrx_slurm.lab.flow.report_text import (
    STYLES,
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


def announce(outcome: SuiteOutcome, places: GitHub, artifacts: Path) -> None:
    """Report to GitHub: commands on standard output, the summary and the outputs in the files that it names.

    The files are appended to: earlier commands of the same step may have written there. Raises OSError.
    """
    # Unknown to the jobs whose logs are printed: a log that knew it could end the quotation and give commands.
    token = secrets.token_hex(16)
    for line in (*groups(outcome, token), *annotate(outcome, places.workspace)):
        # The runner carries these lines out, so they must not be escaped as other output is.
        as_is(sys.stdout).write(line + "\n")
    sys.stdout.flush()
    texts: list[tuple[Path, str]] = []
    if places.step_summary:
        written = places.step_summary.stat().st_size if places.step_summary.exists() else 0
        texts.append((places.step_summary, markdown(outcome, places.workspace, LIMIT_BYTES - written)))
    if places.output:
        texts.append((places.output, outputs(outcome, artifacts, token)))
    for path, text in texts:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def annotate(outcome: SuiteOutcome, workspace: Path | None) -> list[str]:
    """One `::error` a flow that went wrong, one `::warning` a flaky one, at the line that was not met.

    One each, the wrong ones first, because GitHub shows ten of a kind for a step.
    """
    found = []
    for flow in worst_first(outcome):
        if not (attempts := not_passed(flow)):
            continue
        findings = [finding for attempt in reversed(attempts) for finding in attempt.findings]
        first = findings[0] if findings else None
        others = [f"also: {finding.message}" for finding in findings[1:]]
        message = "\n".join([headline(flow), *(first.detail if first else ()), *others])
        properties = {
            "file": path_from(workspace, first.file if first else flow.file),
            "line": str(first.line if first else flow.line),
            "title": f"{flow.name} {STYLES[flow.status].word} on {flow.stage}",
        }
        # Of a property also `:` and `,` are escaped, which would end it.
        escaped = [
            f"{name}={_as_data(plain(value)).replace(':', '%3A').replace(',', '%2C')}"
            for name, value in properties.items()
        ]
        kind = "warning" if flow.status in WELL else "error"
        found.append(f"::{kind} {','.join(escaped)}::{_as_data(plain(message))}")
    return found


def _as_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def groups(outcome: SuiteOutcome, token: str) -> list[str]:
    """One fold of the log for each attempt that did not pass: findings, the journal, the ends of the logs.

    `token`: something that those who wrote the logs cannot know.
    """
    lines = []
    for flow in outcome.flows:
        for attempt in not_passed(flow):
            text = [click.unstyle(line) for line in of_attempt(flow, attempt)]
            for title, below in {"journal": attempt.excerpt, **log_tails(attempt)}.items():
                text += ["", plain(title), *(f"  {plain(line)}" for line in below)]
            title = _as_data(plain(f"{flow.name}: {facts(flow, attempt)}"))
            # The runner prints the text and does not carry it out: a log may hold `::error::` or `##[group]` itself.
            lines += [f"::group::{title}", f"::stop-commands::{token}", *text, f"::{token}::", "::endgroup::"]
    return lines


def outputs(outcome: SuiteOutcome, artifacts: Path, token: str) -> str:
    """What later steps can read as `steps.<id>.outputs.<name>`, in the form that `$GITHUB_OUTPUT` wants.

    `token`: a line that no value can hold.
    """
    statuses = [flow.status for flow in outcome.flows]
    jobs = [attempt.job_id for flow in outcome.flows for attempt in flow.attempts if attempt.job_id is not None]
    values = {
        "passed": statuses.count("passed"),
        "flaky": statuses.count("flaky"),
        "failed": sum(status not in WELL for status in statuses),
        "left_out": statuses.count("left_out"),
        "exit_code": outcome.exit_code,
        "artifacts": artifacts,
        "job_ids": " ".join(jobs),
    }
    return "".join(f"{name}<<{token}\n{value}\n{token}\n" for name, value in values.items())


# Of one step's summary. GitHub drops the whole page of a step that writes more.
LIMIT_BYTES = 1 << 20

LONGEST_CELL = 300
SPARE_BYTES = 300  # for the sentence that says what was cut
COLUMNS = ("", "flow", "stage", "attempts", "took", "recovered in", "note")
_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>()&|~#!@$:]")


def markdown(outcome: SuiteOutcome, base: Path | None = None, room_bytes: int = LIMIT_BYTES) -> str:
    """A table with a line a flow, those that went wrong first, and the findings of each to unfold.

    Never more than `room_bytes` of UTF-8: first details are left out, then lines of the table, and it says so.
    """
    page = _BoundedText(room_bytes - SPARE_BYTES)
    note = f"\n\n{_cell(outcome.note)}" if outcome.note else ""
    title = f"## {click.unstyle(in_all(outcome))} on {_cell(outcome.stage)} in {seconds(outcome.took_s)}{note}"
    if not page.add(f"{title}\n\n{_line(COLUMNS)}{_line(('---',) * len(COLUMNS))}"):
        return ""
    flows = worst_first(outcome)
    without_line = []
    for flow in flows:
        last = flow.attempts[-1] if flow.attempts else None
        cells = (
            STYLES[flow.status].emoji,
            f"<b>{_cell(flow.name)}</b>",
            _cell(flow.stage),
            str(len(flow.attempts)),
            seconds(flow.took_s) if last else "",
            _cell(recovery(last)) if last else "",
            _cell(headline(flow)),
        )
        if not page.add(_line(cells)):
            without_line.append(flow)
    page.add("\n")
    # The findings of all flows come before any journal: a journal takes the place of the note that it is left out.
    short = ("the journal is left out here, the page would be too long",)
    unwell = [flow for flow in flows if not_passed(flow)]
    without_details, places = [], []
    for flow in unwell:
        if page.add("".join(_details(flow, attempt, base, short) for attempt in not_passed(flow))):
            places.append((len(page.parts) - 1, flow))
        else:
            without_details.append(flow)
    for index, flow in places:
        page.add("".join(_details(flow, each, base, each.excerpt) for each in not_passed(flow)), instead_of=index)
    lost = [
        f"{plural(len(missing), 'flow')} without {what}"
        for missing, what in ((without_line, "a line in the table"), (without_details, "details"))
        if missing
    ]
    why = f"Cut, because GitHub shows {LIMIT_BYTES >> 10} KiB: {', '.join(lost)}. The HTML report has them all."
    return "".join(page.parts) + (f"\n{why}\n" if lost else "")


class _BoundedText:
    """Parts of a text, as many as fit."""

    def __init__(self, room_bytes: int) -> None:
        self.parts: list[str] = []
        self._room = room_bytes

    def add(self, part: str, instead_of: int | None = None) -> bool:
        """Add a part at the end, or in the place of another. False: it does not fit, and nothing has changed."""
        room = self._room - _bytes(part) + (0 if instead_of is None else _bytes(self.parts[instead_of]))
        if room < 0:
            return False
        self._room = room
        if instead_of is None:
            self.parts.append(part)
        else:
            self.parts[instead_of] = part
        return True


def _bytes(text: str) -> int:
    return len(text.encode(errors="backslashreplace"))


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    """Text as it is, in one line: what Markdown or HTML would read as a sign is written as an entity."""
    flat = " ".join(plain(text).split())
    short = flat if len(flat) <= LONGEST_CELL else f"{flat[:LONGEST_CELL]}…"
    return _MARKDOWN.sub(lambda sign: f"&#{ord(sign[0])};", short)


def _details(flow: FlowOutcome, attempt: FlowAttempt, base: Path | None, journal: tuple[str, ...]) -> str:
    style = STYLES[attempt.verdict]
    title = f"{style.emoji} <b>{_cell(flow.name)}</b>: {_cell(facts(flow, attempt))}"
    lines = [style.word]
    for finding in attempt.findings:
        lines += [f"{place(finding, base)}: {finding.message}", *(f"    {line}" for line in finding.detail)]
    lines += ["", *journal] if journal else []
    return f"<details><summary>{title}</summary>\n\n<pre>{html.escape(block(lines))}</pre>\n\n</details>\n\n"


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
    found: list[tuple[int, Path]] = []
    for path in top.rglob("*"):
        if path.suffix in SUFFIXES:
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_size:
                    found.append((status.st_mtime_ns, path))
    tails: dict[str, tuple[str, ...]] = {}
    for _, path in sorted(found, reverse=True)[:MOST_FILES]:
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - READ_BYTES))
                lines = file.read(READ_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            lines = [f"not readable: {error.strerror}"]
        tails[str(path.relative_to(top))] = tuple(lines[-LAST_LINES:])
    return tails
