"""The environment that a worker gets: what the user may choose, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.starting import worker_environment
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Assignment
from tests.unit.core.fleet import plan_of


def environment(workers: int = 2, **own: str) -> dict[str, str]:
    assignment = Assignment(
        group_rank=0,
        first_rank=0,
        workers=workers,
        world_size=workers,
        group_world_size=1,
        master_addr="10.0.0.1",
        master_port=1,
        role="main",
    )
    role = RolePlan(name="main", command=("x",), nodes_per_replica=1, workers_per_node=workers, env=own)
    cycle = Cycle("main-0", 0, assignment, began=0.0)
    folder = JobFolder(Path("/jobs/7"))
    return worker_environment(cycle, 0, role, plan=plan_of(role), folder=folder, node="n1", generation=0)


def test_threads_are_limited_where_workers_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS is 1, as torchrun sets it, unless the node has one worker or the user has set the variable."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment()["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(workers=1)
    assert environment(OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in environment()  # the worker inherits it


def test_no_rank_looks_for_the_agents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do not use torchrun's agent store, even if the job was submitted from a worker of torchrun."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert environment()["TORCHELASTIC_USE_AGENT_STORE"] == "False"
