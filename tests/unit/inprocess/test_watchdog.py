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
    """Real stamps that also count, and keep the longest time between two."""

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
    """Keep the main thread in bytecode until this holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline


def assert_silent_for_the_hold(stamps: Counted) -> None:
    """Once stamps are made again: for as long as the main thread could run nothing there was none. The number of
    stamps around that time is no measure, since a busy machine may stop this thread anywhere."""
    before = stamps.stamped
    run_until(lambda: stamps.stamped > before + 5)
    assert stamps.longest_gap_s > HOLD_S / 2  # a stamp that was due before may be written when the hold has begun


def test_bytecode_is_progress(stamps, watchdog):
    """A main thread that runs nothing but a Python loop is stamped again and again."""
    run_until(lambda: stamps.stamped > 20)


@pytest.mark.parametrize("library", [ctypes.CDLL, ctypes.PyDLL], ids=["stuck in C", "holds the GIL in C"])
def test_no_bytecode_is_no_progress(stamps, watchdog, library):
    """A main thread that is in a C call for many intervals, with or without the GIL, is not stamped then."""
    run_until(lambda: stamps.stamped > 2)
    library(None).usleep(int(HOLD_S * 1e6))
    assert_silent_for_the_hold(stamps)


@pytest.mark.parametrize(
    "wait", [time.sleep, lambda seconds: locked().acquire(timeout=seconds)], ids=["sleep", "lock"]
)
def test_a_wait_is_no_progress(stamps, watchdog, wait):
    """A main thread that sleeps, or waits for a lock, is not woken to be stamped."""
    run_until(lambda: stamps.stamped > 2)
    wait(HOLD_S)
    assert_silent_for_the_hold(stamps)


def test_a_gil_held_by_another_thread_is_no_progress(stamps, watchdog):
    """While native code in another thread holds the GIL, nothing is stamped."""
    run_until(lambda: stamps.stamped > 2)
    thread = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(int(HOLD_S * 1e6),))
    thread.start()
    run_until(lambda: not thread.is_alive())  # in bytecode, whenever it gets the GIL
    assert_silent_for_the_hold(stamps)


def test_a_full_queue_is_tried_again(stamps):
    """When more calls are pending than the interpreter takes, the watchdog asks again later."""
    nothing = ctypes.PyDLL(None).usleep  # holds the GIL: none of the calls is carried out before we are through
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
    """`stop` returns though its main thread, being in it, carries out no call; a hundred times, leaving no thread."""
    before = threading.active_count()
    for _ in range(100):
        start_and_stop(stamps)
    assert threading.active_count() <= before


def test_what_earlier_watchdogs_left_is_not_taken_for_progress(stamps):
    """Calls that were carried out for others, who did not wait for them, stamp nothing later."""
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


def test_a_call_left_pending_harms_nobody():
    """A process ends cleanly with calls pending, of watchdogs that have gone or of one that was never stopped."""
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
