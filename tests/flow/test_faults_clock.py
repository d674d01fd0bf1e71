"""The wall clock is set while a job runs: no node is declared dead for it, and no bound passes early or late."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.journal.records import NodeLost, Recovered, RendezvousOpened
from nvrx_slurm.util.processes import is_alive
from tests.harness import gate_plan

SOURCE = Path(__file__).parents[1] / "fake_clock.c"
HOUR_S = 3600
_AHEAD_S = struct.Struct("q")  # native, so it is written at once: no process reads half of it


class FakeClock:
    """The wall clock of all processes that are started with `env`. It can be set while they run. CLOCK_MONOTONIC does
    not change, as when an administrator sets the clock."""

    def __init__(self, folder: Path) -> None:
        library, file = folder / "fake_clock.so", folder / "ahead_s"
        subprocess.run(["cc", "-shared", "-fPIC", "-O", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
        file.write_bytes(_AHEAD_S.pack(0))
        with file.open("r+b") as opened:
            self._ahead_s = mmap.mmap(opened.fileno(), _AHEAD_S.size)
        self.env = {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(file)}

    def set(self, ahead_s: int) -> None:
        """Set the clock to `ahead_s` seconds ahead of the real one."""
        _AHEAD_S.pack_into(self._ahead_s, 0, ahead_s)

    def close(self) -> None:
        self._ahead_s.close()


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[FakeClock]:
    clock = FakeClock(tmp_path)
    yield clock
    clock.close()


def test_clock_that_is_set_by_an_hour_changes_nothing(run_local, gate, clock, tmp_path):
    """The wall clock of all processes is set an hour ahead, back, an hour behind, and back. No node is lost and no
    worker is touched, a failure after each change is handled, and the journal's clock has no jump."""
    bounds = {"heartbeat__interval": 0.2, "heartbeat__timeout": 5.0}
    job = run_local(gate_plan(gate, tmp_path, spares=0, max_restarts=9, **bounds), env=clock.env)
    workers = gate.wait(4, cycle=0)
    for cycle, ahead in enumerate((HOUR_S, 0, -HOUR_S, 0), 1):
        clock.set(ahead)
        assert all(is_alive(worker.pid) for worker in workers.values())
        os.kill(workers[0].pid, signal.SIGKILL)
        workers = gate.wait(4, cycle=cycle)
        job.expect(Recovered, cycle=cycle)
    gate.open()
    assert job.finish() == 0
    assert job.said(NodeLost) == []
    assert [record.cycle for record in job.said(RendezvousOpened)] == [0, 1, 2, 3, 4]
    assert max(record.total_s for record in job.said(Recovered)) < 60.0
    assert job.entries[-1].t - job.entries[0].t < 300.0
    assert [entry.t for entry in job.entries] == sorted(entry.t for entry in job.entries)
    assert "the store's clock was set" in job.folder.node_log("controller").read_text()


def test_node_that_freezes_while_the_clock_is_an_hour_off_is_given_up_in_time(run_local, gate, clock, tmp_path):
    """After the clock was set back by an hour, a frozen node is still declared dead after its heartbeat timeout."""
    bounds = {"heartbeat__interval": 0.2, "heartbeat__timeout": 5.0, "heartbeat__startup_timeout": 10.0}
    job = run_local(gate_plan(gate, tmp_path, **bounds), env=clock.env)
    gate.wait(4, cycle=0)
    job.agent_pid("n3")
    clock.set(-HOUR_S)
    os.kill(job.agent_pid("n2"), signal.SIGSTOP)
    job.expect(NodeLost, node="n2", cause="heartbeat_timeout")
    gate.wait(4, cycle=1)
    os.kill(job.agent_pid("n2"), signal.SIGCONT)
    gate.open()
    assert job.finish() == 0
