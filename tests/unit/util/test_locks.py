"""A lock through a file, and work in a thread that may never return."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.threads import in_thread
from tests.harness import WAIT_S

HOLDER = """
import sys
from pathlib import Path
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.locks import locked
with locked(Path(sys.argv[1]), timeout_s=5.0, clock=SystemClock()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def is_free(path: Path) -> bool:
    try:
        with locked(path, timeout_s=0.0, clock=SystemClock()):
            return True
    except TimeoutError as error:
        assert str(path) in str(error)
        return False


def test_a_lock_keeps_other_threads_out_until_it_is_given_back(path: Path) -> None:
    """An exception in the block releases it too."""
    with pytest.raises(RuntimeError), locked(path, timeout_s=0.0, clock=SystemClock()) as is_locked:
        assert is_locked
        assert not is_free(path)
        raise RuntimeError
    assert is_free(path)


def test_a_lock_goes_with_the_process_that_holds_it(path: Path) -> None:
    """The kernel releases the lock of a process that was killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert not is_free(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait(WAIT_S)
    holder.stdin.close()
    holder.stdout.close()
    assert is_free(path)


def test_a_lock_is_made_by_no_link(path: Path, tmp_path: Path) -> None:
    """Another user may have made the symbolic link: it is refused."""
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locked(path, timeout_s=0.0, clock=SystemClock()):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_waiting_thread_gets_the_lock_when_it_is_released(path: Path) -> None:
    """The waiting thread gets the lock within its timeout."""
    with locked(path, timeout_s=0.0, clock=SystemClock()):
        waiting = in_thread(lambda: _take(path), "waiting")
        assert not waiting.done()
    assert waiting.result(WAIT_S)


def _take(path: Path) -> bool:
    with locked(path, timeout_s=WAIT_S, clock=SystemClock()) as is_locked:
        return is_locked


def test_work_in_a_thread_gives_its_result_or_its_error() -> None:
    """The future has what the work returned or raised."""
    assert in_thread(lambda: 7, "work").result(WAIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 // 0, "work").result(WAIT_S)


async def test_a_caller_that_gives_up_on_a_thread_gets_no_error_from_it() -> None:
    """Its later end causes no error in the caller, which has timed out."""
    goes_on = threading.Event()
    work = in_thread(lambda: goes_on.wait(WAIT_S), "work")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(work), 0.01)
    goes_on.set()
    # The future is cancelled, or was faster: it has no error.
    assert work.cancelled() or work.result(WAIT_S)
