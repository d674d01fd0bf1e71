"""`nvrx-slurm doctor` on a real Slurm, with a probe of its nodes."""

from __future__ import annotations

import json
from pathlib import Path

from nvrx_slurm.lab.devcluster import DevCluster
from tests.slurm_harness import nvrx

JOB = "name: a\ncommand: x\nnodes: 2\nslurm: {time: 10m}\n"


def test_a_probe_tells_what_two_nodes_are_like(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """The settings that slurmctld shows, the facts of both nodes, exit code 0; and no file of it stays."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = nvrx("doctor", "--probe", "--json", cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["part"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["KillWait"]["level"] == checks["time"]["level"] == checks["probe"]["level"] == "ok"
    assert {"TCP", "UDP", "clocks", "flock", "nvrx-slurm", "user namespaces"} <= checks.keys()
    assert list((tmp_path / "nvrx-jobs").iterdir()) == []


def test_a_job_that_does_not_fit_ends_with_1(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """More nodes than there are: told before anything is submitted."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = nvrx("doctor", "--set", "nodes=100", cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail  nodes" in done.stdout


def test_a_probe_that_slurm_refuses_is_a_line_among_the_others(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """Slurm's own words, beside the setting that explains them."""
    (tmp_path / "job.yaml").write_text(JOB)
    gpus = ("--set", "slurm.gpus_per_node=8")
    done = nvrx("doctor", "--probe", "--json", *gpus, cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [check["part"] for check in json.loads(done.stdout)["checks"] if check["level"] == "fail"]
    assert failed == ["GresTypes", "probe"]
