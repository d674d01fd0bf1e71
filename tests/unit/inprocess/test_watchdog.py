from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from nvrx_slurm.inprocess import progress as module
from nvrx_slurm.inprocess.progress import ProgressStamps, SignalWatchdog, Watchdog
from nvrx_slurm.inprocess.region import Region
from tests.unit.inprocess.bytecodes import locked

INTERVAL_S = 0.002
DEADLINE_S = 20.0
HOLD_S = 0.2  # a hundred intervals


class Counted(ProgressStamps):
    """Real stamps that are counted, with the longest time between two."""

    stamped = 0
    longest_gap_s = 0.0

    def automatic(self) -> None:
        if self.stamped:
            self.longest_gap_s = max(self.longest_gap_s, self.silent_s(time.monotonic_ns()))
        self.stamped += 1
        super().automatic()


@pytest.fixture
def stamps():
    made = Counted.create()
    yield made
    made.close()


@pytest.fixture(params=["pending call", "signal"])
def watchdog(request, stamps):
    with Region(on_signal=stamps.automatic) as region:
        by_signal = request.param == "signal"
        made = SignalWatchdog(region.ask, INTERVAL_S) if by_signal else Watchdog(stamps, INTERVAL_S)
        made.start()
        yield made
        made.stop()


def run_until(holds: Callable[[], bool]) -> None:
    """Keeps the main thread in bytecode until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline


def assert_silent_for_the_hold(stamps: Counted) -> None:
    """Waits for new stamps: there was none while the main thread could run no bytecode. The number of stamps around
    that time is not checked, since a busy machine may stop this thread at any point."""
    before = stamps.stamped
    run_until(lambda: stamps.stamped > before + 5)
    assert stamps.longest_gap_s > HOLD_S / 2  # a stamp that was due before may be written after the hold has begun


def test_bytecode_is_progress(stamps, watchdog):
    """A main thread that runs only a Python loop is stamped again and again."""
    run_until(lambda: stamps.stamped > 20)


@pytest.mark.parametrize("library", [ctypes.CDLL, ctypes.PyDLL], ids=["stuck in C", "holds the GIL in C"])
def test_no_bytecode_is_no_progress(stamps, watchdog, library):
    """A main thread that is in a C call for many intervals, with or without the GIL, is not stamped meanwhile."""
    run_until(lambda: stamps.stamped > 2)
    library(None).usleep(int(HOLD_S * 1e6))
    assert_silent_for_the_hold(stamps)


@pytest.mark.parametrize(
    "wait", [time.sleep, lambda seconds: locked().acquire(timeout=seconds)], ids=["sleep", "lock"]
)
def test_a_wait_is_no_progress(stamps, watchdog, wait):
    """A main thread that sleeps, or waits for a lock, is not woken for a stamp."""
    run_until(lambda: stamps.stamped > 2)
    wait(HOLD_S)
    assert_silent_for_the_hold(stamps)


def test_a_gil_held_by_another_thread_is_no_progress(stamps, watchdog):
    """While native code in another thread holds the GIL, no stamp is made."""
    run_until(lambda: stamps.stamped > 2)
    thread = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(int(HOLD_S * 1e6),))
    thread.start()
    run_until(lambda: not thread.is_alive())  # runs bytecode whenever it gets the GIL
    assert_silent_for_the_hold(stamps)


def test_a_full_queue_is_tried_again(stamps):
    """If more calls are pending than the interpreter takes, the watchdog tries again later."""
    nothing = ctypes.PyDLL(None).usleep  # holds the GIL: no pending call is executed before this call returns
    filler = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    add = module._add_pending_call
    watchdog = Watchdog(stamps, INTERVAL_S)
    fill = threading.Thread(target=lambda: [add(filler, None) for _ in range(400)])
    fill.start()
    watchdog.start()
    nothing(10_000)
    before = stamps.stamped
    run_until(lambda: stamps.stamped > before + 3)
    watchdog.stop()
    fill.join()


def test_stops_at_once_while_a_call_is_pending(stamps):
    """`stop` returns even if the main thread, which calls it, executes no pending call; after a hundred times no
    thread is left."""
    before = threading.active_count()
    for _ in range(100):
        start_and_stop(stamps)
    assert threading.active_count() <= before


def test_what_earlier_watchdogs_left_is_not_taken_for_progress(stamps):
    """Calls of earlier watchdogs, which did not wait for them, make no stamps later."""
    for _ in range(20):
        start_and_stop(stamps)
    watchdog = Watchdog(stamps, INTERVAL_S)
    before = stamps.stamped
    watchdog.start()
    run_until(lambda: stamps.stamped > before + 3)
    before = stamps.stamped
    ctypes.PyDLL(None).usleep(100_000)
    ctypes.CDLL(None).usleep(100_000)
    assert stamps.stamped - before <= 2
    watchdog.stop()


def start_and_stop(stamps: ProgressStamps) -> None:
    watchdog = Watchdog(stamps, 1000.0)
    watchdog.start()
    watchdog.stop()


def test_a_call_left_pending_does_not_fail_the_process():
    """A process ends cleanly with pending calls, of watchdogs that were stopped or of one that was not."""
    script = """
import threading
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.inprocess.progress import Watchdog
for _ in range(50):
    stamps = ProgressStamps.create()
    watchdog = Watchdog(stamps, 1000.0)
    watchdog.start()
    watchdog.stop()
    stamps.close()
left = Watchdog(ProgressStamps.create(), 0.001)
left.start()
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
