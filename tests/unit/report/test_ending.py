"""Why a job did not end with 0, from its folder alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.errors import EXIT_FAILED, EXIT_RETRY, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.ending import MOST_LINES, end_lines, print_end
from tests.unit.report.recorder import BEGIN, JOB, Recorder, plain_plan, say, to_first_cycle, write

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "    step(batch)",
    "KeyError: 'lr'",
]


def failed(base: Path, *printed: str) -> JobFolder:
    """A job without restarts whose rank 3 printed these lines and failed."""
    recorder = Recorder(msgspec.structs.replace(plain_plan(), fault_tolerance=plain_bounds(max_restarts=0)))
    recorder.join()
    recorder.start_workers()
    recorder.fail("n1", 3, exit_code=1)
    folder = write(base, recorder)
    say(folder, "".join(line + "\n" for line in printed), rank=3, stream="err")
    shutdown = recorder.job.shutdown
    assert shutdown is not None
    folder.write_result(Result(exit_code=1, reason=shutdown.reason, ended_at=BEGIN))
    return folder


def text(folder: JobFolder, exit_code: int) -> str:
    return "\n".join(end_lines(folder, exit_code))


def test_a_failure_is_reported_with_the_ranks_traceback_and_the_decision(tmp_path: Path) -> None:
    """The report has the whole traceback without the output before it, then the decision, and names the `explain`
    command."""
    folder = failed(tmp_path, *(f"step {number}" for number in range(100)), *TRACEBACK)
    lines = list(end_lines(folder, EXIT_FAILED))
    begin = lines.index(f"    {TRACEBACK[0]}")
    assert [line[4:] for line in lines[begin : begin + 4]] == TRACEBACK
    assert not any("step 99" in line for line in lines)
    assert JOB in lines[0] and "exit code 1" in lines[0]
    assert "rank 3 on n1 exited with code 1" in lines[1]
    assert [line for line in lines if line.startswith("  decision") and "budget" in line]
    assert lines[-1].startswith(f"→ nvrx-slurm explain {JOB} --folder ")


def test_a_failure_has_its_own_step_and_the_last_that_any_rank_reported(tmp_path: Path) -> None:
    """As in `explain`; the lost steps are counted from the second of these."""
    recorder = Recorder(msgspec.structs.replace(plain_plan(), fault_tolerance=plain_bounds(max_restarts=0)))
    recorder.join()
    recorder.start_workers()
    recorder.progress(17)
    recorder.fail("n1", 3, exit_code=1, step=6)
    lines = list(end_lines(write(tmp_path, recorder), EXIT_FAILED))
    assert "at step 6; another rank had reached step 17" in lines[1]


def test_a_failure_that_the_job_has_recovered_is_not_its_reason(tmp_path: Path) -> None:
    """The job ended later, by a failed line of `setup` or by the death of its batch host, with or without a
    result."""
    recorder = to_first_cycle()
    recorder.fail("n1", 3, exit_code=1)
    recorder.ready()
    folder = write(tmp_path, recorder)
    lines = "\n".join(end_lines(folder, EXIT_FAILED, slurm_says="FAILED"))
    assert "rank 3" not in lines and "gone and left no result" in lines
    folder.write_result(Result(exit_code=EXIT_FAILED, reason="line 1 of setup failed", ended_at=BEGIN))
    assert "rank 3" not in text(folder, EXIT_FAILED) and "line 1 of setup failed" in text(folder, EXIT_FAILED)


def test_without_a_traceback_the_last_lines_are_shown(tmp_path: Path) -> None:
    """They are the last lines of standard error, with control characters made visible."""
    lines = text(failed(tmp_path, *(f"line {number}" for number in range(50)), "the end \x1b[2J"), EXIT_FAILED)
    assert "    the end \\x1b[2J" in lines.splitlines()
    assert f"    line {50 - MOST_LINES + 1}" in lines.splitlines()
    assert f"    line {50 - MOST_LINES}" not in lines.splitlines()


def test_a_cancelled_jobs_earlier_failure_is_not_its_reason(tmp_path: Path) -> None:
    """This holds for an end by a signal and by the time limit."""
    recorder = to_first_cycle()
    recorder.fail("n1", 3, exit_code=1)
    recorder.ready()
    recorder.cancel()
    folder = write(tmp_path, recorder)
    folder.write_result(Result(exit_code=EXIT_TERMINATED, reason="cancelled", ended_at=BEGIN))
    for exit_code in (EXIT_TERMINATED, EXIT_TIMEOUT):
        assert "rank 3" not in text(folder, exit_code)


def test_a_job_that_left_nothing_shows_what_its_script_printed(tmp_path: Path) -> None:
    """Slurm's output file is beside the job folder, and may be the only output."""
    (tmp_path / "slurm-17.out").write_text("/bin/bash: line 7: /opt/python: No such file or directory\n")
    lines = "\n".join(end_lines(JobFolder(tmp_path / "17"), EXIT_FAILED, slurm_says="FAILED"))
    assert "Slurm says FAILED" in lines
    assert "/opt/python: No such file or directory" in lines


def test_a_torn_journal_costs_the_failure_not_the_end(tmp_path: Path) -> None:
    """The reason of the end is still reported."""
    folder = failed(tmp_path, *TRACEBACK)
    folder.events_path.unlink()
    folder.plan_path.write_text("{")
    lines = text(folder, EXIT_FAILED)
    assert "restart budget spent" in lines and "explain" in lines


def test_a_log_that_vanishes_costs_its_lines_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was found, and is gone when its size is read: another process removes the job's logs."""
    folder = failed(tmp_path, *TRACEBACK)
    is_file = Path.is_file

    def vanishes(path: Path) -> bool:
        was_file = is_file(path)
        if path.name == "rank-3.err":
            path.unlink()
        return was_file

    monkeypatch.setattr(Path, "is_file", vanishes)
    lines = text(folder, EXIT_FAILED)
    assert "rank 3 on n1 exited with code 1" in lines and "  decision  " in lines
    assert TRACEBACK[0] not in lines


def test_the_end_of_an_array_leads_to_the_task_that_failed(tmp_path: Path) -> None:
    """The report names the failed task, because `explain` refuses the array itself."""
    for task, exit_code in (("17_0", 0), ("17_1", EXIT_FAILED)):
        folder = write(tmp_path, Recorder(plain_plan()), job=task)
        folder.write_result(Result(exit_code=exit_code, reason="", ended_at=BEGIN))
    array = JobFolder(tmp_path / "17")
    array.create()
    assert text(array, EXIT_FAILED).splitlines()[-1].startswith("→ nvrx-slurm explain 17_1")


def test_nothing_is_said_of_a_good_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad end is reported on standard error, so that standard output does not change."""
    folder = failed(tmp_path, *TRACEBACK)
    print_end(folder, 0)
    assert capsys.readouterr() == ("", "")
    print_end(folder, EXIT_RETRY)
    out, err = capsys.readouterr()
    assert not out and JOB in err
