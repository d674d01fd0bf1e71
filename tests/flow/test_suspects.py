"""Suspect nodes on a real Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.cluster.slurm_config import named_cluster
from nvrx_slurm.lab.devcluster import DevCluster
from tests.flow.test_submit import nvrx

pytestmark = pytest.mark.slurm


def test_slurm_does_not_give_a_job_the_suspects(
    healthy_cluster: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm excludes the suspects of its cluster, which is known by the name that Slurm itself reports."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, value in healthy_cluster.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job.yaml").write_text("name: picky\ncommand: [sleep, '300']\nnodes: 1\n")
    assert named_cluster() == healthy_cluster.name
    assert nvrx("nodes", "suspect", "n1", "n2", "--why", "fan broken", folder=tmp_path).returncode == 0
    done = nvrx("submit", "--exclude-suspects", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "excluding suspect node n1 (said: fan broken)" in done.stderr
    job_id = json.loads(done.stdout)["job"]
    told = subprocess.run(
        ["scontrol", "show", "job", job_id, "-o"], capture_output=True, text=True, check=True
    ).stdout
    assert nvrx("cancel", job_id, folder=tmp_path).returncode == 0
    assert " ExcNodeList=n[1-2] " in told
