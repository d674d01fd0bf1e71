"""The kernel's own timer kills a process in any state."""

from __future__ import annotations

import signal
import subprocess
import sys

BEGIN = """import os, signal, threading
from nvrx_slurm.liveness.self_fence import SelfFenceTimer
timer = SelfFenceTimer()
"""


def end_of(code: str) -> int:
    """Runs the code in a process; returns its exit code, or minus the signal."""
    return subprocess.run([sys.executable, "-c", BEGIN + code], timeout=60, check=False).returncode


def test_stopped_process_is_killed_in_time():
    """The timer kills a process that does not run."""
    assert end_of("timer.arm(0.2); os.kill(os.getpid(), signal.SIGSTOP)") == -signal.SIGKILL


def test_time_that_is_up_kills_at_once():
    """A timer of 0 s kills at once: it is not an unset timer."""
    assert end_of("timer.arm(0.0); signal.pause()") == -signal.SIGKILL


def test_last_setting_counts():
    """Arming the timer again or disarming it cancels the earlier time."""
    assert end_of("timer.arm(0.05); timer.arm(1000.0); threading.Event().wait(0.2)") == 0
    assert end_of("timer.arm(0.05); timer.disarm(); threading.Event().wait(0.2)") == 0
