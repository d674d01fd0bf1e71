"""Before a fault is injected into a process, the stage proves that the process belongs to the job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.lab.flow.stages import processes
from nvrx_slurm.lab.flow.stages.processes import Act, FaultAction, apply
from nvrx_slurm.util.clock import Clock, SystemClock


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the job whose folder is `tmp_path`."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "NVRX_JOB_FOLDER": str(tmp_path)})
    yield process
    process.kill()
    process.wait()


def test_process_that_loads_its_program_is_of_the_job_all_the_same(tmp_path: Path) -> None:
    """During execve the environment that identifies it cannot be read; this process calls execve again and again."""
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o700)
    with subprocess.Popen([script], env={**os.environ, "NVRX_JOB_FOLDER": str(tmp_path)}) as again:
        action = FaultAction(act="continue", who="it", pids=(again.pid,), folder=str(tmp_path))
        try:
            for _ in range(50):
                with pytest.raises(FaultFailed, match="it is not stopped"):  # not: it has ended already
                    apply(action, SystemClock())
        finally:
            again.kill()


@pytest.mark.parametrize("is_held", [True, False])
def test_process_that_ends_by_itself_just_before_the_kill_is_no_fault(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """It is found alive, and has been reaped when its pid is opened (`is_held`: right after that)."""
    hold = os.pidfd_open

    def ends(pid: int) -> int:
        handle = hold(pid) if is_held else None
        sleeper.kill()
        sleeper.wait()
        return hold(pid) if handle is None else handle

    monkeypatch.setattr(os, "pidfd_open", ends)
    action = FaultAction(act="kill", who="rank 0", pids=(sleeper.pid,), folder=str(tmp_path))
    with pytest.raises(FaultFailed, match="rank 0 has ended already"):
        apply(action, SystemClock())


@pytest.mark.parametrize("act", ["stop", "signal", "kill"])
def test_process_that_ends_once_it_is_proven_to_be_of_the_job_gets_no_fault(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    """The proof before each fault would not hold for a process that has ended."""
    proves = processes._proves_to_be_of_job

    def ends(pid: int, folder: str, clock: Clock) -> bool:
        is_of_job = proves(pid, folder, clock)
        sleeper.kill()
        sleeper.wait()
        return is_of_job

    monkeypatch.setattr(processes, "_proves_to_be_of_job", ends)
    action = FaultAction(act=act, who="rank 0", pids=(sleeper.pid,), folder=str(tmp_path))
    with pytest.raises(FaultFailed, match="rank 0 has ended already"):
        apply(action, SystemClock())
