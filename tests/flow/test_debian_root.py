"""`ci.debian_root` leaves nothing behind. The tests use a small root file system of this machine's own programs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.debian_root import PACKAGES, TREE

WAIT_S = 60.0


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """The folder of kept roots, with the root of the suite `small`."""
    packages = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    root = tmp_path / f"debian-small-{packages}"
    for name in ("dev", "etc", "opt", "proc", "sys", "tmp", "run", "src", "etc/ssl/certs"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for program in ("sh", "umount", "setpriv", "setsid", "sleep"):
        path = shutil.which(program)
        assert path is not None
        libraries = re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", path], capture_output=True, text=True).stdout)
        for file in (f"/usr/bin/{program}", *libraries):
            (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path if file.startswith("/usr/bin/") else file, root / file[1:])
    (root / "opt/installed").write_text(hashlib.sha256((TREE / "pyproject.toml").read_bytes()).hexdigest())
    return tmp_path


def inside(roots: Path, script: str) -> list[str]:
    """The command line that runs a shell script in that root, as `main` would."""
    init = [sys.executable, "-m", "ci.debian_root", "--init", "small", str(roots), "", "", "sh", "-c", script]
    return [
        sys.executable,
        "-c",
        "import sys; from ci.debian_root import supervise; sys.exit(supervise(sys.argv[1:]))",
        *init,
    ]


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


def test_nothing_outlives_a_make_that_is_killed(roots: Path) -> None:
    """When make is killed, every process in the root dies (the pipe that they share is closed), nothing was written
    to the kept root, and nothing stays mounted."""
    script = "echo x > /left; setsid sleep 1000 & sleep 1000 & echo started; wait"
    make = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *inside(roots, script)]
    with subprocess.Popen(make, cwd=TREE, stdout=subprocess.PIPE, text=True) as process:
        assert "started\n" in lines(process)
        process.kill()
        output, _ = process.communicate(timeout=WAIT_S)  # returns at the pipe's end
    assert output == ""
    assert not list(roots.glob("*/left"))
    assert str(roots) not in Path("/proc/self/mountinfo").read_text()


def test_the_command_gets_signals_and_gives_the_exit_code(roots: Path) -> None:
    """SIGTERM is passed to the command, and the command's exit code is that of the whole run."""
    script = "trap 'exit 7' TERM; echo started; sleep 1000 & wait"
    with subprocess.Popen(inside(roots, script), cwd=TREE, stdout=subprocess.PIPE, text=True) as process:
        assert "started\n" in lines(process)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 7


def test_a_signal_ends_it_while_another_run_has_the_root(roots: Path) -> None:
    """A signal ends PID 1 while it waits for the lock of the root and has no child to signal."""
    waits = """
import fcntl, sys, threading
from ci.debian_root import Children
threading.Thread(target=Children().obey, daemon=True).start()
print("waits", flush=True)
fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)
"""
    with (roots / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the other run's lock
        command = [sys.executable, "-c", waits, lock.name]
        with subprocess.Popen(command, cwd=TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert "waits\n" in lines(process)
            assert process.stdin is not None
            process.stdin.write("i")
            process.stdin.flush()
            try:
                assert process.wait(WAIT_S) == 128 + signal.SIGKILL
            finally:
                process.kill()
