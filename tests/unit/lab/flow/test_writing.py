"""A plan becomes a job.yaml that gives the same plan; the differences of two plans become overrides."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import (
    AttributionSpec,
    BackoffSpec,
    DataflowSpec,
    HangSpec,
    ProgressSpec,
    SlackSpec,
    StoreSpec,
)
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.plan import plan as plan_of
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.jobspec.yamlfile import read_yaml
from nvrx_slurm.lab.flow.writing import NOTE, job_yaml, overrides, to_yaml
from nvrx_slurm.lab.plans import plain_bounds

POLICY = RolePlan(name="policy", command=("python", "-c", "print('a: b # c')"), nodes_per_replica=2)
ROLLOUT = RolePlan(
    name="rollout",
    command=("run me",),
    replicas=3,
    workers_per_node=8,
    on_failure="ignore",
    env={"A": "null", "B": ""},
)
BOUNDS = plain_bounds(
    max_restarts=0,
    heartbeat__interval=0.25,
    heartbeat__timeout=90.0,
    heartbeat__startup_timeout=120.0,
    fence_timeout=100.0,
    teardown__stop_signal="SIGINT",
    teardown__checkpoint_signal="SIGUSR1",
    teardown__gpu_memory_below=2 << 30,
    backoff=BackoffSpec(after=2, max=300.0),
    hang=HangSpec(step_timeout=600.0, learn=True, safety_factor=2.5),
)
DECIDED = plain_bounds(
    max_restarts=Allowance(count=10, per_s=86400.0),
    max_job_restarts=Allowance(count=20),
    max_node_losses=Allowance(count=2, per_s=3600.0),
    progress=ProgressSpec(
        max_no_progress_cycles=3, min_progress_steps=10, iteration_file="/ckpt/latest", log_pattern="step ([0-9]+)"
    ),
    attribution=AttributionSpec(
        enable_lib=True,
        enable_mcp=True,
        http_urls=("https://a:1", "https://b:2"),
        timeout=20.0,
        decision_timeout=5.0,
        dry_run=False,
        aggregation="all",
        rules=("/rules.yaml",),
        slack=SlackSpec(channel="#x", token_file="/token"),
        dataflow=DataflowSpec(url="https://c:3", index="i"),
    ),
)


def made(*roles: RolePlan, **rest: object) -> Plan:
    return Plan(
        name="train", roles=roles, workdir="/data", folder="/jobs", **({"fault_tolerance": plain_bounds()} | rest)
    )  # type: ignore[arg-type]


PLANS = [
    made(RolePlan(name="main", command=("python", "train.py"))),
    made(RolePlan(name="main", command=("a",), nodes_per_replica=4, min_nodes=2, workers_per_node=2), spares=2),
    made(RolePlan(name="main", command=("a",), on_failure="fail_job")),
    made(POLICY, ROLLOUT, spares=1, time_limit_s=3600.0, fault_tolerance=BOUNDS),
    made(POLICY, fault_tolerance=DECIDED),
    made(POLICY, store=StoreSpec(url="redis://host:6379/0", password_file="/secret")),
]


def planned(text: str, folder: Path, **flags: object) -> Plan:
    (folder / "job.yaml").write_text(text)
    file = folder / "job.yaml"
    return plan_of(load(file, flags).spec, folder=Path("/jobs"), job_file=file)


@pytest.mark.parametrize("plan", PLANS)
def test_there_and_back(plan, tmp_path):
    """The job.yaml of a plan gives that plan, in any folder."""
    assert planned(job_yaml(plan, "Made of a plan."), tmp_path) == plan


def test_what_differs(tmp_path):
    """Overrides are the job's differences from the file, including defaults that the file changes."""
    theirs = planned(
        "name: train\ncommand: a\nnodes: 4\nspares: 3\nworkdir: /data\nfault_tolerance: {max_restarts: 7}", tmp_path
    )
    ours = made(RolePlan(name="main", command=("b", "c d"), nodes_per_replica=4))
    assert overrides(ours, theirs) == {
        "command": ("b", "c d"),
        "spares": 0,
        "fault_tolerance": {"max_restarts": 3, "attribution": {"enable_lib": False}, "backoff": {"max": "0s"}},
    }
    assert overrides(ours, msgspec.structs.replace(ours, folder="/elsewhere")) == {}


DOCUMENTS = st.recursive(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc$_-", min_size=1), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text("abcdef", min_size=1), DOCUMENTS, min_size=1))
def test_yaml_reads_back(tmp_path_factory, document):
    """Any document is read back unchanged, including text that looks like another type."""
    path = tmp_path_factory.mktemp("yaml") / "document.yaml"
    path.write_text(to_yaml(document))
    assert read_yaml(path).data == document


def test_comments_stand_above():
    """A comment is above its item, and is wrapped."""
    text = to_yaml({NOTE: "Of all.", "faults": [{NOTE: "why " * 30, "do": {"scancel": {}}}], "on": ["dev", "local"]})
    assert text.splitlines() == [
        "# Of all.",
        "faults:",
        "  # " + " ".join(["why"] * 24),
        "  # " + " ".join(["why"] * 6),
        "  - do: {scancel: {}}",
        "on: [dev, local]",
    ]
