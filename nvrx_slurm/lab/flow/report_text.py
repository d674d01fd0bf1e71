"""The lines that `ci run` prints, and the words that all reports share.

Each report turns a `SuiteOutcome` into text and touches nothing; `write` alone writes. Print lines for the terminal
with `click.echo`, which drops colours in a pipe.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click

from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowFinding, FlowOutcome, Status, SuiteOutcome
from nvrx_slurm.report.words import plural, seconds
from nvrx_slurm.util.sanitize import uncoloured


@dataclass(frozen=True, slots=True)
class StatusStyle:
    """How reports show a status: its word, its mark in a terminal with that mark's colour, its emoji."""

    word: str
    mark: str
    color: str
    emoji: str


# In the order in which a summary counts them.
STYLES: dict[Status, StatusStyle] = {
    "passed": StatusStyle("passed", "✓", "green", "✅"),
    "flaky": StatusStyle("flaky", "~", "yellow", "⚠️"),
    "failed": StatusStyle("failed", "✗", "red", "❌"),
    "broken": StatusStyle("could not run", "!", "red", "💥"),
    "out_of_time": StatusStyle("out of time", "…", "red", "⌛"),
    "interrupted": StatusStyle("interrupted", "■", "magenta", "🛑"),
    "left_out": StatusStyle("left out", "-", "bright_black", "➖"),
}

# What leaves the suite's exit code at 0.
WELL: frozenset[Status] = frozenset({"passed", "flaky", "left_out"})

MOST_RECOVERIES = 2
NAME_WIDTH = 32
TIME_WIDTH = 7


def flow_line(flow: FlowOutcome) -> str:
    """`✓ spare-takes-over   6.31 s  recovered in 642 ms`: a flow, as it ends."""
    style = STYLES[flow.status]
    took = seconds(flow.took_s) if flow.attempts else ""
    start = f"{click.style(style.mark, fg=style.color)} {plain(flow.name):<{NAME_WIDTH}} {took:>{TIME_WIDTH}}"
    notes = []
    if flow.attempts and flow.attempts[-1].recoveries_s:
        notes.append(f"recovered in {recovery(flow.attempts[-1])}")
    if flow.status != "passed":
        why = plain(headline(flow))
        notes.append(click.style(style.word, fg=style.color) + ("" if why == style.word else f": {why}"))
    return f"{start}  {'; '.join(notes)}".rstrip()


def findings(flow: FlowOutcome, base: Path | None = None) -> list[str]:
    """What was found in each attempt that did not pass: `file:line: message`, then what helps to see why."""
    return [line for attempt in not_passed(flow) for line in of_attempt(flow, attempt, base)]


def of_attempt(flow: FlowOutcome, attempt: FlowAttempt, base: Path | None = None) -> list[str]:
    """The same for one attempt."""
    style = STYLES[attempt.verdict]
    title = click.style(f"{plain(flow.name)} {style.word}", fg=style.color, bold=True)
    lines = [f"{title} ({plain(facts(flow, attempt))})"]
    for finding in attempt.findings:
        lines.append(f"  {plain(place(finding, base))}: {plain(finding.message)}")
        lines += [f"    │ {plain(line)}".rstrip() for line in finding.detail]
    if attempt.artifacts:
        lines.append(f"  artifacts: {plain(path_from(base, attempt.artifacts))}")
    return lines


def closing(outcome: SuiteOutcome, base: Path | None = None) -> list[str]:
    """What was found in all flows, and the line that sums them up."""
    lines = []
    for flow in outcome.flows:
        if not_passed(flow):
            lines += ["", *findings(flow, base)]
    return [*lines, "", summary(outcome)]


def summary(outcome: SuiteOutcome) -> str:
    """`24 passed, 1 flaky, 1 failed on dev in 4m 10s`."""
    note = f" ({plain(outcome.note)})" if outcome.note else ""
    return f"{in_all(outcome)} on {outcome.stage} in {seconds(outcome.took_s)}{note}"


def plain(text: str) -> str:
    """The text without colours, its control characters visible: what XML, HTML and logs can hold."""
    return uncoloured(text)


def block(lines: tuple[str, ...] | list[str]) -> str:
    """Lines as one plain text."""
    return plain("\n".join(lines))


def worst_first(outcome: SuiteOutcome) -> list[FlowOutcome]:
    """What went wrong, then what is flaky, then the others; else in the order of the run."""
    return sorted(outcome.flows, key=lambda flow: (flow.status in WELL, not not_passed(flow)))


def counts(outcome: SuiteOutcome) -> dict[Status, int]:
    """How many flows went which way; none of a kind is not named."""
    found = Counter(flow.status for flow in outcome.flows)
    return {status: found[status] for status in STYLES if found[status]}


def in_all(outcome: SuiteOutcome) -> str:
    """`24 passed, 1 flaky, 1 failed`, in colours."""
    parts = [
        click.style(f"{count} {STYLES[status].word}", fg=STYLES[status].color, bold=status not in WELL)
        for status, count in counts(outcome).items()
    ]
    return ", ".join(parts) or "no flow"


def place(finding: FlowFinding, base: Path | None = None) -> str:
    """`ci/flows/spare.yaml:14`, relative to `base` where it lies below."""
    return f"{path_from(base, finding.file)}:{finding.line}"


def path_from(base: Path | None, file: str) -> str:
    """The file as seen from `base`; as it is where it does not lie below."""
    if base is None or not Path(file).is_relative_to(base):
        return file
    return str(Path(file).relative_to(base))


def recovery(attempt: FlowAttempt) -> str:
    """`642 ms`, `642 ms, 1.20 s`, `7, up to 1.20 s`; nothing where nothing recovered."""
    times = attempt.recoveries_s
    if len(times) > MOST_RECOVERIES:
        return f"{len(times)}, up to {seconds(max(times))}"
    return ", ".join(seconds(time) for time in times)


def facts(flow: FlowOutcome, attempt: FlowAttempt) -> str:
    """`dev, attempt 1 of 2, job 17, exit code 0, 6.31 s`."""
    known = [
        flow.stage,
        f"attempt {attempt.number} of {len(flow.attempts)}" if len(flow.attempts) > 1 else None,
        f"job {attempt.job_id}" if attempt.job_id is not None else None,
        f"exit code {attempt.exit_code}" if attempt.exit_code is not None else None,
        seconds(attempt.took_s),
    ]
    return ", ".join(fact for fact in known if fact)


def headline(flow: FlowOutcome) -> str:
    """What a flow's status comes of, in one sentence without its name."""
    if flow.left_out is not None:
        return flow.left_out
    if flow.status == "passed":
        return flow.about
    unwell = not_passed(flow)
    said = [finding.message for attempt in reversed(unwell) for finding in attempt.findings]
    if flow.status == "flaky":
        again = f"passed at attempt {len(flow.attempts)}, after {plural(len(unwell), 'failure')}"
        return f"{again}: {said[0]}" if said else again
    return said[0] if said else STYLES[flow.status].word


def not_passed(flow: FlowOutcome) -> list[FlowAttempt]:
    """The attempts that did not pass."""
    return [attempt for attempt in flow.attempts if attempt.verdict != "passed"]


def write(path: Path, text: str) -> None:
    """Write a report, folders above it included. What is no Unicode text is written as an escape. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
