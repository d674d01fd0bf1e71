"""What `nvrx-slurm logs` and `events` can be asked to show."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from nvrx_slurm.journal.folder import Result
from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import BEGIN, ended, write


def test_events_are_chosen_by_type_and_time(nvrx: Nvrx, tmp_path: Path) -> None:
    """Each line has the time, local or UTC, and the seconds since the start, even if earlier events are left out."""
    recorder = ended()
    write(tmp_path / "nvrx-jobs", recorder, job="j")
    all_lines = nvrx("events", "j").stdout.splitlines()
    lost = [entry for entry in recorder.entries if type(entry.record).__name__ == "NodeLost"]
    shown = nvrx("events", "j", "--type", "node_lost", "--utc").stdout.splitlines()
    assert len(shown) == len(lost) > 0
    time, offset, name = shown[0].split()[:3]
    assert name == "node_lost"
    assert datetime.fromisoformat(time) == datetime.fromtimestamp(int(lost[0].t * 1000) / 1000, UTC)
    assert offset == f"+{lost[0].t - recorder.entries[0].t:.3f}s"
    assert [line.split()[1:] for line in all_lines if "node_lost " in line] == [line.split()[1:] for line in shown]
    after = datetime.fromtimestamp(lost[0].t, UTC).isoformat()
    kept = nvrx("events", "j", "--since", after, "--json").stdout.splitlines()
    assert [json.loads(line)["n"] for line in kept] == [e.n for e in recorder.entries if e.t >= lost[0].t]
    assert nvrx("events", "j", "--since", "1h").stdout == ""
    for wrong in (("--type", "node_lots"), ("--since", "yesterday")):
        assert nvrx("events", "j", *wrong).returncode == 2


def test_logs_are_chosen_by_line(nvrx: Nvrx, tmp_path: Path) -> None:
    """The last lines, matching lines, or the last matching lines are shown; a bad expression is an error."""
    folder = write(tmp_path / "nvrx-jobs", ended(), job="j")
    folder.write_result(Result(exit_code=0, reason="done", ended_at=BEGIN + 240.0))  # or -f waits for the job
    folder.job_log.write_text("".join(f"[main-0 {n % 2}] step {n}\n" for n in range(30)))
    assert nvrx("logs", "j", "--tail", "2").stdout == "[main-0 0] step 28\n[main-0 1] step 29\n"
    assert nvrx("logs", "j", "--grep", "step [12]9").stdout == "[main-0 1] step 19\n[main-0 1] step 29\n"
    assert nvrx("logs", "j", "--grep", r"\[main-0 0\]", "--tail", "1").stdout == "[main-0 0] step 28\n"
    assert nvrx("logs", "j", "-f", "--tail", "1").stdout == "[main-0 1] step 29\n", "a job that has ended"
    for bad in ("(", "a{99999999999}", "(" * 3000):
        refused = nvrx("logs", "j", "--grep", bad)
        assert (refused.returncode, "is no regular expression" in refused.stderr) == (2, True), refused.stderr


def test_logs_are_chosen_by_bytes_that_are_no_utf_8(nvrx: Nvrx, tmp_path: Path) -> None:
    """Workers may print any bytes, and a shell passes each byte on."""
    folder = write(tmp_path / "nvrx-jobs", ended(), job="j")
    folder.job_log.write_bytes(b"[main-0 0] caf\xe9\n[main-0 0] tea\n")
    assert nvrx("logs", "j", "--grep", os.fsdecode(b"[^\xe9]a$|\xff")).stdout == "[main-0 0] tea\n"
