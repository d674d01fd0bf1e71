"""JobSpec → Plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import BackoffSpec, FaultToleranceSpec, LeaseSpec
from nvrx_slurm.jobspec.plan import RolePlan, plan, plan_from_json, plan_to_json
from nvrx_slurm.jobspec.script import sbatch_flags
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.lab.plans import plain_bounds

Write = Callable[[str], Path]


def test_a_plain_job_is_one_role_of_one_replica(write: Write, tmp_path: Path) -> None:
    """A job without roles is planned as one replica of the role `main`, with all its nodes."""
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


def test_unlimited_time_is_asked_for_and_bounds_nothing(write: Write) -> None:
    """`UNLIMITED` goes to sbatch, and the plan of the job has no time limit."""
    spec = load(write("name: a\ncommand: x\nslurm: {time: unlimited}\n")).spec
    made = plan(spec, folder=Path("jobs"))
    assert made.time_limit_s is None
    assert "--time=UNLIMITED" in sbatch_flags(spec, made)


def test_a_tilde_is_the_home(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each path that the job's processes use, as in those of containers and attribution, `~` is the home
    directory."""
    monkeypatch.setenv("HOME", "/home/me")
    job = write("name: a\nworkdir: ~/w\nlease: {file: ~/l}\nroles: {p: {command: x, workdir: ~/p}}\n")
    made = plan(load(job).spec, folder=Path("jobs"), job_file=job)
    assert (made.workdir, made.roles[0].workdir) == ("/home/me/w", "/home/me/p")
    assert made.lease == LeaseSpec(file="/home/me/l")


def test_paths_count_from_job_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`workdir` and `password_file` count from the folder of job.yaml; without `workdir` it is the current folder."""
    (tmp_path / "there").mkdir()
    job = tmp_path / "there" / "job.yaml"
    job.write_text("name: a\ncommand: x\nworkdir: w\nstore: {url: 'redis://h', password_file: p}\n")
    monkeypatch.chdir(tmp_path)
    made = plan(load(job).spec, folder=Path("jobs"), job_file=job)
    assert made.workdir == str(tmp_path / "there" / "w")
    assert made.store.password_file == str(tmp_path / "there" / "p")
    job.write_text("name: a\ncommand: x\n")
    assert plan(load(job).spec, folder=Path("jobs"), job_file=job).workdir == str(tmp_path)


def test_a_percent_sign_of_a_folder_is_no_pattern(tmp_path: Path) -> None:
    """`output` may have sbatch's patterns; the folder that it counts from has none."""
    file = tmp_path / "100%j" / "job.yaml"
    file.parent.mkdir()
    file.write_text("name: a\ncommand: x\noutput: logs/%j.out\n")
    made = plan(load(file).spec, folder=tmp_path, job_file=file)
    assert made.output == f"{tmp_path}/100%%j/logs/%j.out"


def test_a_plan_nests_as_job_yaml_does(write: Write) -> None:
    """plan.json has the blocks of the model, without the values that are at their default."""
    said = "fault_tolerance: {heartbeat: {timeout: 20s}}\nstore: {server: bundled}\n"
    made = plan(load(write(f"name: a\ncommand: x\n{said}")).spec, folder=Path("jobs"))
    document = msgspec.json.decode(plan_to_json(made))
    assert document["fault_tolerance"] == {"heartbeat": {"timeout": 20.0}}
    assert document["store"] == {"server": "bundled"}


def test_a_plan_of_version_1_is_read() -> None:
    """A job that was submitted before an upgrade can be requeued after it, with the defaults of its own version."""
    flat = {
        "name": "a", "workdir": "/w", "folder": "/f",
        "roles": [{"name": "main", "command": ["x"], "env": {"A": "1"}}],
        "fault_tolerance": {
            "max_restarts": 2, "max_restarts_per_s": 60.0, "max_job_restarts": {"count": 9},
            "heartbeat_interval_s": 2.0, "startup_timeout_s": 90.0, "fence_timeout_s": 40.0, "join_timeout_s": 5.0,
            "teardown_grace_s": 3.0, "stop_signal": "SIGINT", "gpu_memory_below_bytes": 1 << 30,
            "hang": {"step_s": 7.0, "least_s": 1.0}, "progress": {"max_cycles": 4},
            "attribution": {
                "attrsvc_url": "http://h", "timeout_s": 8.0,
                "llm": {"url": "http://l", "model": "m", "timeout_s": 4.0},
            },
        },
        "store_url": "redis://h", "store_namespace": "me", "lease": {"file": "/l", "timeout_s": 30.0},
    }  # fmt: skip
    made = plan_from_json(msgspec.json.encode(flat))
    assert made.fault_tolerance == plain_bounds(
        max_restarts=Allowance(count=2, per_s=60.0),
        max_job_restarts=9,
        heartbeat__interval=2.0,
        heartbeat__startup_timeout=90.0,
        fence_timeout=40.0,
        rendezvous__join_timeout=5.0,
        teardown__grace=3.0,
        teardown__stop_signal="SIGINT",
        teardown__gpu_memory_below=1 << 30,
        hang__step_timeout=7.0,
        progress__max_no_progress_cycles=4,
        attribution__attrsvc_url="http://h",
        attribution__timeout=8.0,
        attribution__llm={"url": "http://l", "model": "m", "timeout": 4.0},
    )
    assert (made.store.url, made.store.namespace, made.store.server) == ("redis://h", "me", "auto")
    assert made.lease == LeaseSpec(file="/l", timeout=30.0)
    assert made.roles == (RolePlan(name="main", command=("x",), env={"A": "1"}),)
    assert plan_from_json(plan_to_json(made)) == made


def test_a_plan_of_version_1_with_a_back_off_keeps_it() -> None:
    """The defaults of its back-off are those of the current version."""
    said = {"backoff": {"within_s": 5.0}, "attribution": {"enable_lib": True}}
    flat = {"name": "a", "roles": [], "workdir": "/w", "folder": "/f", "fault_tolerance": said}
    bounds = plan_from_json(msgspec.json.encode(flat)).fault_tolerance
    assert bounds == FaultToleranceSpec(backoff=BackoffSpec(within=5.0))


@pytest.mark.parametrize("said", ["off", "0", "false", "{max: 0}", "{max: 0s, after: 2}"])
def test_the_back_off_can_be_turned_off(write: Write, said: str) -> None:
    """`off`, or a longest pause of zero, turns it off; a flag can set the block as a whole."""
    spec = load(write(f"name: a\ncommand: x\nfault_tolerance: {{backoff: {said}}}\n")).spec
    assert plan(spec, folder=Path("jobs")).fault_tolerance.backoff.max == 0
    spec = load(write("name: a\ncommand: x\n"), [("fault_tolerance.backoff", "--set", "off")]).spec
    assert plan(spec, folder=Path("jobs")).fault_tolerance.backoff.max == 0


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
    assert msgspec.to_builtins(plan(spec, folder=Path("jobs")).fault_tolerance) == {
        "max_restarts": {"count": 1}, "quarantine_after": 2, "control_plane_grace": 40.0, "fence_timeout": 30.5,
        "heartbeat": {"interval": 4.0, "timeout": 5.0, "startup_timeout": 6.0},
        "rendezvous": {"join_timeout": 7.0, "last_call": 8.0},
        "teardown": {
            "grace": 9.0, "stop_signal": "SIGINT", "checkpoint_signal": "SIGUSR2", "checkpoint_timeout": 10.0,
            "gpu_memory_below": 3 << 29, "gpu_reclaim_timeout": 11.0,
        },
        "hang": {
            "startup_timeout": 12.0, "step_timeout": 13.0, "no_output": 14.0, "exit_skew": 15.0, "learn": True,
            "safety_factor": 1.5, "warmup": 16,
        },
        "backoff": {"after": 17, "within": 18.0, "initial": 19.0, "max": 20.0},
        "attribution": {"decision_timeout": 6.0, "enable_lib": False},
    }  # fmt: skip


def test_the_plan_survives_its_file(write: Write) -> None:
    """Any command and environment are the same after plan.json is read back."""
    hostile = "a 'b' \"c\" $(d) `e` \\ ; # % é\U0001f600 \t"
    spec = load(write("name: a\ncommand: x\n"), {"command": ["x", hostile, ""], "env.A": hostile + "\n"}).spec
    made = plan(spec, folder=Path("jobs"))
    assert plan_from_json(plan_to_json(made)) == made
    assert made.roles[0].command == ("x", hostile, "")


@pytest.mark.parametrize("name", ["a\nb", "a\x7f", "a\udcff"])
def test_a_folder_that_no_log_line_can_name_is_refused(write: Write, name: str) -> None:
    """Control characters and bytes that are no text in the job folder's path are an error at once, not at a later log
    line."""
    spec = load(write("name: a\ncommand: x\n")).spec
    with pytest.raises(ConfigError, match=r"the job folder is .* choose one whose path is printable text"):
        plan(spec, folder=Path(name))
