"""The lines that `ci run` prints. Coloured: print them with `click.echo`, which drops colours in a pipe."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_slurm.lab.flow.outcome import Attempt, FlowOutcome, Status, SuiteOutcome
from nvrx_slurm.lab.flow.report.words import (
    STATUS_WORDS,
    WELL,
    counts,
    facts,
    headline,
    path_from,
    place,
    plain,
    recovery,
    told,
)
from nvrx_slurm.report.words import seconds

MARKS: dict[Status, tuple[str, str]] = {
    "passed": ("✓", "green"),
    "flaky": ("~", "yellow"),
    "failed": ("✗", "red"),
    "broken": ("!", "red"),
    "out_of_time": ("…", "red"),
    "interrupted": ("■", "magenta"),
    "left_out": ("-", "bright_black"),
}
NAME_WIDTH = 32
TIME_WIDTH = 7


def flow_line(flow: FlowOutcome) -> str:
    """`✓ spare-takes-over   6.31 s  recovered in 642 ms`: a flow, as it ends."""
    mark, color = MARKS[flow.status]
    took = seconds(flow.took_s) if flow.attempts else ""
    start = f"{click.style(mark, fg=color)} {plain(flow.name):<{NAME_WIDTH}} {took:>{TIME_WIDTH}}"
    return f"{start}  {'; '.join(_notes(flow, color))}".rstrip()


def _notes(flow: FlowOutcome, color: str) -> list[str]:
    notes = []
    if flow.attempts and flow.attempts[-1].recoveries_s:
        notes.append(f"recovered in {recovery(flow.attempts[-1])}")
    if flow.status != "passed":
        word, why = STATUS_WORDS[flow.status], plain(headline(flow))
        notes.append(click.style(word, fg=color) + ("" if why == word else f": {why}"))
    return notes


def findings(flow: FlowOutcome, base: Path | None = None) -> list[str]:
    """What was found in each attempt that did not pass: `file:line: message`, then what helps to see why."""
    return [line for attempt in told(flow) for line in of_attempt(flow, attempt, base)]


def of_attempt(flow: FlowOutcome, attempt: Attempt, base: Path | None = None) -> list[str]:
    """The same for one attempt."""
    _, color = MARKS[attempt.verdict]
    title = f"{plain(flow.name)} {STATUS_WORDS[attempt.verdict]}"
    lines = [f"{click.style(title, fg=color, bold=True)} ({plain(facts(flow, attempt))})"]
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
        if told(flow):
            lines += ["", *findings(flow, base)]
    return [*lines, "", summary(outcome)]


def summary(outcome: SuiteOutcome) -> str:
    """`24 passed, 1 flaky, 1 failed on dev in 4m 10s`."""
    parts = [
        click.style(f"{count} {STATUS_WORDS[status]}", fg=MARKS[status][1], bold=status not in WELL)
        for status, count in counts(outcome).items()
    ]
    note = f" ({plain(outcome.note)})" if outcome.note else ""
    return f"{', '.join(parts) or 'no flow'} on {outcome.stage} in {seconds(outcome.took_s)}{note}"
