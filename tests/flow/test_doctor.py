"""`nvrx-slurm doctor` on a real Slurm, with a probe of its nodes."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path

from nvrx_slurm.lab.devcluster import DevCluster
from tests.slurm_harness import nvrx

JOB = "name: a\ncommand: x\nnodes: 2\nslurm: {time: 10m}\n"


def test_a_probe_reports_the_facts_of_two_nodes(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """`doctor --probe` reports slurmctld's settings and the facts of both nodes, exits with 0, and leaves no file."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = nvrx("doctor", "--probe", "--json", cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["part"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["KillWait"]["level"] == checks["time"]["level"] == checks["probe"]["level"] == "ok"
    assert {"TCP", "UDP", "clocks", "flock", "nvrx-slurm", "user namespaces"} <= checks.keys()
    assert list((tmp_path / "nvrx-jobs").iterdir()) == []


def test_a_job_that_does_not_fit_ends_with_1(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """A job with more nodes than the cluster has is reported before anything is submitted."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = nvrx("doctor", "--set", "nodes=100", cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail  nodes" in done.stdout


def test_a_probe_that_slurm_refuses_is_a_line_among_the_others(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """A refused probe is one failed check with Slurm's own words, beside the failed check that explains it."""
    (tmp_path / "job.yaml").write_text(JOB)
    gpus = ("--set", "slurm.gpus_per_node=8")
    done = nvrx("doctor", "--probe", "--json", *gpus, cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [check["part"] for check in json.loads(done.stdout)["checks"] if check["level"] == "fail"]
    assert failed == ["GresTypes", "probe"]


def test_limits_of_a_qos_and_of_an_account_are_read_from_slurmdbd(tmp_path: Path) -> None:
    """sbatch refuses a job for the limits that doctor names; within the limits both accept the job."""
    (tmp_path / "job.yaml").write_text(JOB)
    enforced = {"AccountingStorageEnforce": "associations,limits,qos"}
    with DevCluster.up(name="test-limits", nodes=3, accounting=True, settings=enforced) as cluster:
        env = cluster.environment()
        user = pwd.getpwuid(os.getuid()).pw_name

        def sacctmgr(*words: str) -> None:
            subprocess.run(["sacctmgr", "--immediate", *words], env={**os.environ, **env}, check=True)

        def doctor(*flags: str) -> tuple[int, dict[str, dict[str, str]]]:
            done = nvrx("doctor", "--json", *flags, cwd=tmp_path, env=env)
            return done.returncode, {check["part"]: check for check in json.loads(done.stdout)["checks"]}

        sacctmgr("add", "qos", "short", "set", "MaxWall=00:30:00", "MaxTRESPerJob=node=2", "Flags=DenyOnLimit")
        sacctmgr("add", "account", "lab")
        sacctmgr("add", "user", user, "account=lab")
        sacctmgr("modify", "user", user, "where", "account=lab", "set", "qos=normal,short")
        mine = ("--set", "slurm.account=lab", "--set", "slurm.qos=short")
        code, checks = doctor(*mine)
        assert (code, checks["QOS"]["seen"]) == (0, "short: MaxWall=00:30:00, MaxTRES=node=2")
        code, checks = doctor(*mine, "--set", "nodes=3", "--set", "slurm.time=1h")
        assert (code, checks["QOS"]["effect"]) == (1, "Slurm refuses the job")
        assert "node=3, and QOS short allows 2" in checks["QOS"]["seen"]
        assert "MaxWall=00:30:00 of QOS short" in checks["time"]["seen"]
        refused = nvrx("submit", *mine, "--set", "nodes=3", "job.yaml", cwd=tmp_path, env=env)
        assert refused.returncode != 0, refused.stdout
        assert doctor("--set", "slurm.account=other")[1]["account"]["level"] == "fail"
        assert nvrx("submit", "--set", "slurm.account=other", "job.yaml", cwd=tmp_path, env=env).returncode != 0
        taken = nvrx("submit", *mine, "job.yaml", cwd=tmp_path, env=env)
        assert taken.returncode == 0, taken.stderr
