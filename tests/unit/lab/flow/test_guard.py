"""The resources of an attempt, and the processes that release them if the attempt cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_slurm.api.handle import Job
from nvrx_slurm.lab.devcluster.processes import environment_of
from nvrx_slurm.lab.flow.cleanup import (
    HELD,
    MARK,
    CleanupList,
    HeldCluster,
    HeldJob,
    HeldProcess,
    clean_up,
    standing,
)
from nvrx_slurm.lab.flow.guard import KILLER_OF_CHILDREN, RunGuard, clean
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.processes import is_alive
from tests.fault_harness import small_disk
from tests.harness import wait_gone

# Forks a child and exits; the orphan prints its pid, and waits until the test ends it.
ORPHAN = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n    time.sleep(1000)\n"
)
STAYS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)\n"


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt's folder."""
    folder = tmp_path / "run" / "flow" / "attempt-1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Starts Python with these lines; returns the pid that it prints."""
    found: list[subprocess.Popen[str]] = []

    def start(lines: str, mark: Path | None = None) -> int:
        env = {**os.environ, **({MARK: str(mark)} if mark else {})}
        found.append(subprocess.Popen([sys.executable, "-Sc", lines], env=env, stdout=subprocess.PIPE, text=True))
        assert found[-1].stdout is not None
        return int(found[-1].stdout.readline())

    yield start
    for process in found:
        process.kill()
        process.communicate()


def test_list_on_a_full_disk_stays(start):
    """All processes on the list are ended; only the list stays, because it cannot be written."""
    with small_disk("size=64k") as disk:
        pid = start(STAYS)
        cleanup = CleanupList(disk.path)
        cleanup.process(pid)
        cleanup.close()
        # The list ends with its page, so that not even a line more fits.
        file = disk.path / HELD
        file.write_bytes(file.read_bytes().ljust(4096, b"\n"))
        disk.fill()
        assert clean_up(disk.path, 0.0) == []
        assert standing(disk.path)
        wait_gone([pid])


def test_a_resource_stays_on_the_list_until_all_have_ended(attempt):
    """Each entry is in the list when the call returns; after `nothing` only later entries are."""
    cleanup = CleanupList(attempt)
    cleanup.cluster("ci-1")
    cleanup.job(Job("7", folder=attempt / "jobs", cluster="local"))
    job = HeldJob(job_id="7", base=str(attempt / "jobs"), cluster="local")
    assert standing(attempt) == [HeldCluster(name="ci-1"), job]
    cleanup.nothing()
    cleanup.process(os.getpid())
    (held,) = standing(attempt)
    assert isinstance(held, HeldProcess) and held.process.pid == os.getpid()


def test_a_torn_last_line_hides_nothing_else(attempt):
    """The disk was full, or the machine failed: earlier lines are still valid."""
    CleanupList(attempt).cluster("ci-1")
    with (attempt / HELD).open("a") as file:
        file.write('{"held":"clus')
    assert standing(attempt) == [HeldCluster(name="ci-1")]


def test_an_attempt_without_a_list_has_nothing_to_clean_up(attempt):
    """An attempt that was killed before it started anything has nothing to clean up."""
    assert standing(attempt) == []
    assert clean_up(attempt, 0.0) == []


def test_undo_kills_the_processes_of_the_attempt_only(attempt, start):
    """An orphan in its own session is killed too, but not the same program of another attempt."""
    orphan, other = start(ORPHAN, attempt), start(STAYS, attempt.parent / "attempt-10")
    CleanupList(attempt).cluster("no-such-cluster")
    assert clean_up(attempt, 0.0) == []
    wait_gone([orphan])
    assert is_alive(other)
    assert standing(attempt) == []


def test_undo_ends_listed_processes_and_can_be_repeated(attempt, start):
    """A listed process without the attempt's mark, for example with another environment, is killed; a process that
    reused a pid is not."""
    held, other = start(STAYS), start(STAYS)
    cleanup = CleanupList(attempt)
    cleanup.process(held)
    cleanup.process(other)
    lines = (attempt / HELD).read_text().splitlines()
    (attempt / HELD).write_text(lines[0] + "\n" + lines[1].replace('"started":', '"started":1') + "\n")
    assert clean_up(attempt, 0.0) == clean_up(attempt, 0.0) == []
    wait_gone([held])
    assert is_alive(other)


def test_undo_clears_what_killed_agents_left_in_memory(attempt):
    """The folders of a job's nodes, which have the job's own name, are removed."""
    left = Path("/dev/shm") / f"{JobFiles(attempt / 'jobs' / '7').runtime_name}-n1"
    left.mkdir()
    CleanupList(attempt).job(Job("7", folder=attempt / "jobs", cluster="slurm"))
    clean_up(attempt, 0.0)
    assert not left.exists()


def test_clean_ends_every_attempt_of_a_run(attempt, start):
    """The caller need not know how many attempts there were."""
    other = attempt.parent.parent / "other-flow" / "attempt-2"
    other.mkdir(parents=True)
    pids = [start(STAYS, attempt), start(STAYS, other)]
    for folder, pid in zip((attempt, other), pids, strict=True):
        CleanupList(folder).process(pid)
    assert clean(attempt.parent.parent) == []
    wait_gone(pids)


def test_a_missing_folder_has_nothing_to_clean_up(tmp_path):
    """The run was cancelled before it began."""
    assert clean(tmp_path / "nowhere") == []


def test_guard_cleans_up_when_its_run_is_killed(attempt, start):
    """When the pipe closes, the guard cleans up for the run, and writes so into the run's folder."""
    pid = start(STAYS, attempt)
    CleanupList(attempt).process(pid)
    run = attempt.parent.parent
    guard = RunGuard(run)
    guard.abandon()
    wait_gone([pid])
    assert "the run was killed" in (run / "guard.log").read_text()


def test_guard_that_is_dismissed_touches_nothing(attempt, start):
    """A run that ends normally has cleaned up by itself."""
    pid = start(STAYS, attempt)
    CleanupList(attempt).process(pid)
    RunGuard(attempt.parent.parent).dismiss()
    assert is_alive(pid)


def test_guard_is_out_of_reach_of_signals_to_the_run(attempt, monkeypatch):
    """It has its own session, so that no signal to the run's group reaches it, and lacks the variable by which
    GitHub's runner finds processes."""
    monkeypatch.setenv(KILLER_OF_CHILDREN, "github_1")
    guard = RunGuard(attempt)
    assert os.getsid(guard.pid) == guard.pid
    assert KILLER_OF_CHILDREN not in environment_of(guard.pid)
    guard.dismiss()
