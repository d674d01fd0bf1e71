"""The lines that a run prints."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from nvrx_slurm.lab.flow import report_text
from tests.outcomes import HOSTILE, attempt, flow, of_every_kind, suite, unwell


def line(*args: object, **changes: object) -> str:
    return click.unstyle(report_text.flow_line(flow(*args, **changes)))  # type: ignore[arg-type]


def test_a_flow_that_passed_is_one_line() -> None:
    """Mark, name, time, and how long recovery took."""
    assert line("spare-takes-over", attempt()) == (
        "✓ spare-takes-over                  6.30 s  recovered in 642 ms"
    )  # fmt: skip
    assert line("happy-path", attempt(recoveries_s=())) == "✓ happy-path                        6.30 s"


def test_a_flaky_flow_is_never_quiet() -> None:
    """A retry that passed is shown, with the failure before it."""
    assert line("frozen-node", unwell(1), attempt(2)).endswith(
        "flaky: passed at attempt 2, after 1 failure: "
        "expected rendezvous_closed with cycle 1, active 4, standby 1 within 1 s of node_lost: none came"
    )


def test_other_ends_say_why() -> None:
    """A flow that failed, could not run or was left out has the reason in its line."""
    assert line("spare-takes-over", unwell()).endswith("failed: " + unwell().findings[0].message)
    assert line("late", attempt(verdict="out_of_time")).endswith("recovered in 642 ms; out of time")
    assert line("network-cut", left_out="not for this stage").endswith("  left out: not for this stage")


def test_findings_name_file_and_line() -> None:
    """Each attempt that did not pass has its findings with `file:line`, details below, and the folder to look at."""
    lines = [click.unstyle(each) for each in report_text.findings(flow("spare-takes-over", unwell(1), attempt(2)))]
    assert lines == [
        "spare-takes-over failed (dev, attempt 1 of 2, job 17, exit code 0, 6.30 s)",
        "  ci/flows/spare-takes-over.yaml:14: "
        "expected rendezvous_closed with cycle 1, active 4, standby 1 within 1 s of node_lost: none came",
        "    │ nearest: +1.231s rendezvous_closed default/0 cycle 1",
        "    │   standby: expected 1, was 0",
        "  artifacts: nvrx-ci/run/attempt-1",
    ]


def test_the_summary_counts_every_flow() -> None:
    """The last line counts each kind once, names the stage, and says why the run ended early."""
    assert click.unstyle(report_text.closing(of_every_kind())[-1]) == (
        "1 passed, 1 flaky, 2 failed, 1 could not run, 1 out of time, 1 interrupted, 1 left out "
        "on dev in 42.0 s (stopped after 42.0 s by SIGINT)"
    )
    assert click.unstyle(report_text.summary(suite())) == "no flow on dev in 42.0 s"


def test_foreign_text_cannot_drive_the_terminal() -> None:
    """A colour or a control character in a name is not printed; the report's own colours are."""
    printed = report_text.flow_line(flow(HOSTILE, attempt()))
    assert "\x1b[31m" not in printed and "\x00" not in printed
    assert printed.startswith(click.style("✓", fg="green"))


@pytest.mark.parametrize(
    ("times", "said"),
    [((), ""), ((0.642,), "642 ms"), ((0.642, 1.2), "642 ms, 1.20 s"), ((0.1, 1.2, 0.4), "3, up to 1.20 s")],
)
def test_recoveries_stay_short(times: tuple[float, ...], said: str) -> None:
    """Two recoveries are listed; of more, their number and the longest are."""
    assert report_text.recovery(attempt(recoveries_s=times)) == said


def test_paths_are_relative_to_a_folder() -> None:
    """A path below the folder is printed relative to it, another one unchanged."""
    assert report_text.path_from(Path("/checkout"), "/checkout/ci/a.yaml") == "ci/a.yaml"
    assert report_text.path_from(Path("/checkout"), "/elsewhere/a.yaml") == "/elsewhere/a.yaml"
    assert report_text.path_from(None, "/elsewhere/a.yaml") == "/elsewhere/a.yaml"
