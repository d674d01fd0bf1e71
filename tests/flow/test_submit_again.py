"""The same job submitted twice to a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.lab.devcluster import DevCluster

pytestmark = pytest.mark.slurm

JOB = """\
name: twice
command: ["true"]
nodes: 2
slurm: {extra: {begin: now+1hour}}
"""
HEAVY = {"pydantic", "jinja2", "submitit", "rich", "stamina", "redis", "asyncio"}


def test_a_job_can_be_submitted_twice(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """Both job folders have the same script and plan, and `submit` imports no heavy package."""
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {**os.environ, **healthy_cluster.environment()}
    first, second = (_submit(tmp_path, environment) for _ in range(2))
    assert first.stdout != second.stdout
    for name in ("job.sh", "plan.json"):
        texts = [(tmp_path / "nvrx-jobs" / run.stdout.strip() / name).read_text() for run in (first, second)]
        assert texts[0] == texts[1] != ""
    assert not HEAVY & {line.rpartition("|")[2].strip().partition(".")[0] for line in first.stderr.splitlines()}


def _submit(workplace: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "nvrx_slurm", "submit", "job.yaml"]
    return subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, check=True)
