"""What an agent asks of Slurm once the batch host is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.agent import __main__ as agent
from nvrx_slurm.errors import EXIT_UNREACHABLE
from nvrx_slurm.journal.folder import JobFolder, JobInfo

# The last task of an array has the array's own job id: `scontrol requeue 7` restarts every task, even one that was
# cancelled (seen on 22.05.8).
LAST_TASK = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
OUTSIDE = """
from nvrx_slurm.agent.inside import _stay_outside, requeue_from_inside
print(requeue_from_inside("unused", _stay_outside()))
"""


@pytest.fixture
def in_the_last_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of an array's last task. Its scontrol ends the process that calls it, as Slurm does on a
    requeue, and writes its arguments to the file that is returned."""
    asked = tmp_path / "asked"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\nkill -TERM $PPID\necho "$@" >> {asked}\n')
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:/usr/bin:/bin")
    for name, value in LAST_TASK.items():
        monkeypatch.setenv(name, value)
    return asked


@pytest.fixture
def leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[JobFolder], None]:
    """A function that runs an agent of the job in a folder until it leaves because its batch host is gone."""

    async def batch_host_is_gone(*_: object) -> int:
        return EXIT_UNREACHABLE

    for name in ("set_up", "raise_descriptor_limit"):
        monkeypatch.setattr(agent, name, lambda *_, **__: None)
    monkeypatch.setattr(agent, "_serve", batch_host_is_gone)
    monkeypatch.setenv("NVRX_NODE", "n1")

    def leave(folder: JobFolder) -> None:
        folder.path.mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setenv("NVRX_JOB_FOLDER", str(folder.path))
        assert agent.main() == EXIT_UNREACHABLE

    return leave


def test_agent_of_an_array_requeues_its_own_task_alone(in_the_last_task, tmp_path, leave):
    """The agent requeues its own task only: the other tasks run on, and cancelled ones stay cancelled."""
    leave(JobFolder(tmp_path / "7_3"))
    assert in_the_last_task.read_text() == "requeue 7_3\n"


def test_agent_of_a_local_job_does_not_requeue_the_job_around_it(in_the_last_task, tmp_path, leave):
    """An agent of a local job does not requeue the Slurm job in which a user started it, such as a batch script with
    `run --here` or a CI runner."""
    folder = JobFolder(tmp_path / "local")
    folder.create()
    folder.write_info(JobInfo(job_id="local", name="digits", cluster="local", started_at=0.0))
    leave(folder)
    assert not in_the_last_task.exists()


def test_the_process_outside_of_its_container_requeues_that_task_too(in_the_last_task):
    """The process that stays outside of the agent's container requeues the same task, which it finds by the same
    variables."""
    done = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, in_the_last_task.read_text()) == ("scontrol: done\n", "requeue 7_3\n")
