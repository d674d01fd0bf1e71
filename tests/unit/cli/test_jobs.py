"""`nvrx-slurm ls` and `rm`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.journal.job_index import index_folder, record_job
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.processes import boot_id, started_ticks
from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import ended, with_one_recovery, write

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def ended_job(base: Path, job_id: str, *, days_ago: float = 0.0) -> JobFolder:
    """A job in the index that ended `days_ago`."""
    folder = write(base, ended(), job=job_id)
    at = SystemClock().wall() - days_ago * DAY_S
    folder.write_result(Result(exit_code=0, reason="done", ended_at=at))
    record_job(folder.path)
    for entry in index_folder().iterdir():
        if entry.readlink() == folder.path:
            os.utime(entry, (at, at), follow_symlinks=False)
    return folder


def running_job(base: Path, job_id: str) -> JobFolder:
    """A local job whose batch host is this process."""
    folder = write(base, with_one_recovery(), job=job_id)
    pid = os.getpid()
    folder.write_info(
        JobInfo(
            job_id=job_id,
            name="digits",
            cluster="local",
            started_at=SystemClock().wall(),
            host=socket.gethostname(),
            host_pid=pid,
            host_began=started_ticks(pid),
            host_boot=boot_id(),
        )
    )
    record_job(folder.path)
    return folder


def test_ls_lists_the_jobs_of_all_folders(nvrx: Nvrx, tmp_path: Path) -> None:
    """The newest is first, each with its folder; -n, --live and --folder choose among them."""
    ended_job(tmp_path / "a", "old", days_ago=3)
    ended_job(tmp_path / "b", "newer", days_ago=1)
    running_job(tmp_path / "c", "local-1")
    shown = json.loads(nvrx("ls", "--json").stdout)["jobs"]
    assert [(job["job"], job["state"]) for job in shown] == [
        ("local-1", "running"),
        ("newer", "completed"),
        ("old", "completed"),
    ]
    assert [job["folder"] for job in shown][1] == str(tmp_path / "b" / "newer")
    table = nvrx("ls", "-n", "2")
    assert [line.split()[0] for line in table.stdout.splitlines()] == ["JOB", "local-1", "newer"]
    assert "--all" in table.stderr
    assert nvrx("ls", "-n", "3").stderr == ""
    assert [job["job"] for job in json.loads(nvrx("ls", "--live", "--json").stdout)["jobs"]] == ["local-1"]
    assert [line.split()[0] for line in nvrx("ls", "--folder=a").stdout.splitlines()] == ["JOB", "old"]


def test_a_requeued_job_has_not_ended(nvrx: Nvrx, tmp_path: Path) -> None:
    """Its last generation left the result 75, and Slurm has it in the queue. Another such job, which Slurm has
    forgotten, is lost."""
    for job_id in ("17", "18"):
        folder = write(tmp_path, ended(), job=job_id, cluster="slurm")
        folder.write_result(Result(exit_code=75, reason="preempted", ended_at=SystemClock().wall()))
        folder.events_path.write_text(
            folder.events_path.read_text()
            + '{"n":900,"t":9e9,"event":"job_ended","exit_code":75,"reason":"preempted"}\n'
        )
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text('#!/bin/sh\ncase "$*" in *"%i|%T"*) echo "17|PENDING" ;; esac\n')
    squeue.chmod(0o755)
    path = f"{squeue.parent}:{env.search_path()}"
    shown = json.loads(nvrx("ls", "--live", "--json", "--folder=.", PATH=path).stdout)["jobs"]
    assert [(job["job"], job["state"]) for job in shown] == [("17", "pending")]
    exposed = nvrx("metrics", "17", "18", "--folder=.", PATH=path).stdout.splitlines()
    states = [line for line in exposed if line.startswith("nvrx_job_state{") and line.endswith(" 1.0")]
    assert [line.partition("{")[2].partition("}")[0] for line in states] == [
        'job_id="17",state="pending"',
        'job_id="18",state="lost"',
    ]
    assert [line for line in exposed if line.startswith("nvrx_job_exit_code{")] == [
        'nvrx_job_exit_code{job_id="18"} 75.0'
    ]


@pytest.mark.parametrize("name", ["result.json", "job.json", "plan.json"])
def test_ls_lists_a_job_that_cannot_be_read_and_all_others(nvrx: Nvrx, tmp_path: Path, name: str) -> None:
    """One line says what is wrong with it, and what to do; `rm --expired` leaves it alone."""
    ended_job(tmp_path, "whole", days_ago=1)
    damaged = running_job(tmp_path, "damaged").path / name
    damaged.write_text("{")
    for command in (("ls",), ("status", "--folder", str(tmp_path))):
        shown = json.loads(nvrx(*command, "--json").stdout)["jobs"]
        assert {job["job"]: job["state"] for job in shown} == {"damaged": "unreadable", "whole": "completed"}
        (line,) = nvrx(*command).stderr.splitlines()
        assert line.startswith("damaged: ") and str(damaged) in line and "restore the file" in line
    assert nvrx("rm", "--expired", "--days", "1", "--dry-run").returncode == 0


def test_a_journal_that_cannot_be_read_hides_no_other_job(nvrx: Nvrx, tmp_path: Path) -> None:
    """`ls` lists it, and `metrics` and `report --since` leave it out."""
    ended_job(tmp_path, "whole", days_ago=1)
    damaged = ended_job(tmp_path, "damaged", days_ago=1)
    damaged.events_path.unlink()
    damaged.events_path.mkdir()
    shown = json.loads(nvrx("ls", "--json").stdout)["jobs"]
    assert {job["job"]: job["state"] for job in shown} == {"damaged": "unreadable", "whole": "completed"}
    metrics = nvrx("metrics", "damaged", "whole", "--folder", str(tmp_path))
    assert metrics.returncode == 0
    assert 'job_id="whole"' in metrics.stdout and 'job_id="damaged"' not in metrics.stdout
    assert nvrx("report", "--since", "3d", "--folder", str(tmp_path), "-o", "fleet.html").returncode == 0


def test_a_folder_that_others_can_write_to_hides_no_other_job(nvrx: Nvrx, tmp_path: Path) -> None:
    """Nor does an ended job whose records cannot be read keep `rm --expired` from removing the others."""
    for name in ("whole", "open", "damaged"):
        ended_job(tmp_path, name, days_ago=2)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "damaged" / "job.json").write_text("{")
    shown = json.loads(nvrx("ls", "--json").stdout)["jobs"]
    states = {"whole": "completed", "open": "unreadable", "damaged": "unreadable"}
    assert {job["job"]: job["state"] for job in shown} == states
    removed = nvrx("rm", "--expired", "--days", "1")
    assert (removed.returncode, removed.stdout.split()[0]) == (2, "whole")
    assert "damaged is kept: " in removed.stderr and "--force removes it" in removed.stderr
    assert nvrx("rm", "damaged", "--force").returncode == 0


def test_what_one_asks_of_an_array_names_the_task_that_failed(nvrx: Nvrx, tmp_path: Path) -> None:
    """The array as a whole has no journal, no logs and no workers."""
    array = JobFolder(tmp_path / "17")
    write(tmp_path, ended(), job="17_0").write_result(Result(exit_code=0, reason="", ended_at=0.0))
    failed = write(tmp_path, ended(), job="17_1")
    failed.write_result(Result(exit_code=1, reason="", ended_at=0.0))
    array.create()
    array.write("plan.json", (failed.path / "plan.json").read_bytes())
    for command in ("explain", "logs", "events"):
        told = nvrx(command, "17", "--folder", str(tmp_path))
        assert told.returncode == 2
        assert f"nvrx-slurm {command} 17_1" in told.stderr
    told = nvrx("restart", "17", "--folder", str(tmp_path))
    assert told.returncode == 2
    assert "17_1" in told.stderr


def test_rm_removes_an_ended_job_and_no_other(nvrx: Nvrx, tmp_path: Path) -> None:
    """Its folder with all contents and its index entry are removed; a running job is kept, even with --force."""
    gone, running = ended_job(tmp_path / "a", "gone"), running_job(tmp_path / "c", "local-1")
    (gone.path / "more").mkdir()
    (gone.path / "more" / "link").symlink_to(tmp_path / "c")
    (tmp_path / "a" / "slurm-gone.out").write_text("")
    assert nvrx("rm", "gone", "--dry-run").returncode == 0
    assert gone.path.is_dir()
    done = nvrx("rm", "gone", "local-1", "--force")
    assert done.returncode == 2
    assert "local-1 is kept: it still runs" in done.stderr
    assert list((tmp_path / "a").iterdir()) == []
    assert running.plan_path.is_file()
    assert [entry.readlink() for entry in index_folder().iterdir()] == [running.path]
    assert nvrx("rm").returncode == 2, "never the newest without a word"


def test_a_job_of_which_nothing_says_that_it_ended_is_removed_by_force_only(nvrx: Nvrx, tmp_path: Path) -> None:
    """Without Slurm nothing says whether the job has ended."""
    folder = write(tmp_path / "nvrx-jobs", with_one_recovery(), job="17", cluster="slurm")
    kept = nvrx("rm", "17", PATH="/nowhere")
    assert (kept.returncode, folder.path.is_dir()) == (2, True)
    assert "Slurm does not say" in kept.stderr
    assert nvrx("rm", "17", "--force", PATH="/nowhere").returncode == 0
    assert not folder.path.exists()


def test_the_retention_of_the_site_file_says_what_has_expired(nvrx: Nvrx, tmp_path: Path) -> None:
    """Jobs that ended long enough ago are removed, except the newest; flags take precedence, and without either
    nothing is removed."""
    folders = [ended_job(tmp_path / base, base, days_ago=days) for base, days in (("a", 40), ("b", 20), ("c", 3))]
    running = running_job(tmp_path / "d", "local-1")
    assert nvrx("rm", "--expired").returncode == 2
    site = tmp_path / "xdg" / "nvrx-slurm" / "config.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("retention: {days: 10, keep: 3}\n")
    dry = nvrx("rm", "--expired", "--dry-run")
    assert [line.split()[0] for line in dry.stdout.splitlines()] == ["a"]
    assert all(folder.path.is_dir() for folder in folders)
    assert nvrx("rm", "--expired").returncode == 0
    assert [folder.path.is_dir() for folder in folders] == [False, True, True]
    assert nvrx("rm", "--expired", "--keep=1", "--days=10").returncode == 0
    assert [folder.path.is_dir() for folder in folders] == [False, False, True]
    assert running.path.is_dir()
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    assert nvrx("config", "show").returncode == 0, "jobs read the same site file"
