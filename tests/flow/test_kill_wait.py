"""A grace that does not fit into the cluster's KillWait."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.devcluster.configuration import KILL_WAIT_S
from tests.slurm_harness import SlurmHandle, nvrx

pytestmark = pytest.mark.slurm


def job_yaml(folder: Path, grace: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(f"name: a\ncommand: 'true'\nfault_tolerance: {{teardown: {{grace: {grace}}}}}\n")
    return path


def test_submit_says_what_kill_wait_leaves(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """One line on stderr has the grace, KillWait and the time that workers get. The job is submitted anyway."""
    path = job_yaml(tmp_path, "1m")
    done = nvrx("submit", path.name, cwd=tmp_path, env=healthy_cluster.environment())
    left = f"{grace_within(KILL_WAIT_S):g}s"
    assert done.stdout.strip().isdigit(), done.stderr
    assert (
        f"teardown.grace is 60s, and KillWait={KILL_WAIT_S} of this cluster leaves {left}: when the job is cancelled"
        f" or preempted, workers get {left}\n"
    ) in done.stderr


def test_a_grace_that_fits_is_not_mentioned(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """`submit` prints nothing about KillWait, and the batch host writes KillWait to job.json for the agents."""
    path = job_yaml(tmp_path, "1s")
    done = nvrx("submit", path.name, cwd=tmp_path, env=healthy_cluster.environment())
    assert "KillWait" not in done.stderr
    job_id = done.stdout.strip()
    assert SlurmHandle(job_id, healthy_cluster).wait(60) == 0
    info = JobFolder(tmp_path / "nvrx-jobs" / job_id).read_info()
    assert info is not None
    assert info.kill_wait_s == KILL_WAIT_S
