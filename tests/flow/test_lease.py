"""A job whose lease is not renewed ends itself; on real processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.jobspec.model import LeaseSpec
from nvrx_slurm.journal.records import NodeJoined, Shutdown, Signalled, WorkersStarted
from tests.harness import WAIT_S, gate_plan, wait_gone

TIMEOUT_S = 4.0


class Owner:
    """Touches the lease file ten times per timeout, until `go` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gone, self._touches = threading.Event(), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._touch, daemon=True)
        self._thread.start()

    def go(self) -> None:
        self._gone.set()
        self._thread.join()

    def touches(self, count: int) -> None:
        """Wait for `count` more touches of the file."""
        for _ in range(count):
            assert self._touches.acquire(timeout=WAIT_S)

    def _touch(self) -> None:
        while not self._gone.wait(TIMEOUT_S / 10):
            self.path.touch()
            self._touches.release()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """The owner of the job, which renews its lease."""
    owner = Owner(tmp_path / "lease")
    yield owner
    owner.go()


def leased(gate, tmp_path):
    plan = gate_plan(gate, tmp_path, nodes=1, spares=0, teardown__grace=2.0)
    return msgspec.structs.replace(plan, lease=LeaseSpec(file=str(tmp_path / "lease"), timeout=TIMEOUT_S))


def test_job_goes_on_while_its_lease_is_touched_and_ends_when_it_is_not(run_local, gate, tmp_path, owner):
    """Workers run for longer than the lease's timeout while the owner touches the file. Once it stops, the job ends
    with 143."""
    job = run_local(leased(gate, tmp_path))
    gate.wait(2, cycle=0)
    owner.touches(20 + 10)  # two timeouts' worth since the start, and more
    assert job.process.poll() is None
    everybody = descendants(job.process.pid)
    owner.go()
    assert job.finish() == 143
    assert [signalled.reason for signalled in job.said(Signalled)] == ["lease_lapsed"]
    assert job.said(Shutdown)[0].exit_code == 143
    wait_gone(everybody)


def test_job_whose_owner_was_gone_before_it_started_runs_nothing(run_local, gate, tmp_path):
    """The owner ended while the job was in the queue: the lease file exists, no process touches it, and no agent and
    no worker starts."""
    (tmp_path / "lease").touch()
    job = run_local(leased(gate, tmp_path))
    assert job.finish() == 143
    assert job.said(NodeJoined) == job.said(WorkersStarted) == []
    assert [signalled.reason for signalled in job.said(Signalled)] == ["lease_lapsed"]


def test_job_that_is_cancelled_while_its_controller_starts_ends_at_once(run_local, gate, tmp_path):
    """A signal to the job waits until the controller can handle it: it neither kills the controller nor is lost."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0))
    while not job.folder.store_dir.exists():
        assert job.process.poll() is None
    job.process.terminate()
    assert job.finish() == 143
    assert "the controller ended" not in job.folder.job_log.read_text()
