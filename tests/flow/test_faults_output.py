"""Workers that print more than fits in memory: all of it is on file, and the agent neither grows nor stops its
heartbeats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvrx_slurm.journal.records import NodeLost
from tests.fault_jobs import ends_well, fault_plan, printed
from tests.waiting import until

MOST_RESIDENT_KB = 300_000
QUICK = {"heartbeat__interval": 0.5, "heartbeat__timeout": 5.0}


def peak_kb(pid):
    """The most memory that the process ever had."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1))


def rank_file(job):
    return job.folder.cycle_logs("main-0", 0, 0) / "rank-0.out"


@pytest.mark.parametrize(
    ("fault", "size", "ends"),
    [("prints_a_gigabyte", 1 << 30, b"x\n"), ("prints_one_long_line", (100 << 20) + 1, b"y\n")],
    ids=["1 GB in a burst", "one line of 100 MB"],
)
def test_flood_of_output_is_on_file_to_the_last_byte(run_local, gate, tmp_path, fault, size, ends):
    """The rank's file has all of the output, the agent's memory stays bounded, and no node is declared dead."""
    job = run_local(fault_plan(gate, tmp_path, fault, workers=1, rank=0, **QUICK))
    gate.wait(1, cycle=0)
    path = rank_file(job)
    until(lambda: path.exists() and path.stat().st_size == size, f"{size} bytes are on file", timeout=90.0)
    assert peak_kb(job.agent_pid("n1")) < MOST_RESIDENT_KB
    ends_well(job, gate, workers=1, cycle=0)
    with path.open("rb") as file:
        file.seek(-2, 2)
        assert file.read() == ends
    assert job.said(NodeLost) == []
    path.unlink()
    job.folder.job_log.unlink()


def test_worker_that_prints_without_end_is_stopped(run_local, gate, tmp_path):
    """Output that never ends delays neither the teardown nor the end of the job."""
    job = run_local(fault_plan(gate, tmp_path, "prints_until_told", workers=1, rank=0))
    gate.wait(1, cycle=0)
    until(lambda: len(printed(job, 0)) > 1 << 16, "it prints")
    job.process.terminate()
    assert job.finish() == 143
