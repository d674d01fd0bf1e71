"""The state of a supervisor's child process before it runs its program."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from nvrx_slurm.agent.child import HANDLED

PROGRAM = """
import os, signal, sys
from nvrx_slurm.agent import child

number = int(sys.argv[1])
for each in child.HANDLED:
    signal.signal(each, lambda *_: None)
before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), number))
pid = child.fork_child()
if pid == 0:
    is_left = signal.getsignal(number) is not signal.SIG_DFL or signal.pthread_sigmask(signal.SIG_BLOCK, ()) != before
    os._exit(is_left)
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


ENDS = [each for each in HANDLED if each not in (signal.SIGCHLD, signal.SIGTSTP)]


@pytest.mark.parametrize(("number", "code"), [*((each, -each) for each in ENDS), (signal.SIGCHLD, 0)])
def test_no_signal_is_lost_before_the_program_runs(number: signal.Signals, code: int) -> None:
    """A signal that arrives just after the fork has its default effect, although the parent has a handler for it;
    afterwards no signal is blocked."""
    program = [sys.executable, "-c", PROGRAM, str(int(number))]
    assert int(subprocess.run(program, stdout=subprocess.PIPE, timeout=60, check=True).stdout) == code
