"""JobSpec → Plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.journal.records import (
    BackoffPlan,
    FaultTolerance,
    HangBounds,
    plan_from_json,
    plan_to_json,
)
from nvrx_slurm.journal.verdicts import AttributionPlan

Write = Callable[[str], Path]


def test_a_plain_job_is_one_role_of_one_replica(write: Write, tmp_path: Path) -> None:
    """What is true of a job with roles is true of a plain one: its nodes are one replica of the role `main`."""
    spec = load(
        write("name: a\ncommand: x\nnodes: 3\nspares: 2\nmin_nodes: 2\nworkers_per_node: 4\nenv: {A: 1}\n")
    ).spec
    made = plan(spec, folder=Path("jobs"))
    (role,) = made.roles
    assert (role.name, role.replicas, role.nodes_per_replica, role.min_nodes) == ("main", 1, 3, 2)
    assert (role.workers_per_node, role.env, made.active_nodes, made.total_nodes) == (4, {"A": "1"}, 3, 5)
    assert made.folder == str(tmp_path / "jobs")


def test_a_role_adds_to_the_jobs_environment(write: Write) -> None:
    """Workers see the job's variables, and their role's on top."""
    spec = load(write("name: a\nenv: {A: 1, B: 1}\nroles: {p: {command: x, env: {B: 2}}, q: {command: y}}\n")).spec
    p, q = plan(spec, folder=Path("jobs")).roles
    assert (p.env, q.env) == ({"A": "1", "B": "2"}, {"A": "1", "B": "1"})


def test_paths_count_from_job_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`workdir` and `password_file` count from the file that says them; without `workdir` it is where you are."""
    (tmp_path / "there").mkdir()
    job = tmp_path / "there" / "job.yaml"
    job.write_text("name: a\ncommand: x\nworkdir: w\nstore: {url: 'redis://h', password_file: p}\n")
    monkeypatch.chdir(tmp_path)
    made = plan(load(job).spec, folder=Path("jobs"), job_file=job)
    assert made.workdir == str(tmp_path / "there" / "w")
    assert made.store_password_file == str(tmp_path / "there" / "p")
    job.write_text("name: a\ncommand: x\n")
    assert plan(load(job).spec, folder=Path("jobs"), job_file=job).workdir == str(tmp_path)


def test_the_defaults_of_both_sides_agree(write: Write) -> None:
    """A plan made from a job.yaml without bounds has those that the records default to; but it asks the rules, and
    slows a crash loop down: a plan of an older version, which does not say so, did not."""
    made = plan(load(write("name: a\ncommand: x\n")).spec, folder=Path("jobs"))
    assert made.fault_tolerance == FaultTolerance(attribution=AttributionPlan(enable_lib=True), backoff=BackoffPlan())


@pytest.mark.parametrize("said", ["off", "0", "false", "{max: 0}", "{max: 0s, after: 2}"])
def test_the_back_off_can_be_turned_off(write: Write, said: str) -> None:
    """In a word, or by a longest pause of nothing; as a whole it can also be set by a flag."""
    spec = load(write(f"name: a\ncommand: x\nfault_tolerance: {{backoff: {said}}}\n")).spec
    assert plan(spec, folder=Path("jobs")).fault_tolerance.backoff is None
    spec = load(write("name: a\ncommand: x\n"), [("fault_tolerance.backoff", "--set", "off")]).spec
    assert plan(spec, folder=Path("jobs")).fault_tolerance.backoff is None


def test_every_bound_reaches_the_plan(write: Write) -> None:
    """Each key below fault_tolerance sets its own field of the plan, in seconds or bytes."""
    bounds = (
        "{max_restarts: 1, quarantine_after: 2, control_plane_grace: 40s, fence_timeout: 30.5s,"
        " heartbeat: {interval: 4s, timeout: 5s, startup_timeout: 6s}, rendezvous: {join_timeout: 7s, last_call: 8s},"
        " teardown: {grace: 9s, stop_signal: INT, checkpoint_signal: usr2, checkpoint_timeout: 10s,"
        " gpu_memory_below: 1.5GiB, gpu_reclaim_timeout: 11s}, hang: {startup_timeout: 12s, step_timeout: 13s,"
        " no_output: 14s, exit_skew: 15s, learn: true, safety_factor: 1.5, warmup: 16},"
        " backoff: {after: 17, within: 18s, initial: 19s, max: 20s},"
        " attribution: {decision_timeout: 6s, enable_lib: false}}"
    )
    spec = load(write(f"name: a\ncommand: x\nfault_tolerance: {bounds}\n")).spec
    assert plan(spec, folder=Path("jobs")).fault_tolerance == FaultTolerance(
        max_restarts=1, quarantine_after=2, control_plane_grace_s=40, fence_timeout_s=30.5,
        heartbeat_interval_s=4, heartbeat_timeout_s=5, startup_timeout_s=6, join_timeout_s=7, last_call_s=8,
        teardown_grace_s=9, stop_signal="SIGINT", checkpoint_signal="SIGUSR2", checkpoint_timeout_s=10,
        attribution=AttributionPlan(decision_timeout_s=6), gpu_memory_below_bytes=3 << 29, gpu_reclaim_timeout_s=11,
        hang=HangBounds(
            startup_s=12, step_s=13, no_output_s=14, exit_skew_s=15, learn=True, safety_factor=1.5, warmup=16
        ),
        backoff=BackoffPlan(after=17, within_s=18, initial_s=19, max_s=20),
    )  # fmt: skip


def test_the_plan_survives_its_file(write: Write) -> None:
    """Whatever stands in the command and the environment is the same after plan.json."""
    hostile = "a 'b' \"c\" $(d) `e` \\ ; # % é\U0001f600 \t"
    spec = load(write("name: a\ncommand: x\n"), {"command": ["x", hostile, ""], "env.A": hostile + "\n"}).spec
    made = plan(spec, folder=Path("jobs"))
    assert plan_from_json(plan_to_json(made)) == made
    assert made.roles[0].command == ("x", hostile, "")


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\udcff"])
def test_a_folder_that_no_log_line_can_name_is_refused(write: Write, name: str) -> None:
    """Control characters and bytes that are no text in the job folder's path are an error, not a surprise later."""
    spec = load(write("name: a\ncommand: x\n")).spec
    with pytest.raises(ConfigError, match=r"the job folder is .* choose one whose path is printable text"):
        plan(spec, folder=Path(name))
