"""`top` on a real terminal: a running job, its ranks, their stacks and output, and how `top` ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import nvrx_slurm as nv
from nvrx_slurm.jobspec.model import JobSpec
from tests.unit.report.recorder import JOB, ended, write

DEADLINE_S = 60.0
STEPS = """
import time
from nvrx_slurm.workload import beat
print("the worker says this", flush=True)
n = 0
while True:
    n += 1
    beat(step=n)
    time.sleep(0.05)
"""


class Screen:
    """The command in a pseudo-terminal of 80 × 24."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        argv = [sys.executable, "-m", "nvrx_slurm", "top", *words]
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", **variables}
        )
        self.seen = ""

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self.master, keys.encode())

    def until(self, pattern: str) -> str:
        """What was written since the last key, once it matches the pattern."""
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline and self.process.poll() is None, self.seen
            if select.select([self.master], [], [], 0.5)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        return self.seen

    def end(self) -> None:
        """Press q, and assert that the terminal is as it was."""
        self.press("q")
        self.expect_restored(exit_code=0)

    def expect_restored(self, exit_code: int) -> None:
        """Assert that the command ends with this exit code, and leaves the terminal as it was."""
        assert self.process.wait(DEADLINE_S) == exit_code
        if select.select([self.master], [], [], 1.0)[0]:
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        assert self.seen.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(self.slave) == self.before


def test_a_running_job_is_looked_at(tmp_path: Path) -> None:
    """The ranks and steps are shown without a key, l shows what a rank prints, d its stacks. The job goes on."""
    (tmp_path / "train.py").write_text(STEPS)
    spec = JobSpec(name="watched", command=(sys.executable, str(tmp_path / "train.py")), nodes=2, workers_per_node=2)
    job = nv.submit(spec, cluster="local", folder=tmp_path / "jobs")
    try:
        screen = Screen(job.job_id, "--folder", str(tmp_path / "jobs"))
        screen.until(r"RANK +NODE +STEP")
        screen.until(r"2 active")
        screen.press("\x1b[B")
        screen.until(r"> 1 ")
        screen.press("l")
        screen.until("the worker says this")
        screen.press("\x1b")
        screen.until("REPLICA")
        screen.press("d")
        screen.until(r"train\.py")
        screen.end()
        assert not job.done()
    finally:
        job.cancel()
        job.wait_until_gone()


def test_without_colours_and_from_a_signal(tmp_path: Path) -> None:
    """With NO_COLOR no colour is written. After SIGWINCH the screen is drawn again, in the new size."""
    write(tmp_path, ended())
    screen = Screen(JOB, "--folder", str(tmp_path), NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*m", screen.until("n5"))
    screen.press("")
    fcntl.ioctl(screen.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    screen.process.send_signal(signal.SIGWINCH)
    screen.until(r"\x1b\[40;1H")
    screen.end()


def test_sigterm_restores_the_terminal(tmp_path: Path) -> None:
    """SIGTERM restores the cursor, the screen and the echo, as q does; the exit code is 143."""
    write(tmp_path, ended())
    screen = Screen(JOB, "--folder", str(tmp_path))
    screen.until("n5")
    screen.process.terminate()
    screen.expect_restored(exit_code=143)


def test_without_a_terminal_it_is_one_error(tmp_path: Path) -> None:
    """Without a terminal `top` exits with 2 and says that it needs one."""
    write(tmp_path, ended())
    argv = [sys.executable, "-m", "nvrx_slurm", "top", JOB, "--folder", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "top needs a terminal" in done.stderr
