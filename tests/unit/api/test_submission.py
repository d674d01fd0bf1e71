"""What a submission leaves in the job's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.api.submission import hand_over, prepare
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.util.files import JobFiles
from tests.unit.jobspec.specs import job_spec


@pytest.mark.parametrize("has_started", [False, True])
def test_the_plan_of_a_batch_host_that_has_started_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    """sbatch's answer may come after the job's start. By then the batch host has settled `spares: 0..2`, and agents
    and controller accept only its plan."""
    spec = job_spec({"name": "a", "command": "x", "spares": "0..2"})
    prepared = prepare(spec, plan(spec, folder=tmp_path), cluster="local")

    def submit(self: LocalCluster, script: str, *, folder: Path, name: str) -> str:
        files = JobFiles(folder / "local-1")
        files.create()
        if has_started:
            files.write_plan_json(b"settled")
        return "local-1"

    monkeypatch.setattr(LocalCluster, "submit", submit)
    hand_over(prepared, cluster="local")
    kept = JobFiles(tmp_path / "local-1").read_plan_json().decode()
    assert kept == ("settled\n" if has_started else f"{prepared.plan_json}\n")
