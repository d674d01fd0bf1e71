"""`workload.beat` as a worker calls it: in a process of its own, with the environment that an agent sets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.workload.slot import Slot
from tests.unit.workload.test_sections import run as worker

Environment = dict[str, str]


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    slot = Slot.create(tmp_path / "0.3")
    yield slot
    slot.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "agent"))
        channel.settimeout(20.0)
        yield channel


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """The variables that an agent would set for rank 3."""
    return {"RANK": "3", "NVRX_BEAT_FILE": str(tmp_path / "0.3"), "NVRX_BEAT_SOCKET": str(tmp_path / "agent")}


def test_a_reader_sees_the_last_step_the_count_and_the_time(slot: Slot, environment: Environment) -> None:
    """After three beats in another process, the slot has the last step, the count, and the time of the last one by
    the node's clock."""
    before = time.monotonic_ns()
    worker("beat(step=7); beat(step=8); beat(step=1_000_000_007)", environment)
    step, count, at, *_ = slot.read()
    assert (step, count) == (1_000_000_007, 3)
    assert before < at < time.monotonic_ns()


def test_the_first_beat_is_announced_once(slot: Slot, agent: socket.socket, environment: Environment) -> None:
    """One datagram has rank and step, sent after the step is in the slot; later beats send none."""
    worker("beat(step=41); beat(step=42)", environment)
    assert agent.recv(100) == b"3 41"
    agent.setblocking(False)
    with pytest.raises(BlockingIOError):
        agent.recv(100)


def test_the_announcement_comes_after_the_step_is_in_the_slot(
    slot: Slot, agent: socket.socket, environment: Environment
) -> None:
    """An agent woken by the datagram finds the step at once, while the worker still runs."""
    code = "beat(step=41)\nimport sys; sys.stdin.read()"
    script = f"from nvrx_slurm.workload import beat\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | environment, stdin=subprocess.PIPE
    ) as running:
        assert agent.recv(100) == b"3 41"
        assert slot.read()[:2] == (41, 1)
        running.communicate()
    assert running.returncode == 0


def test_a_forked_child_beats_into_its_parents_slot(slot: Slot, environment: Environment) -> None:
    """Beats before and after a fork, of parent and child, all arrive in the one slot."""
    worker(
        "import os\n"
        "beat(step=1)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    beat(step=2)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "beat(step=3)\n",
        environment,
    )
    assert slot.read()[:2] == (3, 3)


def test_a_child_that_is_forked_before_the_first_beat_may_beat(slot: Slot, environment: Environment) -> None:
    """The child opens the slot by itself."""
    worker(
        "import os\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    beat(step=2)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n",
        environment,
    )
    assert slot.read()[:2] == (2, 1)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="no agent"),
        pytest.param({"NVRX_BEAT_FILE": ""}, id="empty"),
        pytest.param({"NVRX_BEAT_FILE": "/nonexistent/slot"}, id="missing file"),
        pytest.param({"NVRX_BEAT_FILE": "/proc/self/maps"}, id="unwritable file"),
        pytest.param({"NVRX_BEAT_FILE": "/"}, id="folder"),
        pytest.param({"NVRX_BEAT_FILE": "/dev/null"}, id="not a slot"),
    ],
)
def test_without_a_slot_a_beat_does_nothing(environment: Environment) -> None:
    """In any state of the agent's side the training goes on, and nothing is printed."""
    assert worker("for step in range(3): beat(step=step)", environment) == ""


def test_a_short_file_is_no_slot(tmp_path: Path) -> None:
    """A file that ends before the slot does is left alone."""
    (tmp_path / "short").write_bytes(b"short")
    worker("beat(step=1)", {"NVRX_BEAT_FILE": str(tmp_path / "short")})
    assert (tmp_path / "short").read_bytes() == b"short"


@pytest.mark.parametrize("path", ["/nonexistent/agent", "x" * 500, ""])
def test_an_agent_that_cannot_be_reached_is_not_waited_for(slot: Slot, environment: Environment, path: str) -> None:
    """If there is no socket to send to, the beat still reaches the slot."""
    worker("beat(step=5)", environment | {"NVRX_BEAT_SOCKET": path})
    assert slot.read()[:2] == (5, 1)


def test_an_agent_that_does_not_read_blocks_no_worker(
    slot: Slot, agent: socket.socket, environment: Environment
) -> None:
    """If its socket is full, the announcement is dropped and the beat still reaches the slot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as flood:
        flood.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                flood.sendto(b"0 0", environment["NVRX_BEAT_SOCKET"])
    worker("beat(step=5)", environment)
    assert slot.read()[:2] == (5, 1)


@pytest.mark.parametrize("listened", [True, False])
def test_a_step_that_is_no_integer_is_refused_alike(slot: Slot, environment: Environment, listened: bool) -> None:
    """The error is raised on a laptop as well as under an agent, not only on the cluster."""
    code = "try:\n    beat(step=1.5)\nexcept TypeError as error:\n    print(error)"
    said = worker(code, environment if listened else {})
    assert said == "'float' object cannot be interpreted as an integer\n"


def test_an_integer_of_another_kind_is_a_step(slot: Slot, environment: Environment) -> None:
    """numpy's integers (and torch's, which have `__index__` too) need no conversion."""
    worker("import numpy; beat(step=numpy.int32(12))", environment)
    assert slot.read()[0] == 12


BEAT_IN_A_BEAT = """
import signal
from time import monotonic_ns
from nvrx_slurm.workload import progress

struck = False


def clock():
    global struck
    if not struck:
        struck = True
        signal.raise_signal(signal.SIGUSR1)
    return monotonic_ns()


signal.signal(signal.SIGUSR1, lambda number, frame: beat(step=100))
beat(step=1)
progress.monotonic_ns = clock
beat(step=2)
beat(step=3)
"""


def test_a_signal_handler_may_beat_in_the_middle_of_a_beat(slot: Slot, environment: Environment) -> None:
    """Both beats are counted, no gap is recorded, and later beats are counted as well."""
    worker(BEAT_IN_A_BEAT, environment)
    reading = slot.read()
    assert (reading.step, reading.beats) == (3, 4)
    assert 0 <= reading.largest_gap_ns < 60_000_000_000


def test_beats_under_a_rain_of_signals_all_arrive(slot: Slot, environment: Environment) -> None:
    """A timer's handler that beats a thousand times a second neither breaks a beat nor loses one."""
    worker(
        "import signal\n"
        "fired = 0\n"
        "def handler(number, frame):\n"
        "    global fired\n"
        "    fired += 1\n"
        "    beat(step=-2)\n"
        "beat(step=0)\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "own = 1\n"
        "while fired < 50:\n"
        "    beat(step=own)\n"
        "    own += 1\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "from nvrx_slurm.workload import progress\n"
        "assert progress._words[1] == own + fired, (progress._words[1], own, fired)\n",
        environment,
    )


def test_a_step_that_does_not_fit_is_an_error_in_the_worker(slot: Slot, environment: Environment) -> None:
    """The error names the step; the page keeps the last valid one."""
    said = worker(
        "beat(step=7)\ntry:\n    beat(step=2**65)\nexcept ValueError as error:\n    print(error)\n",
        environment,
    )
    assert said == f"beat: step must be below 2**63, not {2**65}\n"
    assert slot.read().step == 7


def test_the_longest_gap_is_between_two_beats(slot: Slot, environment: Environment) -> None:
    """The worker itself keeps it, since an agent that reads once a second would miss it; the start-up is not a
    gap."""
    took = worker(
        "from time import monotonic_ns\n"
        "from nvrx_slurm.workload import progress\n"
        "times = iter([10**15, 10**15 + 7, 10**15 + 5_007, 10**15 + 5_008])\n"
        "progress.monotonic_ns = lambda: next(times)\n"
        "for step in range(4): beat(step=step)\n"
        "print('done')",
        environment,
    )
    assert took == "done\n"
    assert slot.read().largest_gap_ns == 5_000


def test_importing_it_costs_a_training_nothing() -> None:
    """It imports only a few small modules of the standard library and those of its own package."""
    show = "import sys; print(*sys.modules)"
    bare = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
    brought = set(worker(show, {}).split()) - set(bare.stdout.split())
    own = {name for name in brought if name.startswith("nvrx_slurm.workload.")}
    assert brought - own <= {"nvrx_slurm", "nvrx_slurm.workload", "__future__", "operator", "_operator"}
    assert own <= {f"nvrx_slurm.workload.{name}" for name in ("progress", "sections", "board", "layout")}
