"""The report for GitHub Actions."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.env import GitHub
from nvrx_slurm.lab.flow import report_github
from nvrx_slurm.lab.flow.outcome import FlowFinding, FlowOutcome, SuiteOutcome
from nvrx_slurm.lab.flow.report_github import LAST_LINES, log_tails
from tests.outcomes import HOSTILE, attempt, flow, of_every_kind, suite, unwell

COMMAND = re.compile(r"::(error|warning) file=([^,]*),line=(\d+),title=([^,:]*)::(.*)")


def decoded(text: str) -> str:
    """Undoes the escapes, as GitHub's runner does."""
    for code, sign in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, sign)
    return text


def annotation(flow: FlowOutcome, workspace: Path | None = None) -> tuple[str, ...]:
    (command,) = report_github.annotate(suite(flow), workspace)
    match = COMMAND.fullmatch(command)
    assert match is not None
    return tuple(decoded(part) for part in match.groups())


def test_a_failure_points_at_its_line() -> None:
    """The annotation is at the line of the expectation that was not met, with a path from the checkout and the
    details."""
    missed = FlowFinding(kind="fault", message="50% lost:\nwhy, then?", file="/w/ci/a.yaml", line=6, detail=("x",))
    kind, file, line, title, message = annotation(flow("a: b, c", unwell(findings=(missed,))), Path("/w"))
    assert (kind, file, line) == ("error", "ci/a.yaml", "6")
    assert title == "a: b, c failed on dev"
    assert message == "50% lost:\nwhy, then?\nx"


def test_a_flaky_flow_is_a_warning() -> None:
    """A retry that passed is reported."""
    kind, file, line, title, message = annotation(flow("frozen-node", unwell(1), attempt(2)))
    assert (kind, file, line) == ("warning", "ci/flows/spare-takes-over.yaml", "14")
    assert title == "frozen-node flaky on dev"
    assert message.startswith("passed at attempt 2, after 1 failure: expected rendezvous_closed")


def test_errors_come_before_warnings() -> None:
    """GitHub shows ten annotations of a step: failures come first, and each flow has one, however many findings it
    has."""
    told = report_github.annotate(of_every_kind(), None)
    assert [line.split(" ")[0] for line in told] == ["::error"] * 5 + ["::warning"]


def test_a_group_folds_the_log_of_each_bad_attempt(tmp_path: Path) -> None:
    """Each attempt has one group with findings, journal and the ends of the logs, in which the runner executes no
    command."""
    (tmp_path / "job.log").write_text("::error::not ours\n##[group]nor this\n")
    bad = flow("bad", unwell(artifacts=str(tmp_path)))
    lines = report_github.groups(suite(flow("happy", attempt()), bad), "secret")
    assert lines[:2] == ["::group::bad: dev, job 17, exit code 0, 6.30 s", "::stop-commands::secret"]
    assert lines[-2:] == ["::secret::", "::endgroup::"]
    inside = lines[2:-2]
    assert any(line.endswith("n2: connection to its agent closed, at step 5") for line in inside)
    assert inside[-3:] == ["job.log", "  ::error::not ours", "  ##[group]nor this"]
    assert not any("\x1b" in line for line in lines)


def test_the_summary_has_a_line_a_flow() -> None:
    """The table has mark, name, stage, attempts, time and recovery; failures come first, with details that unfold."""
    page = report_github.markdown(of_every_kind())
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(of_every_kind().flows)
    assert [cell.strip("| ") for cell in rows[0][:6]] == [
        "❌",
        "<b>spare-takes-over</b>",
        "dev",
        "2",
        "12.6 s",
        "",
    ]
    assert rows[5][5] == "3.41 s, 200 ms"
    assert page.count("<details>") == 7
    assert "ci/flows/spare-takes-over.yaml:14: expected rendezvous_closed" in page


def test_no_name_becomes_markup() -> None:
    """Markdown and HTML in a name or a finding are shown as text, and the table keeps its columns."""
    page = report_github.markdown(suite(flow(HOSTILE, unwell(), about=HOSTILE)))
    (row,) = [line for line in page.splitlines() if "onerror" in line and line.startswith("|")]
    assert row.count("|") == len(report_github.COLUMNS) + 1
    assert "<img" not in page and "`" not in page
    assert "<img src=x onerror=" in unescape(row)


def big(flows: int, lines: int) -> SuiteOutcome:
    journal = tuple(f"+{index}.000s node_lost n{index}: connection to its agent closed, ä" for index in range(lines))
    return suite(*(flow(f"flow-{index}", unwell(excerpt=journal)) for index in range(flows)))


@pytest.mark.parametrize(
    ("flows", "lines", "said"),
    [
        (3, 10, None),
        (40, 2000, "the journal is left out here"),
        (2500, 1, "flows without details"),
        (9000, 1, "without a line in the table"),
    ],
)
def test_the_summary_keeps_githubs_limit(flows: int, lines: int, said: str | None) -> None:
    """The page is always under 1 MiB: journals are left out first, then details, then lines, with a note."""
    page = report_github.markdown(big(flows, lines))
    assert len(page.encode()) <= report_github.LIMIT_BYTES
    assert page.startswith(f"## {flows} failed")
    assert (said or "connection to its agent closed") in page
    assert ("Cut, because" in page) is (flows > 1000)
    assert page.count("<details>") == page.count("</details>")


def test_all_is_written_where_github_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Summary and outputs are appended to those of the step so far; commands are printed."""
    places = GitHub(tmp_path, tmp_path / "summary.md", tmp_path / "output")
    for path in (tmp_path / "summary.md", tmp_path / "output"):
        path.write_text("before\n")
    report_github.announce(of_every_kind(), places, Path("nvrx-ci/run"))
    assert sum(line.startswith("::error ") for line in capsys.readouterr().out.splitlines()) == 5
    assert (tmp_path / "summary.md").read_text().startswith("before\n## 1 passed, 1 flaky, 2 failed")
    output = (tmp_path / "output").read_text()
    assert output.startswith("before\n")
    assert read_output(output.removeprefix("before\n")) == {
        "passed": "1",
        "flaky": "1",
        "failed": "5",
        "left_out": "1",
        "exit_code": "1",
        "artifacts": "nvrx-ci/run",
        "job_ids": "17 17 18 17 18 17 17 17",
    }


def read_output(text: str) -> dict[str, str]:
    """Reads `$GITHUB_OUTPUT` as GitHub's runner does."""
    found = re.findall(r"(\w+)<<(\w{32})\n(.*?)\n\2\n", text, re.DOTALL)
    return {name: value for name, _, value in found}


def test_a_full_summary_is_left_as_it_is(tmp_path: Path) -> None:
    """If a step has used up its summary, nothing is added: GitHub would drop all of it."""
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * report_github.LIMIT_BYTES)
    report_github.announce(of_every_kind(), GitHub(step_summary=summary), tmp_path)
    assert summary.stat().st_size == report_github.LIMIT_BYTES


def test_the_ends_of_the_logs_are_read(tmp_path: Path) -> None:
    """The last lines of each log below the attempt's folder are read; empty files and other files are left out."""
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "n1.log").write_bytes(b"\n".join(b"line %d \xff" % number for number in range(9999)))
    (tmp_path / "job.log").write_text("one\n")
    (tmp_path / "empty.err").touch()
    (tmp_path / "events.jsonl").write_text("{}\n")
    tails = log_tails(unwell(artifacts=str(tmp_path)))
    assert set(tails) == {"nodes/n1.log", "job.log"}
    assert tails["job.log"] == ("one",)
    assert len(tails["nodes/n1.log"]) == LAST_LINES
    assert tails["nodes/n1.log"][-1].startswith("line 9998")
    assert log_tails(attempt()) == {}


def test_github_is_known_by_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a step of GitHub Actions has these places; one that the runner did not set is None."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert env.github() is None
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", "/w")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/s")
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    assert env.github() == GitHub(Path("/w"), Path("/s"), None)
