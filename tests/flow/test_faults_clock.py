"""The clock is set while a job runs: nobody is given up for it, and no bound passes early or late."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.processes import is_alive
from nvrx_slurm.records import NodeLost, Recovered, RoundOpened
from tests.harness import gate_plan

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")) + sorted(
    Path("/usr/lib64/faketime").glob("libfaketime.so.1")
)
HOUR_S = 3600
HELD_S = 1.0
STARVED_S = 60.0
"""For a start of workers by libfaketime, whose start-ups wait for each other, on a loaded machine."""
SHM = Path("/dev/shm")

_libc = ctypes.CDLL(None)
_libc.sem_open.restype = ctypes.c_void_p


class FakeClock:
    """The wall clock of all processes that are started with `env`: it can be set while they run. What measures time
    without it (CLOCK_MONOTONIC) is left alone, as it is when an administrator sets the clock."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep_going, daemon=True)
        self._keeper.start()
        self.env = {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: int) -> None:
        """From now on it is so far ahead of the real one."""
        self._file.with_suffix(".new").write_text(f"{ahead_s:+d}")
        self._file.with_suffix(".new").replace(self._file)

    def close(self) -> None:
        self._is_over.set()
        self._keeper.join()

    def _keep_going(self) -> None:
        """libfaketime has one semaphore for all processes, and each takes it as it starts. Who is killed just then
        keeps it for ever: whoever starts later would wait as long."""
        held: dict[Path, int] = {}
        while not self._is_over.wait(HELD_S / 10):
            for path in SHM.glob("sem.faketime_sem_*"):
                held[path] = 0 if _is_free(path, put=held.get(path, 0) >= 10) else held.get(path, 0) + 1


def _is_free(path: Path, *, put: bool) -> bool:
    """Whether nobody has the semaphore; with `put` nobody has it any more."""
    semaphore = ctypes.c_void_p(_libc.sem_open(b"/" + path.name.removeprefix("sem.").encode(), 0))
    if not semaphore:
        return True  # its last process has ended
    value = ctypes.c_int()
    _libc.sem_getvalue(semaphore, ctypes.byref(value))
    if put and value.value == 0:
        _libc.sem_post(semaphore)
    _libc.sem_close(semaphore)
    return value.value > 0


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[FakeClock]:
    clock = FakeClock(tmp_path / "clock")
    yield clock
    clock.close()


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_clock_that_is_set_by_an_hour_changes_nothing(run_local, gate, clock, tmp_path, ahead_s):
    """All processes' wall clock is set by an hour while a round runs, and again by as much the other way: nobody is
    lost, no worker touched, a failure after each is dealt with, and the journal's clock has no step in it."""
    bounds = {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 40.0, "join_timeout_s": 60.0}
    job = run_local(gate_plan(gate, tmp_path, **bounds), env=clock.env)
    workers = gate.wait(4, cycle=0)
    for cycle, ahead in ((1, ahead_s), (2, 0)):
        clock.set(ahead)
        assert all(is_alive(worker.pid) for worker in workers.values())
        os.kill(workers[0].pid, signal.SIGKILL)
        workers = gate.wait(4, cycle=cycle, timeout=STARVED_S)
        job.expect(Recovered, cycle=cycle)
    gate.open()
    assert job.finish() == 0
    assert job.said(NodeLost) == []
    assert [record.cycle for record in job.said(RoundOpened)] == [0, 1, 2]
    assert max(record.total_s for record in job.said(Recovered)) < 60.0
    assert job.entries[-1].t - job.entries[0].t < 300.0
    assert [entry.t for entry in job.entries] == sorted(entry.t for entry in job.entries)
    assert "the store's clock was set" in job.folder.node_log("controller").read_text()


def test_node_that_freezes_while_the_clock_is_an_hour_off_is_given_up_in_time(run_local, gate, clock, tmp_path):
    """After the clock was set back, silence is still silence: a frozen node is lost after its timeout."""
    bounds = {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 5.0, "startup_timeout_s": 10.0}
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
