from __future__ import annotations

import os
import subprocess
import sys
from time import monotonic_ns

import pytest

from nvrx_slurm.inprocess.progress import ProgressStamps

SECOND_NS = 1_000_000_000
LATER_NS = monotonic_ns() + 10_000 * SECOND_NS


@pytest.fixture
def stamps():
    made = ProgressStamps.create()
    yield made
    made.close()


def in_ten_s() -> int:
    return monotonic_ns() + 10 * SECOND_NS


def progress(stamps: ProgressStamps) -> float:
    """The silence after one more automatic stamp, read at the same time far in the future."""
    stamps.automatic()
    return stamps.silent_s(LATER_NS)


def test_silence_counts_from_the_last_progress(stamps):
    """A rank has been silent since its last stamp."""
    before = in_ten_s()
    stamps.automatic()
    assert stamps.silent_s(before) <= 10.0 <= stamps.silent_s(in_ten_s())
    assert stamps.silent_s(before - 20 * SECOND_NS) == 0.0


def test_a_ping_counts_only_once_there_was_one(stamps):
    """Before the first ping only the automatic stamp counts; from then on the older of the two."""
    assert progress(stamps) > progress(stamps) > 0
    stamps.manual()
    assert progress(stamps) == progress(stamps)


def test_an_iteration_begins_without_pings_and_suspensions(stamps):
    """After `begin_iteration` no ping is expected, no suspension is open, and silence counts from there."""
    stamps.manual()
    stamps.suspend()
    begun = in_ten_s()
    stamps.begin_iteration()
    assert 0.0 < stamps.silent_s(begun) <= 10.0
    assert progress(stamps) > progress(stamps) > 0


def test_once_the_iteration_is_interrupted_a_suspension_must_end(stamps):
    """This also holds in an atomic block; without a suspension, progress still counts."""
    begun = in_ten_s()
    stamps.interrupted()
    assert progress(stamps) > progress(stamps) > 0
    suspended = stamps.suspend()
    assert stamps.silent_s(begun) <= 10.0 <= stamps.silent_s(in_ten_s())
    stamps.resume(suspended)
    stamps.begin_iteration()
    stamps.suspend()
    assert stamps.silent_s(LATER_NS) == 0.0


def test_once_an_end_is_expected_only_the_next_iteration_is_progress(stamps):
    """After `expect_end` neither the main thread's stamps nor pings count."""
    stamps.expect_end()
    assert progress(stamps) == progress(stamps)
    stamps.manual()
    assert progress(stamps) == progress(stamps)
    stamps.begin_iteration()
    assert progress(stamps) > progress(stamps)


def test_no_suspension_puts_the_end_of_the_function_off(stamps):
    """A rank that hangs in native code under `disable_hang_protection` is killed too, when the others restart."""
    stamps.suspend()
    stamps.expect_end()
    assert 9.0 < stamps.silent_s(in_ten_s()) < 11.0
    stamps.begin_iteration()
    stamps.suspend()
    assert stamps.silent_s(in_ten_s()) == 0.0


def test_a_thread_of_the_last_iteration_ends_no_suspension_of_this_one(stamps):
    """The thread has left its own block late."""
    former = stamps.suspend()
    stamps.begin_iteration()
    suspended = stamps.suspend()
    stamps.resume(former)
    assert stamps.silent_s(in_ten_s()) == 0.0
    stamps.resume(suspended)
    assert stamps.silent_s(in_ten_s()) > 0.0


def test_suspensions_nest(stamps):
    """While any suspension is open there is no silence; after the last one, silence counts from its end, for pings
    too."""
    stamps.manual()
    stamps.suspend()
    stamps.suspend()
    stamps.resume()
    assert stamps.silent_s(in_ten_s()) == 0.0
    ended = monotonic_ns()
    stamps.resume()
    assert stamps.silent_s(ended + SECOND_NS) <= 1.0
    stamps.resume()
    assert stamps.silent_s(in_ten_s()) > 0.0


def test_another_process_reads_them(stamps):
    """The monitor reads the rank's stamps through the descriptor that it inherits."""
    stamps.kill_pending = True
    script = (
        "import sys; from time import monotonic_ns; from nvrx_slurm.inprocess.progress import ProgressStamps; "
        "s = ProgressStamps(int(sys.argv[1])); print(s.kill_pending, s.silent_s(monotonic_ns()) < 100)"
    )
    read = subprocess.run(
        [sys.executable, "-c", script, str(stamps.fd)],
        pass_fds=[stamps.fd],
        capture_output=True,
        text=True,
        check=True,
    )
    assert read.stdout.split() == ["True", "True"]


def test_a_late_ping_does_nothing(stamps):
    """After `close` no descriptor is left, and a thread that still stamps gets no error."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a Path would open one more
    other = ProgressStamps.create()
    other.close()
    other.close()
    other.manual()
    other.automatic()
    other.suspend()
    other.resume()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
