"""The index of a user's jobs: real folders and links, real processes that submit at once."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.errors import UnsafePath, UsageError
from nvrx_slurm.journal.job_index import forget_job, index_folder, indexed_jobs, record_job
from nvrx_slurm.report.jobs import base_of, my_jobs, newest_job
from tests.unit.report.recorder import ended, write


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of its own, and no jobs in the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def submitted(base: Path, job_id: str, *, at: float | None = None) -> Path:
    """A submitted job, entered in the index at the time `at`."""
    folder = write(base, ended(), job=job_id).path
    record_job(folder)
    if at is not None:
        (entry,) = (each for each in index_folder().iterdir() if each.readlink() == folder)
        os.utime(entry, (at, at), follow_symlinks=False)
    return folder


def test_the_newest_job_is_the_one_submitted_last(tmp_path: Path) -> None:
    """This holds in any current folder and for any order of ids; submitting an id again makes it the newest."""
    submitted(tmp_path / "a", "9", at=100.0)
    submitted(tmp_path / "b", "10", at=200.0)
    submitted(tmp_path / "c", "11", at=50.0)
    assert [job.job_id for job in my_jobs()] == ["10", "9", "11"]
    assert newest_job().path == tmp_path / "b" / "10"
    assert newest_job(tmp_path / "a").path == tmp_path / "a" / "9"
    submitted(tmp_path / "c", "11")
    assert newest_job().path == tmp_path / "c" / "11"
    record_job(tmp_path / "a" / "9", is_new=False)  # a later start of the job: no submission
    assert newest_job().path == tmp_path / "c" / "11"


def test_jobs_of_the_folder_here_count_without_an_entry(tmp_path: Path) -> None:
    """Older versions made no entries in the index."""
    submitted(tmp_path / "a", "9", at=100.0)
    write(Path("nvrx-jobs"), ended(), job="7")
    assert newest_job().path == Path("nvrx-jobs/7").absolute()


def test_a_job_is_found_by_its_id_from_any_folder(tmp_path: Path) -> None:
    """A job below the current folder comes first; an id that several folders have is an error that names the
    folders."""
    submitted(tmp_path / "a", "9")
    assert base_of("9") == tmp_path / "a"
    assert base_of("9;cluster") == tmp_path / "a"
    assert base_of("8") == Path("nvrx-jobs")
    submitted(tmp_path / "b", "9")
    with pytest.raises(UsageError, match=r"there are 2 jobs 9, in .*/b, .*/a; --folder"):
        base_of("9")
    write(Path("nvrx-jobs"), ended(), job="9")
    assert base_of("9") == Path("nvrx-jobs")


def test_a_removed_job_leaves_the_index(tmp_path: Path) -> None:
    """A reader removes its entry; the entry of a job on a file system that is not mounted stays."""
    shutil.rmtree(submitted(tmp_path / "a", "9"))
    away = submitted(tmp_path / "scratch", "10")
    (tmp_path / "scratch").rename(tmp_path / "unmounted")
    assert list(my_jobs()) == []
    assert [each.folder for each in indexed_jobs()] == [away]
    (tmp_path / "unmounted").rename(tmp_path / "scratch")
    assert newest_job().path == away
    forget_job(away)
    with pytest.raises(UsageError, match="there is no job yet"):
        newest_job()


def test_many_processes_enter_jobs_at_once(tmp_path: Path) -> None:
    """Each entry is made once, and a concurrent reader sees only whole entries."""
    program = (
        "import sys; from pathlib import Path; from nvrx_slurm.journal.job_index import record_job\n"
        "sys.stdin.readline()\n"
        "base = Path(sys.argv[1])\n"
        "for n in range(50): record_job(base / f'{sys.argv[2]}_{n}'); record_job(base / 'one')"
    )
    base = tmp_path / "base"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(base), str(p)], stdin=subprocess.PIPE) for p in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # all start at once
    while any(process.poll() is None for process in processes):
        assert {each.folder.parent for each in indexed_jobs()} <= {base}
    assert {process.wait() for process in processes} == {0}
    assert sorted(each.job_id for each in indexed_jobs()) == sorted(
        ["one", *(f"{p}_{n}" for p in range(4) for n in range(50))]
    )
    assert not [each for each in index_folder().iterdir() if each.name.startswith(".")]


def test_the_index_is_its_owners_alone(tmp_path: Path) -> None:
    """Its mode is 0700; if others could write to it, it is neither read nor written."""
    submitted(tmp_path / "a", "9")
    assert stat.S_IMODE(index_folder().stat().st_mode) == 0o700
    index_folder().chmod(0o777)
    with pytest.raises(UnsafePath):
        indexed_jobs()
    submitted(tmp_path / "a", "10")
    assert list(my_jobs()) == []
    index_folder().chmod(0o700)
    assert [each.job_id for each in indexed_jobs()] == ["9"]


@pytest.mark.parametrize("home", ["/proc/nowhere", "/dev/null"])
def test_a_home_that_cannot_be_written_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """The job is then found only by its folder."""
    monkeypatch.setenv("XDG_STATE_HOME", home)
    folder = submitted(tmp_path / "a", "9")
    forget_job(folder)
    assert newest_job(tmp_path / "a").path == folder
    with pytest.raises(UsageError, match="--folder"):
        newest_job()


def test_what_is_no_entry_is_ignored(tmp_path: Path) -> None:
    """A file, a link with another name, and a link to a relative path are ignored."""
    submitted(tmp_path / "a", "9")
    (index_folder() / "8@0").write_text("")
    (index_folder() / "7@0").symlink_to(tmp_path / "a" / "9")
    (index_folder() / "6@0").symlink_to("6")
    assert [each.job_id for each in indexed_jobs()] == ["9"]
