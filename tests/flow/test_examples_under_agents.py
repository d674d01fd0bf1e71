"""The examples as jobs: a node dies midway, and the result is the same, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import NodeLost, WorkersStarted
from tests.harness import plan_of
from tests.waiting import STARTS_S, until

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.torch
@pytest.mark.timeout(4 * STARTS_S)
def test_ordinary_torchrun_script_survives_a_node(run_local, tmp_path):
    """An unchanged torch DDP script over gloo loses a node after a checkpoint, and ends with the clean run's
    result."""
    if importlib.util.find_spec("torch") is None and "CI" not in os.environ:
        pytest.skip("torch is not installed; `make test-torch` installs it")
    clean = torch_job(run_local, tmp_path, "clean")
    assert clean.finish(timeout=STARTS_S) == 0
    struck = torch_job(run_local, tmp_path, "struck", "--step-time", "0.02")
    struck.expect(WorkersStarted, node="n2", timeout=STARTS_S)
    struck.agent_pid("n3")
    wait_for_checkpoint(tmp_path / "struck", struck)
    struck.kill_node("n2")
    assert struck.finish(timeout=STARTS_S) == 0
    assert len(struck.said(NodeLost)) == 1
    results = [(tmp_path / name / "result.json").read_bytes() for name in ("clean", "struck")]
    assert results[0] == results[1]


def torch_job(run_local, base, name, *options):
    script = EXAMPLES / "torch_ddp" / "train.py"
    command = (sys.executable, str(script), "--steps", "100", "--checkpoint-dir", str(base / name), *options)
    role = RolePlan(name="main", command=command, nodes_per_replica=2, env={"OMP_NUM_THREADS": "1"})
    return run_local(plan_of(base, role, spares=1, rendezvous__last_call=30.0), job_id=name)


def wait_for_checkpoint(folder, job):
    """Wait until rank 0 has saved a checkpoint."""
    until(lambda: folder.is_dir() and any(folder.iterdir()), f"a checkpoint\n{job.story()}")
