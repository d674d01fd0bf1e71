"""The examples as their users start them: real processes, torchrun's environment, real kills."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from nvrx_slurm.lab.devcluster.lifecycle import free_ports
from nvrx_slurm.workload.slot import Slot
from tests.waiting import STARTS_S

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 160
WORLD = 4


class World:
    """All ranks of one training, as child processes. Ranks that still run at the end of the `with` block are
    killed."""

    def __init__(self, size: int, folder: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        script = str(EXAMPLES / "digits" / "train.py")
        self._command = [sys.executable, script, "--checkpoint-dir", str(folder), "--steps", str(STEPS), *options]
        self._size, self._port = size, free_ports(1)[0]
        self._environment = os.environ | (environment or {})
        self.ranks: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        # Rank 0 starts last: the others must wait for a rendezvous that does not exist yet.
        self.ranks = [self._start(rank) for rank in reversed(range(self._size))][::-1]
        return self

    def _start(self, rank: int) -> subprocess.Popen[str]:
        given = {"RANK": rank, "WORLD_SIZE": self._size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
        return subprocess.Popen(
            self._command,
            env=self._environment | {name: str(value) for name, value in given.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __exit__(self, *exception: object) -> None:
        for worker in self.ranks:
            worker.kill()
            worker.communicate()

    def await_step(self, step: int) -> None:
        """Wait until rank 0 has printed this step."""
        output = self.ranks[0].stdout
        assert output is not None
        for line in output:
            if line.startswith(f"step {step} "):
                return
        raise AssertionError(f"rank 0 ended before step {step}: {self.ranks[0].communicate()[1]}")

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each rank, once all have exited by themselves."""
        said = [worker.communicate(timeout=60) for worker in self.ranks]
        return [(worker.returncode, *text) for worker, text in zip(self.ranks, said, strict=True)]


def _train(size: int, folder: Path, *options: str, environment: dict[str, str] | None = None) -> list[str]:
    """Run a training to its end. Returns the lines that rank 0 printed."""
    with World(size, folder, *options, environment=environment) as world:
        ended = world.end()
    assert [(code, errors) for code, _, errors in ended] == [(0, "")] * size
    return ended[0][1].splitlines()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training without a fault."""
    folder = tmp_path_factory.mktemp("clean")
    _train(WORLD, folder)
    return folder


def test_a_training_learns_to_read(clean: Path) -> None:
    """The training ends at its last step, with a low loss and nearly all unseen digits recognised."""
    result = json.loads((clean / "result.json").read_bytes())
    assert result["step"] == STEPS
    assert result["world_size"] == WORLD
    assert result["loss"] < 0.05
    assert result["accuracy"] > 0.95


def test_the_printed_and_the_written_result_agree(tmp_path: Path) -> None:
    """The last line of output and `result.json` agree; the lines before it are at the steps of `--log-every`."""
    *steps, final = _train(2, tmp_path, "--log-every", "80")
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert [line.split()[1] for line in steps] == ["80", "160"]
    assert final == f"final step {STEPS} loss {result['loss']:.10f} accuracy {result['accuracy']:.2f}"


@pytest.mark.parametrize("victim", [0, 3])
def test_an_interrupted_training_ends_as_if_nothing_had_happened(clean: Path, tmp_path: Path, victim: int) -> None:
    """One rank killed midway, all restarted: every bit of the last checkpoint and of the result is the same."""
    with World(WORLD, tmp_path, "--step-time", "0.05") as world:
        world.await_step(60)
        world.ranks[victim].kill()
        ended = world.end()
    assert [code for code, _, _ in ended] == [-signal.SIGKILL if rank == victim else 1 for rank in range(WORLD)]
    assert not (tmp_path / "result.json").exists()

    resumed, *_ = _train(WORLD, tmp_path)
    assert resumed.startswith("resuming after step ")
    assert 60 <= int(resumed.split()[-1]) < STEPS
    for name in ("checkpoint.npy", "result.json"):
        assert (tmp_path / name).read_bytes() == (clean / name).read_bytes()


def test_a_rank_that_loses_a_peer_exits_with_one_clear_line(tmp_path: Path) -> None:
    """Each survivor of a kill prints which rank it lost and when, in one line, without a traceback."""
    with World(3, tmp_path, "--step-time", "0.05") as world:
        world.await_step(20)
        world.ranks[2].kill()
        (_, _, first), (_, _, second), _ = world.end()
    for errors, beginning in ((first, "rank 0: lost rank 2"), (second, "rank 1: lost rank 0")):
        (line,) = errors.splitlines()
        assert line.startswith(beginning)
        assert line.endswith("; leaving")


def test_a_training_goes_on_in_a_smaller_world(clean: Path, tmp_path: Path) -> None:
    """Resumed by fewer ranks, a training takes the same batches and ends with the same loss, except for rounding."""
    with World(WORLD, tmp_path, "--step-time", "0.05") as world:
        world.await_step(60)
        world.ranks[1].kill()
        world.end()
    _train(2, tmp_path)
    small, full = (json.loads((folder / "result.json").read_bytes()) for folder in (tmp_path, clean))
    assert small["world_size"] == 2
    assert small["loss"] == pytest.approx(full["loss"], rel=1e-6)


def test_a_finished_training_that_is_started_again_repeats_no_step(clean: Path, tmp_path: Path) -> None:
    """When only the result was lost, no step is repeated: the training resumes after its last step."""
    (tmp_path / "checkpoint.npy").write_bytes((clean / "checkpoint.npy").read_bytes())
    resuming, final = _train(WORLD, tmp_path)
    assert resuming == f"resuming after step {STEPS}"
    assert final.startswith(f"final step {STEPS} loss ")


def test_under_an_agent_the_first_and_the_last_step_are_reported(tmp_path: Path) -> None:
    """The agent receives the first step as a datagram, and the slot has the last step in the end."""
    slot = Slot.create(tmp_path / "0.0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.settimeout(20.0)
        paths = {"NVRX_BEAT_FILE": str(tmp_path / "0.0"), "NVRX_BEAT_SOCKET": str(tmp_path / "agent")}
        _train(1, tmp_path, environment=paths)
        assert agent.recv(100) == b"0 1"
    assert slot.read()[:2] == (STEPS, STEPS)


def test_it_is_a_plain_script_without_nvrx_slurm(tmp_path: Path) -> None:
    """Where the package cannot be imported, the training still runs."""
    without = "import runpy, sys; sys.modules['nvrx_slurm'] = None; sys.argv.pop(0); sys.path[0] = sys.argv[0][:-9]; "
    command = [sys.executable, "-c", without + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    script = str(EXAMPLES / "digits" / "train.py")
    done = subprocess.run(
        [*command, script, "--checkpoint-dir", str(tmp_path), "--steps", "20"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "final step 20 " in done.stdout


# ------------------------------------------------------------------------------------------------------ torch_ddp


@pytest.fixture
def torchrun(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The command line of real torchrun, one node and two workers, that restarts what dies."""
    if importlib.util.find_spec("torch") is None and "CI" not in os.environ:
        pytest.skip("torch is not installed; `make test-torch` installs it")
    yield [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--max-restarts=3", "--monitor-interval=0.1", str(EXAMPLES / "torch_ddp" / "train.py")),
    ]


# Without the first one torchrun 2.13 cannot restart a standalone world: its store's port is still in use.
TORCH_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.torch
@pytest.mark.timeout(4 * STARTS_S)
def test_an_ordinary_torchrun_script_resumes_to_the_same_result(torchrun: list[str], tmp_path: Path) -> None:
    """Under torchrun itself, a worker killed midway changes nothing of the result."""
    environment = os.environ | TORCH_ENVIRONMENT
    quiet, faulted = tmp_path / "quiet", tmp_path / "faulted"
    subprocess.run([*torchrun, "--checkpoint-dir", str(quiet)], env=environment, timeout=STARTS_S, check=True)

    command = [*torchrun, "--checkpoint-dir", str(faulted), "--step-time", "0.01"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        try:
            lines = _kill_a_worker_at_step(running, 60)
        finally:
            running.kill()
    assert any(line.startswith("resuming after step ") for line in lines)
    assert (faulted / "result.json").read_bytes() == (quiet / "result.json").read_bytes()


def _kill_a_worker_at_step(running: subprocess.Popen[str], step: int) -> list[str]:
    """Kill one of torchrun's workers once rank 0 prints `step`. Returns all lines once torchrun has exited with 0."""
    assert running.stdout is not None
    lines: list[str] = []
    for line in running.stdout:
        lines.append(line)
        if line.startswith(f"step {step} ") and len(lines) == step // 20:
            children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
    assert running.wait(STARTS_S) == 0
    return lines
