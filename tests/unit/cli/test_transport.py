"""`nvrx-slurm transport`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Nvrx

PRODUCER = """
import sys
from nvrx_slurm.transport.ring import SharedRing
ring = SharedRing.create(slots=1, slot_bytes=4096, folder=sys.argv[1])
print(ring.name, flush=True)
sys.stdin.read()
"""


def limited(tmp_path: Path, *limits: str) -> subprocess.CompletedProcess[str]:
    """`transport doctor --json` under these limits."""
    script = f'{"; ".join(f"ulimit {limit}" for limit in limits)}; exec "$0" -m nvrx_slurm transport doctor --json'
    return subprocess.run(["bash", "-c", script, sys.executable], capture_output=True, text=True, cwd=tmp_path)


def finding(said: str, part: str) -> dict[str, Any]:
    (found,) = [each for each in json.loads(said)["findings"] if each["part"] == part]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def producer(tmp_path: Path) -> Callable[[], tuple[subprocess.Popen[str], str]]:
    """Returns a function that starts a process with a ring in `tmp_path`, and returns it and the ring's name."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start  # type: ignore[misc]
    for process in started:
        process.kill()
        process.communicate()


def test_the_doctor_prints_a_line_for_each_part_and_ends_with_0_where_the_defaults_work(nvrx: Nvrx) -> None:
    """This node supports what is used by default."""
    done = nvrx("transport", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["PART", "LEVEL", "SEEN", "WHAT", "TO", "DO"]
    assert [line.split("  ")[0] for line in lines] == [
        "/dev/shm", "rings", "shm", "tcp", "host name", "open files", "ucxx", "RDMA", "nixl"
    ]  # fmt: skip


def test_the_doctor_ends_with_1_where_a_ring_cannot_be_made(tmp_path: Path) -> None:
    """Here the limit on a file's size is too low; each finding of the object says what was seen, and what to do."""
    done = limited(tmp_path, "-f 1024")
    assert (done.returncode, json.loads(done.stdout)["fit"]) == (1, False)
    for part in ("shm", "tcp"):
        assert finding(done.stdout, part)["level"] == "fail"
        assert "make fewer or smaller slots" in finding(done.stdout, part)["seen"]


def test_too_few_files_are_a_warning_and_no_failure(tmp_path: Path) -> None:
    """A few readers need only a few files."""
    done = limited(tmp_path, "-n 200")
    assert (done.returncode, json.loads(done.stdout)["fit"]) == (0, True)
    assert finding(done.stdout, "open files") == {
        "part": "open files",
        "level": "warn",
        "seen": "at most 200",
        "todo": "each connection is one, and a server takes 1024: ulimit -n, up to 200 here",
    }


def test_sweep_removes_and_names_the_rings_of_the_dead(
    nvrx: Nvrx, tmp_path: Path, producer: Callable[[], tuple[subprocess.Popen[str], str]]
) -> None:
    """The rings of live processes stay, and the second sweep finds nothing."""
    (dead, orphan), (_, ring) = producer(), producer()
    os.kill(dead.pid, signal.SIGKILL)
    dead.wait()
    done = nvrx("transport", "sweep", "--folder", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{orphan}\n")
    assert [path.name for path in tmp_path.glob("nvrx-ring-*")] == [ring]
    done = nvrx("transport", "sweep", "--folder", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no ring of a dead process\n")
