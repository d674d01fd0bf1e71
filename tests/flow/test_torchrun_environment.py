"""A worker's environment, compared with that of torchrun of the same version; and the error file of `@record`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import WorkerFailed
from tests.harness import plan_of
from tests.waiting import STARTS_S

WORKER = Path(__file__).parents[1] / "torchrun_worker.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
OF_EACH_START = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"),
}
"""Names whose values differ between two starts of torchrun, or between two settings."""


@pytest.mark.torch
@pytest.mark.timeout(4 * STARTS_S)
def test_worker_has_torchruns_environment_and_its_error_file_is_read(run_local, tmp_path, monkeypatch):
    """A worker has each of torchrun's variables, with torchrun's value unless it differs by design. A failure's cause
    is the exception that `@record` kept, for a worker whose Python loads no `sitecustomize` (-I), and for a worker of
    a torchrun that is itself a worker."""
    if importlib.util.find_spec("torch") is None and "CI" not in os.environ:
        pytest.skip("torch is not installed; `make test-torch` installs it")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (base := tmp_path / "torchrun").mkdir()
    subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(WORKER), str(base)], check=True, capture_output=True, timeout=STARTS_S
    )
    theirs = json.loads((base / "default-1.json").read_bytes())
    roles = [
        RolePlan(name="direct", command=(sys.executable, "-I", str(WORKER), str(tmp_path), "x"), workers_per_node=2),
        RolePlan(name="nested", command=(*TORCHRUN, "--role=nested", str(WORKER), str(tmp_path), "x")),
    ]
    job = run_local(plan_of(tmp_path, *roles))
    assert job.finish(timeout=STARTS_S) == 0
    failed = [record for record in job.said(WorkerFailed) if record.error]
    assert sorted((each.replica, each.error) for each in failed) == [
        ("direct-0", "ValueError: the data set is empty"),
        ("nested-0", "ValueError: the data set is empty"),
    ], job.story()

    ours = json.loads((tmp_path / "direct-1.json").read_bytes())
    names = {name for name in theirs if name.startswith(("TORCH", "MASTER_", "OMP_")) or "RANK" in name}
    names |= {name for name in theirs if name.startswith("ROLE_") or name.endswith("WORLD_SIZE")}
    assert names - ours.keys() == set()
    assert {name: (ours[name], theirs[name]) for name in names - OF_EACH_START if ours[name] != theirs[name]} == {
        "ROLE_NAME": ("direct", "default"),
        "TORCHELASTIC_USE_AGENT_STORE": ("False", "True"),
    }
