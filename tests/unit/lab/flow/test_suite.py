"""An attempt's process, from the point of view of the run that started it."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from nvrx_slurm.errors import EXIT_FAILED, EXIT_USAGE, UsageError
from nvrx_slurm.lab.flow.artifacts import Artifacts, AttemptFolder, AttemptSpec, check_over, default_folder
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.outcome import FlowAttempt
from nvrx_slurm.lab.flow.suite import AttemptProcess, SuiteOptions, _Suite
from nvrx_slurm.util.clock import SystemClock

DEAF = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
def stands_here():
    while True: signal.pause()
stands_here()
"""


async def launched(folder: Path, lines: str) -> tuple[AttemptProcess, Process]:
    process = await asyncio.create_subprocess_exec("python3", "-Sc", lines, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    return AttemptProcess(AttemptFolder(folder), process, SystemClock()), process


async def test_attempt_that_hangs_prints_its_stacks_and_is_killed(tmp_path):
    """After its bound it is asked for its stacks, then to end, then killed; the report has the bound."""
    hung, process = await launched(tmp_path, DEAF)
    await hung.ended(0.1, patience_s=0.1)
    assert process.returncode == -signal.SIGKILL
    assert process.stderr is not None and b"stands_here" in await process.stderr.read()
    assert "did not end within 100ms" in hung.why_unreported


@pytest.mark.parametrize(
    ("end", "said"), [("os.kill(os.getpid(), 9)", "was killed by SIGKILL"), ("os._exit(3)", "exited with code 3")]
)
async def test_attempt_that_ends_without_an_outcome_is_reported_by_its_end(tmp_path, end, said):
    """The report has the signal's name or the exit code."""
    gone, _ = await launched(tmp_path, f"import os\nprint(flush=True)\n{end}")
    await gone.ended(10.0, patience_s=0.1)
    assert said in gone.why_unreported


def test_artifacts_of_two_runs_do_not_mix(tmp_path):
    """A folder with another run is refused; one that a run has swept can be used again."""
    first = Artifacts(tmp_path / "a")
    first.create()
    with pytest.raises(UsageError, match="holds another run"):
        Artifacts(tmp_path / "a").create()
    first.sweep()
    assert not (tmp_path / "a").exists()


def test_two_runs_that_begin_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    """So has a third run; if no folder can be made, `create` raises an error."""
    monkeypatch.chdir(tmp_path)
    folders = [Artifacts(default_folder(0.0)) for _ in range(3)]
    for folder in folders:
        folder.create()
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        folder.sweep()
    Path("nvrx-ci").rmdir()
    Path("nvrx-ci").touch()
    with pytest.raises(UsageError):
        Artifacts(default_folder(0.0)).create()


def test_a_run_that_goes_on_is_known_from_outside(tmp_path):
    """While the run's process lives, its folder names the process; later, or without a folder, there is no error."""
    check_over(tmp_path / "a")
    run = Artifacts(tmp_path / "a")
    run.create()
    with pytest.raises(UsageError, match=f"kill {os.getpid()}"):
        check_over(tmp_path / "a")
    run.sweep()
    check_over(tmp_path / "a")


def test_artifacts_of_a_failed_run_are_not_mixed_with_others(tmp_path):
    """Artifacts of an attempt that did not pass are kept: a second run in that folder is refused before anything
    starts."""
    (tmp_path / "a" / "flow" / "attempt-1").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds another run already; name another folder"):
        Artifacts(tmp_path / "a").create()


def test_artifacts_folder_that_cannot_be_made_is_a_usage_error(tmp_path):
    """A file is in the place of its parent folder."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        Artifacts(tmp_path / "file" / "a").create()


def test_artifacts_folder_that_is_not_utf_8_is_a_usage_error(tmp_path):
    """No specification of an attempt could name the folder."""
    with pytest.raises(UsageError, match="is not UTF-8"):
        Artifacts(tmp_path / os.fsdecode(b"\xff")).create()
    assert not list(tmp_path.iterdir())


def test_outcome_and_specification_are_read_back_from_their_files(tmp_path):
    """The run reads what an attempt writes; before that there is no outcome."""
    folder = Artifacts(tmp_path).attempt("flow", 2)
    spec = AttemptSpec(flow="f.yaml", stage="dev", number=2, lease="l", parent=os.getpid())
    folder.create(spec)
    assert folder.read_spec() == spec
    assert folder.read_outcome() is None
    attempt = FlowAttempt(number=2, verdict="failed", began_at=1.0, took_s=2.0)
    folder.write_outcome(attempt)
    assert folder.read_outcome() == attempt


async def test_a_run_of_no_flow_is_not_a_good_one(tmp_path, write):
    """All flows are left out on this stage: the exit code is that of a usage error."""
    flow = load_flow(write("job: job.yaml\nexpect: [job_ended]\non: slurm\n"))
    artifacts = Artifacts(tmp_path / "a")
    artifacts.create()
    options = SuiteOptions(stage="local", artifacts=artifacts.path)
    outcome = await _Suite(options, artifacts, lambda _: None, SystemClock()).run([flow])
    artifacts.sweep()
    assert (outcome.exit_code, outcome.flows[0].status) == (EXIT_USAGE, "left_out")


async def test_attempt_that_cannot_begin_is_broken(tmp_path, write):
    """Its folder cannot be made: the report has the reason, and the run goes on."""
    flow = load_flow(write("job: job.yaml\nexpect: [job_ended]\non: local\n"))
    artifacts = Artifacts(tmp_path / "a")
    artifacts.create()
    (artifacts.path / flow.name).touch()
    options = SuiteOptions(stage="local", artifacts=artifacts.path)
    outcome = await _Suite(options, artifacts, lambda _: None, SystemClock()).run([flow])
    artifacts.sweep()
    assert (outcome.exit_code, outcome.flows[0].status) == (EXIT_FAILED, "broken")
    assert "could not begin" in outcome.flows[0].attempts[0].findings[0].message
