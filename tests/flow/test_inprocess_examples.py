"""examples/inprocess as its users start it: real processes, real faults, and the training goes on in the same
processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import NodeLost, RestartDecided, RestartedInProcess, WorkerFailed
from nvrx_slurm.lab.devcluster.lifecycle import free_ports
from nvrx_slurm.report.source import so_far
from tests.slurm_harness import CLI

EXAMPLES = Path(__file__).parents[2] / "examples" / "inprocess"
WORLD, DDP_WORLD = 4, 3
LONGEST_S = 400
"""Eight processes import torch: half a minute on two idle cores, several minutes on busy ones."""


@dataclass(frozen=True)
class Told:
    """What a training has printed, and where its result is."""

    code: int
    lines: list[str]
    folder: Path

    @property
    def result(self) -> dict[str, float]:
        return json.loads((self.folder / "result.json").read_bytes())

    def those(self, beginning: str) -> list[str]:
        return [line for line in self.lines if line.startswith(beginning)]


def run(command: list[str], folder: Path, **environment: str) -> Told:
    """Run the command to its end. No process of it is left, even if it does not end in time."""
    with subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,  # else a line and its end are written apart
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired as late:
            print((late.stdout or b"").decode(errors="replace"))
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    print(said)
    return Told(running.returncode, said.splitlines(), folder)


def launched(script: str, folder: Path, *options: str, world: int = WORLD) -> Told:
    """Run the script by the example's own launcher, which leaves the other processes alive when one dies."""
    place = ["--checkpoint-dir", str(folder)]
    return run([str(EXAMPLES / "launch.py"), str(world), str(EXAMPLES / script), *options, *place], folder)


def faults(*asked: str) -> list[str]:
    return [word for fault in asked for word in ("--fault", fault)]


def assert_kinds(told: Told, *kinds: str) -> None:
    """Assert one restart per kind, each of which names a fault of its kind (and perhaps others that followed from
    it)."""
    restarts = told.those("timeline")
    assert len(restarts) == len(kinds), restarts
    assert [kind for kind, line in zip(kinds, restarts, strict=True) if f"{kind} on rank" not in line] == []


# ---------------------------------------------------------------------------------------------------------- digits


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A training without a fault."""
    told = launched("digits.py", tmp_path_factory.mktemp("clean"), "--steps", "100")
    assert told.code == 0
    assert not told.those("timeline")
    return told


def test_a_training_that_raised_and_hung_ends_as_if_nothing_had_happened(clean, tmp_path):
    """The training restarts inside its processes, and every bit of the result is the same."""
    asked = faults("raise:1:35", "hang:3:65", "raise:0:85")
    told = launched("digits.py", tmp_path, "--steps", "100", *asked)
    assert told.code == 0
    assert told.result == clean.result
    assert told.those("iteration") == [f"iteration {n} begins after step {30 * n - (n > 2) * 10}" for n in range(4)]
    assert_kinds(told, "exception", "soft_timeout", "exception")


def test_a_training_goes_on_without_a_killed_process(clean, tmp_path):
    """The other three ranks go on from the last checkpoint, to the same result except for rounding."""
    told = launched("digits.py", tmp_path, "--steps", "100", *faults("kill:0:55"))
    assert told.code == 0
    assert told.result == pytest.approx(clean.result | {"world_size": WORLD - 1}, rel=1e-6)
    assert told.those("iteration") == ["iteration 0 begins after step 0", "iteration 1 begins after step 50"]
    assert_kinds(told, "terminated")
    assert "the process that began as rank 0 was killed by SIGKILL" in told.lines


def test_under_an_agent_only_a_death_is_handled_by_the_agent(tmp_path):
    """With job.yaml as it is, one journal has the restarts of both levels, each fault is repaired once, and the
    result is the same."""
    jobs = tmp_path / "jobs"
    shutil.copytree(EXAMPLES.parent, tmp_path / "examples", ignore=shutil.ignore_patterns("checkpoints"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*CLI, "run", str(tmp_path / "examples" / "inprocess" / "job.yaml"), "--folder", str(jobs)],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = jobs.iterdir()
    journal = [entry.record for entry in so_far(JobFolder(folder), live=False)]
    inside = [record for record in journal if isinstance(record, RestartedInProcess)]
    assert [record.restart.iteration for record in inside] == [1, 2]
    (failed,) = [record for record in journal if isinstance(record, WorkerFailed)]
    assert (failed.rank, failed.signal) == (2, 9)
    assert len([record for record in journal if isinstance(record, RestartDecided)]) == 1
    assert not [record for record in journal if isinstance(record, NodeLost)]
    result = tmp_path / "examples" / "inprocess" / "checkpoints" / "result.json"
    plain = launched("digits.py", tmp_path / "plain", "--steps", "400")
    assert json.loads(result.read_bytes()) == plain.result


# ------------------------------------------------------------------------------------------------------------- ddp


@pytest.fixture(scope="module")
def clean_ddp(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A DDP training without a fault."""
    if importlib.util.find_spec("torch") is None and "CI" not in os.environ:
        pytest.skip("torch is not installed; `make test-torch` installs it")
    told = launched("ddp.py", tmp_path_factory.mktemp("clean"), world=DDP_WORLD)
    assert told.code == 0
    return told


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)  # each rank imports torch, all at once
def test_ddp_survives_an_exception_a_hang_and_a_kill(clean_ddp, tmp_path):
    """All three faults happen in one run, in the same processes. The ranks that are left end with the result of a run
    without faults."""
    told = launched("ddp.py", tmp_path, *faults("raise:1:25", "hang:2:45", "kill:0:65"), world=DDP_WORLD)
    assert told.code == 0
    assert told.result == pytest.approx(clean_ddp.result | {"world_size": DDP_WORLD - 1}, rel=1e-5)
    assert told.those("iteration") == [f"iteration {n} begins after step {20 * n}" for n in range(4)]
    assert_kinds(told, "exception", "soft_timeout", "terminated")
    assert "the process that began as rank 0 was killed by SIGKILL" in told.lines


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)
def test_ddp_restarts_inside_of_torchruns_workers(clean_ddp, tmp_path):
    """torchrun's workers run on, and it restarts none of them; the result is the same except for rounding."""
    nodes = ["--standalone", f"--nproc-per-node={DDP_WORLD}"]
    command = ["-m", "torch.distributed.run", *nodes, str(EXAMPLES / "ddp.py"), *faults("raise:1:25", "hang:2:45")]
    told = run([*command, "--checkpoint-dir", str(tmp_path)], tmp_path, OMP_NUM_THREADS="1")
    assert told.code == 0
    assert told.those("iteration") == [f"iteration {n} begins after step {20 * n}" for n in range(3)]
    assert told.result == pytest.approx(clean_ddp.result, rel=1e-5)


STRUCK_WHILE_THEY_MEET = """
import os, threading, sys
from datetime import timedelta
import torch.distributed as dist
from nvrx_slurm.inprocess import CallWrapper, RetryController, Wrapper

@Wrapper(
    initialize=RetryController(max_iterations=2),
    soft_timeout=timedelta(seconds=4),
    hard_timeout=timedelta(seconds=60),
    progress_watchdog_interval=timedelta(seconds=0.2),
    monitor_process_interval=timedelta(seconds=0.2),
)
def meet(call: CallWrapper):
    if call.iteration == 0 and os.environ["RANK"] == "1":
        threading.Event().wait()
    where = f"file://{sys.argv[2]}/{call.iteration}"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=12))
    print(f"met {rank} {call.iteration}", flush=True)
    dist.barrier()  # a peer that closes its connections fails the rank that still connects
    dist.destroy_process_group()

meet()
"""


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)
def test_ranks_that_were_interrupted_while_they_met_meet_again(clean_ddp, tmp_path):
    """One rank hangs before init_process_group, the others hang in it. In the next iteration all of them meet."""
    script = tmp_path / "meet.py"
    script.write_text(STRUCK_WHILE_THEY_MEET)
    told = run([str(EXAMPLES / "launch.py"), str(DDP_WORLD), str(script), "", str(tmp_path)], tmp_path)
    assert told.code == 0
    assert sorted(told.those("met")) == [f"met {rank} 1" for rank in range(DDP_WORLD)]


# --------------------------------------------------------------------------------- scripts for nvidia_resiliency_ext

SCRIPT = Path(__file__).parents[1] / "nvrx_script.py"
THEIRS, OURS = "import nvidia_resiliency_ext.inprocess as inprocess", "import nvrx_slurm.inprocess as inprocess"
EXCEPTIONS = "WORKLOAD_EXC:1,ASYNC_EXC:1,SIGNAL_EXC:1"
# Each in an iteration of its own: while the ranks meet again, only a timeout of torch ends their wait for a dead
# rank.
# The last two hang, and end together.
DEATHS = "SIGINT:1,SIGTERM:2,OS_ABORT:3,SEGFAULT:4,SIGKILL:5,LOCK_GIL:6+SIGSTOP:7"


def with_import_changed(folder: Path, form: str, faults: str, world: int) -> Told:
    """Run the whole script with only its import changed."""
    has_wheels = sys.version_info < (3, 13)
    if importlib.util.find_spec("nvidia_resiliency_ext") is None and ("CI" not in os.environ or not has_wheels):
        pytest.skip("nvidia-resiliency-ext is not installed; `make test-torch` installs it, before Python 3.13")
    text = SCRIPT.read_text()
    assert text.count(THEIRS) == 1
    script = folder / "script.py"
    script.write_text(text.replace(THEIRS, OURS))
    command = [str(EXAMPLES / "launch.py"), str(world), str(script), str(folder), form, "20", faults]
    # The script's TCPStore listens at the next port once torch is imported; a connection of another test must not
    # take that port.
    port = free_ports(1)[0] - 1
    return run(command, folder, PYTHONPATH=str(SCRIPT.parents[1]), OMP_NUM_THREADS="1", MASTER_PORT=str(port))


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)
def test_script_of_nvidia_resiliency_ext_survives_each_fault_of_its_injector(tmp_path):
    """All faults except those of GPUs: three exceptions, and seven deaths, each of which costs one rank."""
    told = with_import_changed(tmp_path, "basic", f"{EXCEPTIONS},{DEATHS}", world=8)
    assert told.code == 0
    assert [line.partition(", loss")[0] for line in told.those("done")] == ["done in iteration 9 with 1 ranks"]
    ended = {"SIGINT": [1], "SIGTERM": [2, 6, 7], "SIGABRT": [3], "SIGSEGV": [4], "SIGKILL": [5]}
    assert sorted(told.those("the process that")) == sorted(
        f"the process that began as rank {rank} was killed by {name}"
        for name, ranks in ended.items()
        for rank in ranks
    )
    (warning,) = [line for line in told.lines if "store_kwargs" in line]
    assert "port, timeout ignored" in warning


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)
def test_script_that_wraps_the_loop_alone_keeps_its_own_store(tmp_path):
    """As in nvidia-resiliency-ext's example of optimal usage, model, optimizer and torch's store outlive the
    restarts."""
    told = with_import_changed(tmp_path, "optimal", "WORKLOAD_EXC:1", world=2)
    assert told.code == 0
    assert [line.partition(", loss")[0] for line in told.those("done")] == ["done in iteration 1 with 2 ranks"]


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)
def test_script_with_every_callback_and_a_tree_of_hosts_goes_on_with_its_reserve(tmp_path):
    """As in nvidia-resiliency-ext's advanced example, a host of two ranks that has lost one is excluded as a whole,
    and the host in reserve takes its place. An exception before that restarts all ranks."""
    told = with_import_changed(tmp_path, "advanced", "WORKLOAD_EXC:3,SIGKILL:1", world=6)
    assert [line.partition(", loss")[0] for line in told.those("done")] == ["done in iteration 2 with 4 ranks"]
    assert "the process that began as rank 1 was killed by SIGKILL" in told.lines
    assert any("RankDiscarded: " in line for line in told.lines)
    finalized = {f"finalized on the process of rank {rank}" for rank in range(6)}
    assert finalized <= set(told.lines)


@pytest.mark.torch
@pytest.mark.timeout(LONGEST_S + 40)
@pytest.mark.parametrize("seed", range(2))
def test_script_with_random_faults_ends_as_one_without(tmp_path, seed):
    """As in the application of nvidia-resiliency-ext's tests, exceptions of all three kinds happen on any rank, in
    any order. The loss is that of a run without faults."""
    chance = random.Random(seed)
    kinds = chance.sample(["WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC"], k=3)
    struck = ",".join(f"{kind}:{chance.randrange(3)}" for kind in kinds)
    losses = []
    for name, faults in (("struck", struck), ("clean", "")):
        (tmp_path / name).mkdir()
        told = with_import_changed(tmp_path / name, "basic", faults, world=3)
        assert told.code == 0
        (done,) = told.those("done")
        assert "with 3 ranks" in done
        losses.append(done.partition(", loss")[2])
    assert losses[0] == losses[1]
