"""What a step of GitHub Actions tells: annotations at the flow's lines, log groups, a summary, outputs.

Formats: "Workflow commands for GitHub Actions" in GitHub's documentation.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click

from nvrx_slurm.jobspec.env import GitHub
from nvrx_slurm.lab.flow.outcome import Attempt, Finding, FlowOutcome, SuiteOutcome
from nvrx_slurm.lab.flow.report import step_summary
from nvrx_slurm.lab.flow.report.tails import log_tails
from nvrx_slurm.lab.flow.report.text import of_attempt
from nvrx_slurm.lab.flow.report.words import (
    STATUS_WORDS,
    WELL,
    facts,
    headline,
    path_from,
    plain,
    told,
    worst_first,
)
from nvrx_slurm.util.terminal import as_is

Tails = Callable[[Attempt], Mapping[str, Sequence[str]]]


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
        room = step_summary.LIMIT_BYTES - written
        _append(places.step_summary, step_summary.markdown(outcome, places.workspace, room))
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
    return [_annotation(flow, workspace) for flow in worst_first(outcome) if told(flow)]


def _annotation(flow: FlowOutcome, workspace: Path | None) -> str:
    kind = "warning" if flow.status in WELL else "error"
    found = [finding for attempt in reversed(told(flow)) for finding in attempt.findings]
    file, line = (found[0].file, found[0].line) if found else (flow.file, flow.line)
    title = f"{flow.name} {STATUS_WORDS[flow.status]} on {flow.stage}"
    where = {"file": path_from(workspace, file), "line": str(line), "title": title}
    said = ",".join(f"{name}={_as_property(plain(value))}" for name, value in where.items())
    return f"::{kind} {said}::{_as_data(plain(_message(flow, found)))}"


def _message(flow: FlowOutcome, found: Sequence[Finding]) -> str:
    others = [f"also: {finding.message}" for finding in found[1:]]
    return "\n".join([headline(flow), *(found[0].detail if found else ()), *others])


def _as_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _as_property(text: str) -> str:
    return _as_data(text).replace(":", "%3A").replace(",", "%2C")


def groups(outcome: SuiteOutcome, token: str, tails: Tails = lambda attempt: {}) -> list[str]:
    """One fold of the log for each attempt that somebody has to look at: findings, the journal, the logs' ends."""
    lines = []
    for flow in outcome.flows:
        for attempt in told(flow):
            lines.append(f"::group::{_as_data(plain(f'{flow.name}: {facts(flow, attempt)}'))}")
            lines += quoted(_story(flow, attempt, tails(attempt)), token)
            lines.append("::endgroup::")
    return lines


def quoted(lines: Iterable[str], token: str) -> list[str]:
    """Lines that the runner prints and does not obey: a job's log may hold `::error::` or `##[group]` itself.

    `token`: something that those who wrote the lines cannot know.
    """
    return [f"::stop-commands::{token}", *lines, f"::{token}::"]


def _story(flow: FlowOutcome, attempt: Attempt, tails: Mapping[str, Sequence[str]]) -> list[str]:
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
