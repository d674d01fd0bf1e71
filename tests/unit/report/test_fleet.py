"""Many jobs on one page: their journals, each read once, are summed up."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import JobInfo, Result
from nvrx_slurm.journal.records import Entry, SlurmNodeState, entry_to_json
from nvrx_slurm.report import fleet as fleets
from nvrx_slurm.report.fleet import Fleet, cache_path, read_fleet
from nvrx_slurm.report.web.fleet_page import fleet_page
from nvrx_slurm.util.processes import boot_id, started_ticks
from tests.jobs import HOSTILE, eventful
from tests.still_clock import StillClock
from tests.unit.report.recorder import BEGIN, ended, with_one_recovery, write


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three jobs: one with three failures, one with one failure, one without a journal; with a cache folder of their
    own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [write(tmp_path / "jobs", eventful(), job="1"), write(tmp_path / "jobs", ended(), job="2")]
    folders.append(write(tmp_path / "jobs", ended(), job="3"))
    folders[2].events_path.unlink()
    return folders


def test_jobs_are_added_up(jobs) -> None:
    """Failures are summed by cause and node, with repairs and the time of all nodes; a job without a journal is left
    out."""
    fleet = read_fleet(jobs, since=BEGIN)
    assert [job.job for job in fleet.jobs] == ["1", "2"]
    assert {kind: repair.count for kind, repair in fleet.by_kind.items()} == {
        "node_lost": 2,
        "worker_error": 1,
        "worker_hung": 1,
    }
    assert fleet.by_node["n2"].count == 2
    assert fleet.evidence == {"n2": 2}
    busy_s = sum(sum(job.busy_us.values()) for job in fleet.jobs) / 1e6
    assert fleet.everything.between_node_s == pytest.approx(busy_s / 4)
    assert fleet.everything.mean_s == pytest.approx((3.172 + 6.0 + 7.38 + 0.975) / 4, abs=0.2)
    assert sum(fleet.by_hour) == 4
    assert fleet.goodput.total_us == sum(fleet.goodput.parts_us.values())
    assert len(fleet.by_phase["torn_down"]) == 4


def test_what_was_read_is_not_read_again(jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a job whose journal has grown is read again; the result is that of a first reading."""
    first = read_fleet(jobs, since=BEGIN)
    read: list[str] = []
    summarise = fleets.summarise

    def noted(folder):
        read.append(folder.job_id)
        return summarise(folder)

    monkeypatch.setattr(fleets, "summarise", noted)
    assert read_fleet(jobs, since=BEGIN) == first
    assert read == []
    with jobs[0].events_path.open("ab") as file:
        record = SlurmNodeState(node="n2", state="DOWN")
        file.write(entry_to_json(Entry(n=9999, t=1790000400.0, record=record)) + b"\n")
    assert read_fleet(jobs, since=BEGIN).jobs[0].ended == 1790000400.0
    assert read == ["1"]


def test_a_job_that_runs_counts_up_to_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job counts up to now at each look, however old its last entry. A job that may have died counts up to
    its last entry, and one whose batch host was killed up to the end in its result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recorder, pid = with_one_recovery(), os.getpid()
    folders = [write(tmp_path / "jobs", recorder, job=job) for job in ("runs", "unknown", "killed")]
    folders[0].write_info(
        JobInfo(
            job_id="runs",
            name="digits",
            cluster="local",
            started_at=BEGIN,
            host=socket.gethostname(),
            host_pid=pid,
            host_began=started_ticks(pid),
            host_boot=boot_id(),
        )
    )
    folders[2].write_result(Result(exit_code=75, reason="batch host killed", ended_at=recorder.now + 600.0))
    for folder in folders[:2]:
        os.utime(folder.events_path, (recorder.now, recorder.now))
    for later_s in (86400.0, 90000.0):
        clock = StillClock(recorder.now + later_s)
        fleet = read_fleet(folders, since=BEGIN, clock=clock)
        ends = {job.job: job.ended - recorder.now for job in fleet.jobs}
        assert ends == {"runs": later_s, "unknown": 0.0, "killed": 600.0}
        total_s = {job.job: job.goodput.total_us / 1e6 for job in fleet.jobs}
        more_s = (total_s["runs"] - total_s["unknown"], total_s["killed"] - total_s["unknown"])
        assert more_s == pytest.approx((6 * later_s, 6 * 600.0))  # of six nodes
        (recent,) = read_fleet(folders[:2], since=recorder.now + 3600.0, clock=clock).jobs
        assert (recent.job, recent.exit_code) == ("runs", None)


@pytest.mark.parametrize(
    "damage", [b"", b"\x00garbage", b"\x81\xa7version\xce\xff\xff\xff\xff", b"\x81\xa4jobs\x81\xa1\xff\x80"]
)
def test_a_cache_that_is_torn_is_made_again(jobs, damage: bytes) -> None:
    first = read_fleet(jobs, since=BEGIN)
    cache_path().write_bytes(damage)
    assert read_fleet(jobs, since=BEGIN) == first
    assert cache_path().read_bytes() != damage


def test_older_jobs_are_left_out(jobs) -> None:
    """The last entry decides; a journal file whose time is older than that is not even opened."""
    os.utime(jobs[0].events_path, (BEGIN, BEGIN))
    assert [job.job for job in read_fleet(jobs, since=BEGIN + 5.0).jobs] == ["2"]
    assert read_fleet(jobs, since=BEGIN + 10**6).jobs == ()


def test_the_page_shows_what_was_added_up(jobs) -> None:
    """A page without jobs is a page too. Nothing that a job has written becomes markup."""
    fleet: Fleet = read_fleet(jobs, since=BEGIN)
    page = fleet_page(fleet, since=BEGIN, now=BEGIN + 1000.0).decode()
    assert "a worker hung" in page and "nvrx-slurm report 1" in page
    assert HOSTILE not in page and "<img" not in page
    nothing = fleet_page(fleets.add_up([]), since=BEGIN, now=BEGIN).decode()
    assert "0 jobs" in nothing and "No job was active." in nothing
