"""The link to a job's log that `output` asks for."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from nvrx_slurm.batch.__main__ import _link_log
from nvrx_slurm.journal.folder import JobFolder


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "jobs" / "12")
    made.create()
    made.job_log.write_text("hello\n")
    return made


def test_sbatchs_patterns_stand_for_the_job(folder: JobFolder, tmp_path: Path) -> None:
    """The link's folder is created, and the link leads to the log."""
    _link_log(f"{tmp_path}/new/%x-%j-%u-100%%.out", folder, "train")
    assert (tmp_path / "new" / f"train-12-{pwd.getpwuid(os.getuid()).pw_name}-100%.out").read_text() == "hello\n"


def test_a_user_without_a_name_is_a_number(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the user may have no name."""

    def nameless(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    _link_log(f"{tmp_path}/%u.out", folder, "train")
    assert (tmp_path / f"{os.getuid()}.out").read_text() == "hello\n"


def test_an_older_jobs_link_is_replaced_and_nothing_else(
    folder: JobFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, a link to another file and a folder are kept, and the job's log says so; the job goes on."""
    older, mine, elsewhere = tmp_path / "older.out", tmp_path / "mine.out", tmp_path / "elsewhere.out"
    older.symlink_to(tmp_path / "jobs" / "11" / "job.log")
    mine.write_text("mine\n")
    elsewhere.symlink_to(mine)
    for link in (older, mine, elsewhere, tmp_path):
        _link_log(str(link), folder, "train")
    assert older.readlink() == folder.job_log
    assert (mine.read_text(), elsewhere.readlink()) == ("mine\n", mine)
    assert capsys.readouterr().out.count("no link to the log is made there: File exists") == 3
