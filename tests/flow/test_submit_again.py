"""The same job submitted twice to a real Slurm: made once, then found in the cache."""

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
HEAVY = {"pydantic", "ruamel", "jinja2", "submitit", "rich", "msgspec", "stamina", "redis"}


def test_a_job_that_is_found_in_the_cache_is_submitted_as_the_one_that_was_made(
    healthy_cluster: DevCluster, tmp_path: Path
) -> None:
    """The same script and plan in both job folders, and what makes them is loaded once."""
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {**os.environ, **healthy_cluster.environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    made, found = (_submit(tmp_path, environment) for _ in range(2))
    assert made.stdout != found.stdout
    for name in ("job.sh", "plan.json"):
        texts = [(tmp_path / "nvrx-jobs" / run.stdout.strip() / name).read_text() for run in (made, found)]
        assert texts[0] == texts[1] != ""
    assert _heavy(made) == {"ruamel", "msgspec"}
    assert _heavy(found) == set()


def _submit(workplace: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "nvrx_slurm", "submit", "job.yaml"]
    return subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, check=True)


def _heavy(run: subprocess.CompletedProcess[str]) -> set[str]:
    return HEAVY & {line.rpartition("|")[2].strip().partition(".")[0] for line in run.stderr.splitlines()}
