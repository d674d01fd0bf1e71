"""`nvrx-slurm analyze`, `explain` and `attribution report`."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import jsonschema
import pytest

from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import JOB, Recorder, plain_plan, to_first_cycle, write

LOG = """\
2026-11-21 18:00:00,123 INFO train: loading
2026-11-21 18:00:01,456 INFO train: 8 ranks
Traceback (most recent call last):
  File "/work/train.py", line 12, in <module>
    main()
  File "/work/train.py", line 9, in main
    lr = config["lr"]
KeyError: 'lr'
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of a training that lacks a key."""
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


def test_a_page_for_people(nvrx: Nvrx, log: Path) -> None:
    """If standard output is no terminal, it is plain text: the verdict, the line in its context, what to do."""
    done = nvrx("analyze", log.name)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "STOP  a restart would fail the same way",
        "key_error, of user code, confidence 0.70",
    ]
    assert any(line.startswith("first      ") and "train.log:8, rule key_error.raised" in line for line in lines)
    assert lines[-1].startswith("read       1 file, ")
    assert '         7 |     lr = config["lr"]' in lines
    assert ">        8 | KeyError: 'lr'" in lines
    assert any(line.startswith("hint       ") for line in lines)
    assert "\x1b" not in done.stdout


def test_json_is_what_the_schema_says(nvrx: Nvrx, log: Path) -> None:
    """The command prints the answer and the schema."""
    answer = json.loads(nvrx("analyze", str(log), "--json").stdout)
    jsonschema.validate(answer, json.loads(nvrx("analyze", "--schema").stdout))
    assert (answer["verdict"], answer["fault"], answer["primary"]["line"]) == ("STOP", "key_error", 8)
    assert answer["latency_s"] > 0
    assert answer["meaning"] == "a restart would fail the same way"


def test_rules_of_ones_own(nvrx: Nvrx, log: Path, tmp_path: Path) -> None:
    """A user's rules are used beside the shipped ones."""
    mine = "missing_lr.mine:\n  fault: missing_lr\n  pattern: 'KeyError: .lr.'\n  verdict: STOP\n  scope: user_code\n"
    (tmp_path / "mine.yaml").write_text(f"{mine}  severity: 90\n  hint: Set lr in the configuration.\n")
    done = nvrx("analyze", log.name, "--rules", "mine.yaml")
    assert done.stdout.splitlines()[1].startswith("missing_lr, of user code")
    assert "Set lr in the configuration." in done.stdout


def test_only_one_rank(nvrx: Nvrx, tmp_path: Path) -> None:
    """Lines of other ranks are left out; a rank without a log is a usage error, not a log without a failure."""
    (tmp_path / "rank-0.err").write_text(LOG)
    (tmp_path / "rank-1.err").write_text(LOG.replace("KeyError: 'lr'", "NameError: name 'lr' is not defined"))
    answer = json.loads(nvrx("analyze", ".", "--rank", "1", "--json").stdout)
    assert (answer["fault"], answer["ranks"]) == ("name_error", [1])
    refused = nvrx("analyze", ".", "--rank", "99", "--exit-code")
    assert (refused.returncode, "--rank 99" in refused.stderr) == (2, True)
    # In a log with lines of all ranks, none of the lines that count may be of this rank.
    text = "[rank1]: NameError: name 'lr' is not defined\n"
    unnamed = nvrx("analyze", "-", "--rank", "99", stdin=text)
    assert unnamed.stdout.startswith("UNKNOWN  no line tells of a failure")
    assert "--rank 99: no line that a rule recognises names it" in unnamed.stderr
    assert "--rank" not in nvrx("analyze", "-", "--rank", "1", stdin=text).stderr


def test_nothing_wrong_is_said_as_well(nvrx: Nvrx, tmp_path: Path) -> None:
    """The exit code is 0, since the command has done what it was asked for."""
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n" * 50)
    done = nvrx("analyze", "train.log")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "UNKNOWN  no line tells of a failure")
    assert "No line reports a failure." in done.stdout


def test_standard_input_and_pipes(nvrx: Nvrx, log: Path, tmp_path: Path) -> None:
    """Both are read to their end, and named in the answer."""
    text = log.read_text()
    answer = json.loads(nvrx("analyze", "-", "--json", stdin=text).stdout)
    assert (answer["fault"], answer["primary"]["file"]) == ("key_error", "stdin")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    done = nvrx("analyze", str(pipe))
    writer.join()
    assert "pipe:8, rule key_error.raised" in done.stdout


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("step 2 loss 2.0", 0),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 10),
        ("acme.errors.BadPlanError: no stage 4", 11),
        ("KeyError: 'lr'", 93),
    ],
)
def test_exit_codes_for_scripts(nvrx: Nvrx, tmp_path: Path, line: str, code: int) -> None:
    """With --exit-code the verdict is the exit code."""
    (tmp_path / "train.log").write_text(f"step 1 loss 2.0\n{line}\n")
    assert nvrx("analyze", "train.log", "--exit-code").returncode == code
    assert nvrx("analyze", "train.log").returncode == 0


def test_the_last_cycles_of_a_job(nvrx: Nvrx, tmp_path: Path) -> None:
    """Each of the last cycles has its own answer, the newest last."""
    for cycle, name in enumerate(("a", "b", "c")):
        folder = tmp_path / "job" / "logs" / "main-0" / "gen-0" / f"cycle-{cycle}"
        folder.mkdir(parents=True)
        (folder / "rank-0.err").write_text(f"KeyError: '{name}'\n")
    answers = json.loads(nvrx("analyze", "job", "--last", "2", "--json").stdout)
    assert [answer["primary"]["text"] for answer in answers] == ["KeyError: 'b'", "KeyError: 'c'"]
    assert nvrx("analyze", "job/logs/main-0/gen-0/cycle-0/rank-0.err", "--last", "1").returncode == 2


def test_an_empty_log(nvrx: Nvrx, tmp_path: Path) -> None:
    """An empty log reports no failure."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.err").touch()
    assert "no line tells of a failure" in nvrx("analyze", "logs").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a log file, a folder of logs, or - for standard input"),
        (("none.log",), "none.log"),
        (("x" * 300,), "name too long"),
        (("x", "--rules", "no.yaml"), "no.yaml"),
    ],
)
def test_what_is_wrong_is_one_message(nvrx: Nvrx, arguments: tuple[str, ...], message: str) -> None:
    """The exit code is 2."""
    done = nvrx("analyze", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


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
    """A job without sources is explained too, by its logs."""
    result = nvrx("explain", JOB, "--folder", str(failed))
    assert result.returncode == 0
    assert "rank 2 on n1  logs/main-0/gen-0/cycle-0/rank-2.err:5" in result.stdout
    assert "No module named 'apex_9'" in result.stdout
    assert "STOP (asked just now)" in result.stdout
    assert "verdict   no source of attribution is configured" in result.stdout


def test_json_is_the_whole_of_it(failed: Path, nvrx: Nvrx) -> None:
    """One object has the inquiry, the answers and the decision."""
    told = json.loads(nvrx("explain", JOB, "--json", "--folder", str(failed)).stdout)
    assert (told["replica"], told["cycle"], told["inquiry"]["failed"]["rank"]) == ("main-0", 0, 2)
    assert told["answers"][0]["attribution"]["fault"] == "import_error"
    assert told["decided"]["action"] == "restart_replica"


def test_what_is_not_there_is_named(failed: Path, nvrx: Nvrx) -> None:
    """For a cycle or a job that did not fail, the message says which failures there are."""
    result = nvrx("explain", JOB, "--cycle", "7", "--folder", str(failed))
    assert result.returncode == 2
    assert f"no such failure in job {JOB}; it has: main-0 cycle 0" in result.stderr
    well = Recorder(plain_plan())
    well.join()
    write(failed, well, job="well")
    result = nvrx("explain", "well", "--folder", str(failed))
    assert (result.returncode, result.stderr) == (2, "nvrx-slurm: error: nothing has failed in job well\n")


def test_report_counts_the_failures_of_all_jobs(failed: Path, nvrx: Nvrx) -> None:
    """Without a verdict the precision is not known, and the report says so."""
    result = nvrx("attribution", "report", "--folder", str(failed))
    assert result.returncode == 0
    assert "failures            1" in result.stdout
    assert "precision           not known yet" in result.stdout


@pytest.mark.parametrize("command", ["report", "flush"])
def test_a_job_that_cannot_be_read_keeps_no_other_from_it(failed: Path, nvrx: Nvrx, command: str) -> None:
    """The job is named; if the command was asked about it, it is the error."""
    bad = failed / "bad"
    bad.mkdir(mode=0o700)
    (bad / "plan.json").write_text("garbage")
    result = nvrx("attribution", command, "--folder", str(failed))
    assert result.returncode == 0
    assert result.stderr.startswith("bad: ") and "plan.json" in result.stderr
    assert ("failures            1" in result.stdout) is (command == "report")
    if command == "report":
        told = json.loads(nvrx("attribution", "report", "--json", "--folder", str(failed)).stdout)
        assert (told["failures"], told["unreadable"][0][:5]) == (1, "bad: ")
    asked = nvrx("attribution", command, "bad", "--folder", str(failed))
    assert asked.returncode == 2 and "plan.json" in asked.stderr


def test_restarts_in_process_before_a_failure_are_shown(tmp_path: Path, nvrx: Nvrx) -> None:
    """The number of restarts in the failed cycle and the last one's cause are shown; in a job without a failure, only
    their number."""
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
