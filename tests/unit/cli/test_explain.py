"""`explain` and `attribution report`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import JOB, Recorder, plain_plan, to_first_cycle, write


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A job whose rank 2 failed in cycle 0; its log says why."""
    recorder = to_first_cycle()
    recorder.fail("n1", 2, exit_code=1, step=80)
    recorder.ready()
    recorder.start_workers()
    recorder.finish()
    folder = write(tmp_path, recorder)
    logs = folder.cycle_logs("main-0", 0, 0)
    logs.mkdir(parents=True)
    (logs / "rank-2.err").write_text(
        "step 80\nTraceback (most recent call last):\n"
        '  File "/w/train.py", line 7, in <module>\n    import apex_9\n'
        "ModuleNotFoundError: No module named 'apex_9'\n"
    )
    return tmp_path


def test_rules_are_asked_where_they_were_not(failed: Path, nvrx: Nvrx) -> None:
    """A job without sources is explained all the same: its logs are there."""
    result = nvrx("explain", JOB, "--folder", str(failed))
    assert result.returncode == 0
    assert "rank 2 on n1  logs/main-0/gen-0/cycle-0/rank-2.err:5" in result.stdout
    assert "No module named 'apex_9'" in result.stdout
    assert "STOP (asked just now)" in result.stdout
    assert "verdict   no source of attribution is configured" in result.stdout


def test_json_is_the_whole_of_it(failed: Path, nvrx: Nvrx) -> None:
    """One object, with the inquiry, the answers and the decision."""
    told = json.loads(nvrx("explain", JOB, "--json", "--folder", str(failed)).stdout)
    assert (told["replica"], told["cycle"], told["inquiry"]["failed"]["rank"]) == ("main-0", 0, 2)
    assert told["answers"][0]["attribution"]["fault"] == "import_error"
    assert told["decided"]["action"] == "restart_replica"


def test_what_is_not_there_is_named(failed: Path, nvrx: Nvrx) -> None:
    """A cycle that did not fail, and a job that did not, say what there is."""
    result = nvrx("explain", JOB, "--cycle", "7", "--folder", str(failed))
    assert result.returncode == 2
    assert f"no such failure in job {JOB}; it has: main-0 cycle 0" in result.stderr
    well = Recorder(plain_plan())
    well.join()
    write(failed, well, job="well")
    result = nvrx("explain", "well", "--folder", str(failed))
    assert (result.returncode, result.stderr) == (2, "nvrx-slurm: error: nothing has failed in job well\n")


def test_report_counts_the_failures_of_all_jobs(failed: Path, nvrx: Nvrx) -> None:
    """Without a verdict there is nothing to judge, and that is said."""
    result = nvrx("attribution", "report", "--folder", str(failed))
    assert result.returncode == 0
    assert "failures            1" in result.stdout
    assert "precision           not known yet" in result.stdout


def test_restarts_in_process_before_a_failure_are_told(tmp_path: Path, nvrx: Nvrx) -> None:
    """How many there were in the failed cycle, and for what the last one; where nothing failed, that there were."""
    recorder = to_first_cycle()
    recorder.restart_in_process("n0", 1)
    recorder.restart_in_process("n0", 4, times=3)
    write(tmp_path, recorder, job="well")
    well = nvrx("explain", "well", "--folder", str(tmp_path))
    assert "nothing has failed in job well; its ranks restarted in process 4 times" in well.stderr
    recorder.fail("n1", 2, exit_code=1)
    recorder.ready()
    recorder.fail("n0", 0, exit_code=1)
    write(tmp_path, recorder)
    first = nvrx("explain", JOB, "--cycle", "0", "--folder", str(tmp_path)).stdout
    assert (
        "restarted in process 4 times in this cycle, the last time after exception on rank 1 (KeyError: 3)" in first
    )
    assert json.loads(nvrx("explain", JOB, "--json", "--folder", str(tmp_path)).stdout)["in_process"] == 0
