"""`nvrx-slurm status`, and `dump` of jobs without live workers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import JOB, Recorder, ended, plain_plan, to_first_cycle, write


def test_an_unknown_job_is_named_with_those_that_there_are(nvrx: Nvrx, tmp_path: Path) -> None:
    """As for every command, the exit code is 2, and the message has the jobs of the folder."""
    write(tmp_path / "nvrx-jobs", ended(), job="known")
    done = nvrx("dump", "unknown")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no job 'unknown'" in done.stderr
    assert "known" in done.stderr


def test_an_ended_job_has_no_live_workers(nvrx: Nvrx, tmp_path: Path) -> None:
    """The exit code is 2, and the message says that no stacks were written while the job ran."""
    write(tmp_path / "nvrx-jobs", ended())
    done = nvrx("dump", JOB)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith(
        f"job {JOB} has ended (completed), and only live workers have stacks; none were written down"
    )


def test_an_ended_job_shows_where_its_last_stacks_lie(nvrx: Nvrx, tmp_path: Path) -> None:
    """If a hang ended the job, its stacks show why."""
    recorder = to_first_cycle()
    recorder.hang("n1", 3)
    recorder.cancel()
    recorder.leave("cancelled")
    folder = write(tmp_path / "nvrx-jobs", recorder)
    done = nvrx("dump", JOB)
    assert done.returncode == 2
    assert f"the last ones lie in {Path('nvrx-jobs') / folder.job_id / 'stacks/main-0/rank-3.txt'}" in done.stderr


def test_a_job_that_has_not_started_has_no_workers_yet(nvrx: Nvrx, tmp_path: Path) -> None:
    """The exit code is 2, and the message has the job's state."""
    write(tmp_path / "nvrx-jobs", Recorder(plain_plan(), start=False))
    done = nvrx("dump", JOB)
    assert done.returncode == 2
    assert f"job {JOB} is starting: it has no workers yet" in done.stderr


@pytest.mark.parametrize("timeout", ["soon", "-3s"])
def test_a_timeout_that_is_none_is_an_error(nvrx: Nvrx, timeout: str) -> None:
    """The message has the flag, the value, and how a duration is written."""
    done = nvrx("dump", JOB, f"--timeout={timeout}")
    assert done.returncode == 2
    assert f"--timeout {timeout}: '{timeout}' is no duration; write it like 15s, 2m, 1h30m" in done.stderr


def test_an_array_without_a_folder_is_shown_by_its_tasks(nvrx: Nvrx, tmp_path: Path) -> None:
    """`sbatch` alone makes no such folder. How long the array has run is not known; what is wrong with a task is
    shown."""
    for task in ("17_0", "17_1"):
        write(tmp_path, to_first_cycle(), job=task, cluster="slurm")
    damaged = tmp_path / "17_1" / "result.json"
    damaged.write_text("{")
    array = ("status", "17", "--folder", str(tmp_path))
    shown = json.loads(nvrx(*array, "--json").stdout)
    assert (shown["state"], shown["elapsed_s"]) == ("running", None)
    assert [task["state"] for task in shown["tasks"]] == ["running", "unreadable"]
    done = nvrx(*array)
    assert re.search(r"^state +running$", done.stdout, re.MULTILINE)
    (line,) = done.stderr.splitlines()
    assert line.startswith("17_1: ") and str(damaged) in line
