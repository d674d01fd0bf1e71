"""A rendered script, submitted to a real Slurm with plain sbatch."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.job_index import indexed_jobs
from tests.harness import RunningJob
from tests.slurm_harness import SlurmHandle, nvrx

pytestmark = pytest.mark.slurm(nodes=4)


def test_rendered_script_submitted_with_plain_sbatch_does_the_same(healthy_cluster, gate, tmp_path, monkeypatch):
    """A job needs no command but `render` and plain `sbatch`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "job.yaml"
    path.write_text(f"name: plain\ncommand: {json.dumps(gate.command)}\nnodes: 2\nspares: 1\n")
    env = healthy_cluster.environment()
    script = nvrx("render", path.name, cwd=tmp_path, env=env).stdout
    (tmp_path / "job.sh").write_text(script)
    sent = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert sent.returncode == 0, sent.stderr
    gate.wait(2, cycle=0)
    gate.open()
    job_id = sent.stdout.strip()
    job = RunningJob(JobFolder(tmp_path / "nvrx-jobs" / job_id), SlurmHandle(job_id, healthy_cluster))
    assert job.finish() == 0
    assert [each.folder for each in indexed_jobs(job_id)] == [job.folder.path], "commands find it from any folder"
