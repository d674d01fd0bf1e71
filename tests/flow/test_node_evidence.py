"""What a node records of a cycle that failed: its own health, and how far its workers had come."""

from __future__ import annotations

import sys
from pathlib import Path

from nvrx_slurm.jobspec.model import ProgressSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import NodeReady
from tests.fault_jobs import ends_well
from tests.harness import RunningJob, gate_plan, plan_of

PRINTS = """\
import os, sys
first = int(os.environ["NVRX_CYCLE"]) * 100
for step in range(first, first + 50):
    print(f"iteration {step:6d}/ 500000 | loss 1.0", flush=True)
sys.exit(3 if os.environ["NVRX_CYCLE"] == "0" else 0)
"""


def health(job: RunningJob, node: str, cycle: int = 0) -> Path:
    return job.folder.cycle_health("main-0", 0, cycle) / f"{node}.txt"


def test_a_node_whose_workers_fail_records_its_health(run_local, gate, tmp_path):
    """Each node records its health once, beside the logs of the failed cycle, and not for a cycle that ends well."""
    job = run_local(gate_plan(gate, tmp_path, workers=1, spares=0))
    gate.wait(2, cycle=0)[1].go(exit_code=7)
    ends_well(job, gate, workers=2, cycle=1)
    for node in ("n1", "n2"):
        text = health(job, node).read_text()
        assert text.count(f" health: {node}: main-0 cycle 0: its workers are stopped") == 1
        assert " memory: " in text and " load: " in text and f" disk: {job.folder.path}: " in text
        assert not health(job, node, cycle=1).exists()


def test_a_job_that_ends_at_once_still_has_the_nodes_health(run_local, gate, tmp_path):
    """The health is recorded even where the job ends right after the failure."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, workers=1, spares=0, max_restarts=0))
    gate.wait(1, cycle=0)[0].go(exit_code=7)
    assert job.finish() == 1
    assert " health: n1: main-0 cycle 0: " in health(job, "n1").read_text()


def test_progress_is_read_from_what_workers_print(run_local, tmp_path):
    """The step of the last line that matches is reported when the node is ready again."""
    role = RolePlan(name="main", command=(sys.executable, "-c", PRINTS))
    plan = plan_of(tmp_path, role, progress=ProgressSpec(log_pattern="iteration +([0-9]+)/"))
    job = run_local(plan)
    assert job.finish() == 0
    assert [ready.step for ready in job.said(NodeReady)] == [49]
