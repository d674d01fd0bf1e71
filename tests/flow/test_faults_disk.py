"""The job folder's disk is full: workers go on, the job ends with its right code, and its records are whole."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.journal.records import entry_from_json
from nvrx_slurm.util.processes import is_alive
from tests.fault_harness import child_of, small_disk
from tests.fault_jobs import fault_plan, printed
from tests.harness import gate_plan, wait_gone
from tests.waiting import until


@pytest.fixture
def disk():
    """A disk of four megabytes for the job folders."""
    with small_disk("size=4m") as disk:
        yield disk


def mirrored(job):
    """The numbers of the entries in the journal's copy. A line that is not whole raises an error."""
    return [entry_from_json(line).n for line in job.folder.events_path.read_bytes().splitlines()]


def test_full_disk_touches_no_worker_and_loses_no_result(run_local, gate, disk):
    """A disk that is full to the last byte costs output and nothing else. A failure is handled, the next controller
    starts without disk space, and the job ends with 0. Its result is on file, and the journal's copy is whole up to
    the job's end."""
    job = run_local(gate_plan(gate, disk.path))
    before = gate.wait(4, cycle=0)
    job.agent_pid("n3")
    disk.fill()
    assert all(is_alive(worker.pid) for worker in before.values())
    os.kill(before[0].pid, signal.SIGKILL)
    again = gate.wait(4, cycle=1)
    disk.fill()
    os.kill(child_of(job.process.pid, "nvrx_slurm.controller"), signal.SIGKILL)
    os.kill(again[0].pid, signal.SIGKILL)
    gate.wait(4, cycle=2)
    disk.fill()
    gate.open()
    assert job.process.wait(30.0) == 0
    result = job.folder.read_result()
    assert (result.exit_code, result.reason) == (0, "done")
    numbers = mirrored(job)
    assert numbers == list(range(1, len(numbers) + 1))
    assert b'"event":"job_ended"' in job.folder.events_path.read_bytes()
    assert not job.folder.reserve_path.exists()


def test_result_of_a_failed_job_is_written_on_a_full_disk(run_local, gate, disk):
    """On a full disk a failed job ends with its own exit code, and the result has its reason."""
    job = run_local(gate_plan(gate, disk.path, nodes=1, spares=0, max_restarts=0))
    before = gate.wait(2, cycle=0)
    disk.fill()
    before[0].go(exit_code=3)
    assert job.process.wait(30.0) == 1
    result = job.folder.read_result()
    assert result.exit_code == 1
    assert "restart budget spent" in result.reason


def test_worker_that_fills_the_disk_goes_on_without_its_output(run_local, gate, disk):
    """A worker that prints more than fits on the disk runs on. Once there is space again, its output is on file
    again."""
    disk.ballast.write_bytes(bytes(1 << 20))  # space that is freed later, whichever process fills the rest
    job = run_local(fault_plan(gate, disk.path, "prints_until_told", workers=1, rank=0))
    worker = gate.wait(1, cycle=0)[0]
    until(lambda: len(printed(job, 0)) > 1 << 16, "it prints")
    ballast = disk.fill()
    size = until(lambda: stands_still(job), "nothing more fits")
    assert is_alive(worker.pid)
    ballast.unlink()
    until(lambda: len(printed(job, 0)) > size, "its output is kept again")
    job.process.terminate()
    assert job.process.wait(30.0) == 143


def stands_still(job):
    size = len(printed(job, 0))
    os.sched_yield()
    return size if len(printed(job, 0)) == size else None


def test_no_room_for_another_file_costs_the_logs_alone(run_local, gate):
    """Where no file can be created any more, the next cycle's workers run without log files."""
    with small_disk("size=4m,nr_inodes=64") as disk:
        job = run_local(gate_plan(gate, disk.path))
        before = gate.wait(4, cycle=0)
        take_every_inode(disk.path)
        os.kill(before[0].pid, signal.SIGKILL)
        after = gate.wait(4, cycle=1)
        assert {worker.env["NVRX_NODE"] for worker in after.values()} == {"n1", "n2"}
        gate.open()
        assert job.process.wait(30.0) == 0


def test_job_whose_folder_is_removed_ends_all_the_same(run_local, gate, tmp_path):
    """Where neither a log nor the result can be written, since the job folder is gone, the job still ends within a
    bound and leaves no process."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, teardown__grace=1.0))
    gate.wait(2, cycle=0)
    everybody = descendants(job.process.pid)
    shutil.rmtree(job.folder.path)
    job.process.terminate()
    assert job.process.wait(90.0) == 143
    wait_gone(everybody)


def take_every_inode(disk):
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            (disk / f"ballast-{number}").touch()
