"""Many jobs on one page: added up from their journals, each read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_slurm.journal.records import SlurmNodeState
from nvrx_slurm.report import fleet as fleets
from nvrx_slurm.report.fleet import Fleet, cache_path, read_fleet
from nvrx_slurm.report.web.fleet_page import fleet_page
from tests.jobs import HOSTILE, eventful
from tests.unit.report.recorder import BEGIN, ended, write


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three: one with three failures, one with one, one without a journal; and what reads them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [write(tmp_path / "jobs", eventful(), job="1"), write(tmp_path / "jobs", ended(), job="2")]
    folders.append(write(tmp_path / "jobs", ended(), job="3"))
    folders[2].events_path.unlink()
    return folders


def test_jobs_are_added_up(jobs) -> None:
    """Failures by cause and node, repairs, and the time of all nodes; a job without a journal is left out."""
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
    """Only a job whose journal has grown since; and the answer is that of a first reading."""
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
        file.write(b'{"n":9999,"t":1790000400.0,"event":"slurm_node_state","node":"n2","state":"DOWN"}\n')
    assert SlurmNodeState(node="n2", state="DOWN")
    assert read_fleet(jobs, since=BEGIN).jobs[0].ended == 1790000400.0
    assert read == ["1"]


@pytest.mark.parametrize("damage", [b"", b"\x00garbage", b"\x81\xa7version\xce\xff\xff\xff\xff"])
def test_a_cache_that_is_torn_is_made_again(jobs, damage: bytes) -> None:
    first = read_fleet(jobs, since=BEGIN)
    cache_path().write_bytes(damage)
    assert read_fleet(jobs, since=BEGIN) == first
    assert cache_path().read_bytes() != damage


def test_older_jobs_are_left_out(jobs) -> None:
    """By the last entry of the journal; one whose file is older than that is not even opened."""
    os.utime(jobs[0].events_path, (BEGIN, BEGIN))
    assert [job.job for job in read_fleet(jobs, since=BEGIN + 5.0).jobs] == ["2"]
    assert read_fleet(jobs, since=BEGIN + 10**6).jobs == ()


def test_the_page_holds_what_was_added_up(jobs) -> None:
    """And it is a page for no job, too. Nothing that a job has written is markup in it."""
    fleet: Fleet = read_fleet(jobs, since=BEGIN)
    page = fleet_page(fleet, since=BEGIN, now=BEGIN + 1000.0).decode()
    assert "a worker hung" in page and "nvrx-slurm report 1" in page
    assert HOSTILE not in page and "<img" not in page
    nothing = fleet_page(fleets.add_up([]), since=BEGIN, now=BEGIN).decode()
    assert "0 jobs" in nothing and "No job was active." in nothing
