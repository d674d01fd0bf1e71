"""Training scripts as users of the frameworks write them: after the death of a worker and of a node, the loss is that
of a clean run.

The clean run uses torchrun. The run with faults is a job of two nodes and a hot spare, whose workers have the
variables that Slurm gives to a step with one task per node.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import NodeLost, RendezvousClosed, WorkerFailed, WorkersStarted
from nvrx_slurm.util.clock import SystemClock
from tests.harness import RunningJob, plan_of
from tests.waiting import STARTS_S

SCRIPTS = Path(__file__).parents[1] / "frameworks"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
}
SLURM |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}


@pytest.mark.torch
@pytest.mark.timeout(4 * STARTS_S)
@pytest.mark.parametrize(
    ("script", "needs", "steps"),
    [
        ("ddp_snapshots.py", "torch", [0, 4, 16]),
        ("hf_trainer.py", "transformers", [0, 5, 15]),
        ("with_accelerate.py", "accelerate", [0, 5, 15]),
        ("lightning_fit.py", "lightning", [0, 4, 16]),
    ],
)
def test_framework_ends_with_the_clean_loss_after_a_lost_worker_and_a_lost_node(
    run_local, tmp_path, script, needs, steps
):
    """Each start begins at its step of `steps`, from the checkpoint that it finds. Each of the two failures is
    counted once and as what it is."""
    if importlib.util.find_spec(needs) is None and "CI" not in os.environ:
        pytest.skip(f"{needs} is not installed; `make test-torch` installs it")
    (clean := tmp_path / "clean").mkdir()
    (struck := tmp_path / "struck").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*torchrun, str(SCRIPTS / script), str(clean)], check=True, timeout=STARTS_S)

    command = (sys.executable, str(SCRIPTS / script), str(struck))
    role = RolePlan(
        name="main", command=command, nodes_per_replica=2, env={**SLURM, "OMP_NUM_THREADS": "1", "HOLD_AT": "7,18"}
    )
    job = run_local(plan_of(tmp_path, role, spares=1, max_restarts=Allowance(count=1)))
    job.agent_pid("n3")
    for cycle in range(2):
        wait_for(struck / f"held-{cycle}", job)
        started = job.expect(WorkersStarted, cycle=cycle, node="n2")
        if cycle == 0:
            if needs == "transformers":
                (struck / "checkpoints" / "checkpoint-6").mkdir()  # left by a rank that is killed while it saves
            os.kill(started.pids[1], signal.SIGKILL)
        else:
            job.kill_node("n2")
        job.expect(RendezvousClosed, cycle=cycle + 1)
    assert job.finish(timeout=STARTS_S) == 0
    assert [int(step) for step in (struck / "began").read_text().split()] == steps
    ended, unharmed = (json.loads((folder / "result.json").read_bytes()) for folder in (struck, clean))
    assert ended == unharmed | {"loss": pytest.approx(unharmed["loss"], rel=1e-5)}
    own = [(failed.rank, failed.signal) for failed in job.said(WorkerFailed) if not failed.peer_lost]
    assert own == [(1, signal.SIGKILL)], job.story()
    assert len(job.said(NodeLost)) == 1


def wait_for(mark: Path, job: RunningJob) -> None:
    """Wait until the last rank has stopped at its step."""
    clock = SystemClock()
    deadline = clock.monotonic() + STARTS_S
    while not mark.exists():
        assert clock.monotonic() < deadline and job.process.poll() is None, job.story()
        clock.sleep(0.05)
