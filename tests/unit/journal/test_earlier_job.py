"""Slurm reuses a job id: the first job's folder is renamed, unless that job may still run."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import CLOCKS_DIFFER_S, JobFolder, JobInfo, Result, set_earlier_job_aside

BEGAN = 1764054000.0
ASIDE = "7-20251125T070000Z"
NO_PROCESS = 0
HERE = JobInfo(
    job_id="7", name="train", cluster="slurm", started_at=BEGAN, host=socket.gethostname(), host_pid=NO_PROCESS
)
ELSEWHERE = msgspec.structs.replace(HERE, host="elsewhere")
DONE = Result(exit_code=0, reason="done", ended_at=BEGAN + 60)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder(tmp_path / "7")
    folder.create()
    return folder


def test_the_folder_of_a_job_that_has_ended_is_renamed(folder: JobFolder) -> None:
    """It keeps its contents under another name, and its old name is free."""
    folder.write_info(ELSEWHERE)
    folder.write_result(DONE)
    assert set_earlier_job_aside(folder) == folder.path.with_name(ASIDE)
    assert not folder.path.exists()
    assert JobFolder(folder.path.with_name(ASIDE)).read_result() == DONE


def test_a_job_that_was_killed_here_has_ended(folder: JobFolder) -> None:
    """It left no result, and no process of this machine is its batch host."""
    folder.write_info(HERE)
    assert set_earlier_job_aside(folder) == folder.path.with_name(ASIDE)


@pytest.mark.parametrize("info", [ELSEWHERE, msgspec.structs.replace(HERE, host_pid=os.getpid(), started_at=4e9)])
def test_a_job_that_may_still_run_keeps_its_folder(folder: JobFolder, info: JobInfo) -> None:
    """For example a job of another cluster on the same file system, or one whose batch host is alive."""
    folder.write_info(info)
    with pytest.raises(UsageError, match="belongs to another job 7"):
        set_earlier_job_aside(folder)
    assert folder.read_info() == info


@pytest.mark.parametrize(("info", "slack_s"), [(HERE, 0.0), (ELSEWHERE, CLOCKS_DIFFER_S)])
def test_a_job_that_began_since_is_the_new_one(folder: JobFolder, info: JobInfo, slack_s: float) -> None:
    """When sbatch returns, the new job may have begun already; the clock of another host may be behind."""
    folder.write_info(info)
    folder.write_result(DONE)
    assert set_earlier_job_aside(folder, begun_before=BEGAN + slack_s) is None
    assert set_earlier_job_aside(folder, begun_before=BEGAN + slack_s + 1) is not None


def test_nothing_happens_where_no_job_has_begun(folder: JobFolder) -> None:
    """A folder with nothing but a plan was written by the submitter, and is kept."""
    assert set_earlier_job_aside(folder) is None
    assert folder.path.exists()


def test_the_second_of_two_leaves_the_new_folder_alone(folder: JobFolder) -> None:
    """Two processes do this at once: the first renames the folder after the second has looked at it and before it
    renames."""
    folder.write_info(HERE)
    folder.write_result(DONE)
    first = JobFolder(folder.path)

    class Overtaken(JobFolder):
        def read_result(self) -> Result | None:
            result = super().read_result()
            assert set_earlier_job_aside(first) is not None
            first.create()
            first.write_info(msgspec.structs.replace(HERE, name="new"))
            return result

    assert set_earlier_job_aside(Overtaken(folder.path)) is None
    info = first.read_info()
    assert info is not None and info.name == "new"
