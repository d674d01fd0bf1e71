"""Job handles in Python: how jobs are found and queried."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import nvrx_slurm as nv
from nvrx_slurm.errors import UsageError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.journal.job_index import index_folder, record_job
from nvrx_slurm.report.jobs import find_job
from nvrx_slurm.report.presence import Presence
from nvrx_slurm.util.files import CLUSTER
from tests.unit.report.recorder import BEGIN, ended, plain_plan, to_first_cycle, with_one_recovery, write


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs in two folders; the current folder is a third one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for at, (base, job_id, recorded) in enumerate((("a", "old", ended()), ("b", "new", with_one_recovery()))):
        folder = write(tmp_path / base, recorded, job=job_id)
        record_job(folder.path)
        (entry,) = (each for each in index_folder().iterdir() if each.readlink() == folder.path)
        os.utime(entry, (at, at), follow_symlinks=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_jobs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is found by its id, or as the newest without one; `jobs` lists all, or those of one folder where it is
    named."""
    assert nv.job("old").folder == tmp_path / "a" / "old"
    assert nv.job().folder == nv.job("last").folder == tmp_path / "b" / "new"
    assert [job.job_id for job in nv.jobs()] == ["new", "old"]
    assert [job.job_id for job in nv.jobs(most=1)] == ["new"]
    assert [job.job_id for job in nv.jobs(folder=tmp_path / "a")] == ["old"]
    assert {job.cluster for job in nv.jobs()} == {"local"}
    monkeypatch.setenv("NVRX_SLURM_FOLDER", str(tmp_path / "a"))
    assert nv.job().job_id == "old"
    with pytest.raises(UsageError, match="no job 'new'"):
        nv.job("new")


def test_a_job_of_another_cluster_is_asked_for_there(tmp_path: Path) -> None:
    """A job of another cluster is queried there even if the user omits the cluster: a job of this cluster may have
    the same number."""
    folder = JobFolder(tmp_path / "a" / "5")
    folder.create()
    folder.write_plan(plain_plan())
    folder.write(CLUSTER, b"beta")
    record_job(folder.path)
    assert {nv.job(job_id).job_id for job_id in ("5", "last", "5;beta", None)} == {"5;beta"}
    assert nv.job("5;alpha").job_id == "5;alpha"
    assert nv.jobs(most=1)[0].job_id == "5;beta"
    asked: list[str] = []
    for reader in (JobFolder(folder.path), find_job(folder.path.parent, "5;alpha")):
        Presence(reader, slurm=asked.append).ask()
    assert asked == ["5;beta", "5;alpha"]


def test_a_cluster_that_is_none_is_an_error(tmp_path: Path) -> None:
    """An unknown cluster is an error, and does not mean this machine; nothing is submitted."""
    spec = nv.JobSpec(name="a", command=["true"])
    with pytest.raises(UsageError, match="cluster='locl': must be 'slurm' or 'local'"):
        nv.submit(spec, folder=tmp_path / "jobs", cluster="locl")  # type: ignore[arg-type]
    assert not (tmp_path / "jobs").exists()
    with pytest.raises(UsageError, match="locl"):
        nv.Job("1", cluster="locl")  # type: ignore[arg-type]


def test_a_job_that_slurm_has_forgotten_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that Slurm has forgotten is an error to cancel; once it has left its result there is nothing to cancel or
    to wait for."""
    for name, text in (
        ("squeue", "slurm_load_jobs error: Invalid job id specified"),
        ("sacct", "storage is disabled"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = write(tmp_path / "c", ended(), job="12", cluster="slurm")
    job = nv.Job("12", folder=folder.path.parent, cluster="slurm")
    with pytest.raises(UsageError, match="Slurm knows no job 12"):
        job.cancel()
    folder.write_result(Result(exit_code=0, reason="done", ended_at=BEGIN))
    job.cancel()
    assert job.wait_until_gone(timeout=5.0) is nv.JobState.COMPLETED


def test_a_job_returns_its_status() -> None:
    """`status` returns the object that `status --json` prints, as a typed value."""
    status = nv.job("new").status()
    assert (status.job, status.restarts, status.step) == ("new", 1, 76)
    assert [node.name for node in status.nodes][:2] == ["n0", "n1"]


def test_a_job_explains_why_it_failed(tmp_path: Path) -> None:
    """`explain` describes the last failure; in a job in which nothing failed it is an error."""
    report = nv.job("new").explain()
    assert (report.job, report.cycle, report.replica) == ("new", 0, "main-0")
    with pytest.raises(UsageError, match="it has: main-0 cycle 0"):
        nv.job("new").explain(cycle=7)
    with pytest.raises(UsageError, match="nothing has failed"):
        nv.job(write(tmp_path / "c", to_first_cycle(), job="third").job_id, folder=tmp_path / "c").explain()


def test_a_notebook_shows_the_jobs_page(tmp_path: Path) -> None:
    """Facts and tables; what comes from workers and files is escaped. A torn result is named, and raises nothing."""
    folder = write(tmp_path / "c", to_first_cycle(), job="third")
    folder.write_result(Result(exit_code=1, reason="<script>alert(1)</script>", ended_at=BEGIN))
    shown = nv.job("third", folder=tmp_path / "c")._repr_html_()
    assert "<table>" in shown
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    (folder.path / "result.json").write_text("{")
    assert "result.json" in nv.job("third", folder=tmp_path / "c")._repr_html_()


def test_the_error_of_a_wait_is_public() -> None:
    """A caller can catch the error by its public name."""
    assert nv.WaitTimeout is WaitTimeout


def test_goodput_recoveries_and_the_report() -> None:
    """Goodput and recoveries are typed records; the report shows itself in a notebook, in a frame of its own."""
    job = nv.job("old")
    goodput = job.goodput()
    assert sum(goodput.parts_us.values()) == goodput.total_us > 0
    assert goodput.hours("standby") > 0.0 and 0.0 < goodput.share("new_steps") < 1.0
    assert goodput.rank_hours == 2 * goodput.node_hours
    (recovery,) = job.recoveries()
    assert (recovery.replica, recovery.kind, recovery.steps_lost) == ("main-0", "node_lost", 5)
    shown = job.report()._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;')
    assert "<script" not in shown
    with pytest.raises(UsageError, match="no job 'gone'"):
        nv.Job("gone", cluster="local").goodput()


def test_recoveries_are_a_frame_of_pandas(tmp_path: Path) -> None:
    """One row for each recovery, one column of numbers for each phase; without a recovery the columns are the
    same."""
    pytest.importorskip("pandas")
    frame = nv.job("old").recoveries().frame()
    assert (frame.loc[0, "replica"], frame.loc[0, "steps_lost"], len(frame)) == ("main-0", 5, 1)
    assert frame["torn_down"].dtype == "float64" and frame["torn_down"].sum() > 0.0
    write(tmp_path / "c", to_first_cycle(), job="third")
    none = nv.job("third", folder=tmp_path / "c").recoveries().frame()
    assert list(none.columns) == list(frame.columns) and none["total_s"].sum() == 0


def test_a_frame_without_pandas_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError):
        nv.job("old").recoveries().frame()


def test_what_only_a_task_of_an_array_has_names_the_task_that_failed(tmp_path: Path) -> None:
    """An array as a whole is an error that names the failed task: an empty answer would say that nothing was printed
    or has failed."""
    for task, exit_code in (("17_0", 0), ("17_1", 1)):
        folder = write(tmp_path, ended(), job=task)
        folder.write_result(Result(exit_code=exit_code, reason="done", ended_at=BEGIN))
    array = JobFolder(tmp_path / "17")
    array.create()
    array.write("plan.json", (tmp_path / "17_1" / "plan.json").read_bytes())
    job = nv.Job("17", folder=tmp_path, cluster="slurm")
    for ask in (job.logs, job.events, job.explain, job.goodput, job.recoveries):
        with pytest.raises(UsageError, match="such as 17_1"):
            ask()
