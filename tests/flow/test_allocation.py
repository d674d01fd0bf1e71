"""`nvrx-slurm run` inside salloc and inside a user's sbatch script, on a real Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

import nvrx_slurm as nv
from nvrx_slurm.cli import cli
from nvrx_slurm.controller.failure_detector import TEST_S
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import RendezvousClosed, Shutdown, Signalled
from nvrx_slurm.util.clock import SystemClock
from tests.harness import RunningJob, wait_gone
from tests.slurm_harness import CLI, SlurmHandle, nvrx
from tests.waiting import until

pytestmark = pytest.mark.slurm(nodes=4)
RUN = f"{shlex.join(CLI)} run"


@pytest.fixture
def salloc(healthy_cluster, tmp_path):
    """Starts a command in an allocation of three nodes, as a user would; without `--no-kill`."""
    started = []

    def start(*command: str, nodes: int = 3) -> subprocess.Popen[bytes]:
        with (tmp_path / "out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    ["salloc", f"--nodes={nodes}", *command],
                    cwd=tmp_path,
                    env={**os.environ, **healthy_cluster.environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def the_run(tmp_path, process, number: int = 1) -> RunningJob:
    [folder] = (tmp_path / "nvrx-jobs").glob(f"*-run{number}")
    return RunningJob(JobFolder(folder), process)


def test_plain_salloc_survives_a_killed_node(healthy_cluster, salloc, gate, tmp_path):
    """Slurm would end the allocation when a node dies. `run` removes the dead node from the allocation before that,
    and its ranks move to the spare."""
    process = salloc(*CLI, "run", "--spares", "1", "--", *gate.command)
    workers = gate.wait(2, cycle=0)
    job = the_run(tmp_path, process)
    info = job.folder.read_info()
    assert info is not None
    slurm_id = info.allocation
    assert job.folder.job_id == f"{slurm_id}-run1"
    assert len(info.nodes) == 3
    lost, clock = workers[1].env["NVRX_NODE"], SystemClock()
    here_at = clock.monotonic()
    # A probe proves the node's death only once the controller has tested the node, which takes TEST_S. Without a
    # proof the node is lost after its heartbeat timeout, when Slurm itself misses it.
    until(lambda: clock.monotonic() > here_at + 2 * TEST_S, "the test of probes", timeout=10.0)
    healthy_cluster.kill_node(lost)
    job.expect(RendezvousClosed, cycle=1)
    gate.wait(2, cycle=1)
    handle = SlurmHandle(slurm_id, healthy_cluster)
    until(lambda: handle.show()["NumNodes"] == "2", "the allocation to go on without the lost node")
    assert handle.show()["JobState"] == "RUNNING"
    gate.open()
    assert process.wait(60.0) == 0


@pytest.mark.usefixtures("healthy_cluster")
def test_here_leaves_the_allocation_alone(salloc, gate, tmp_path):
    """The job's nodes are processes of this machine; Slurm starts no step for them."""
    process = salloc("sh", "-c", f"{RUN} --here --nodes 2 -- {shlex.join(gate.command)}; echo run $?", nodes=1)
    workers = gate.wait(2, cycle=0)
    [folder] = (tmp_path / "nvrx-jobs").glob("local-*")
    info = JobFolder(folder).read_info()
    assert info is not None
    assert (info.cluster, info.allocation, info.nodes) == ("local", None, ("n1", "n2"))
    assert not [each.env for each in workers.values() if "SLURM_STEP_ID" in each.env]
    gate.open()
    process.wait(60.0)
    assert "run 0" in (tmp_path / "out").read_text()


def test_scancel_of_the_allocation_ends_the_run_with_143(healthy_cluster, salloc, gate, tmp_path):
    """The run ends with 143, although Slurm signals only the agents: the batch host runs where salloc runs."""
    process = salloc("sh", "-c", f"{RUN} -- {shlex.join(gate.command)}; echo run $?", nodes=1)
    gate.wait(1, cycle=0)
    job = the_run(tmp_path, process)
    info = job.folder.read_info()
    assert info is not None
    SlurmHandle(info.slurm_id, healthy_cluster).cancel()
    assert job.expect(Shutdown).exit_code == 143
    process.wait(60.0)
    assert "run 143" in (tmp_path / "out").read_text()


def test_cancel_from_another_host_ends_the_run_and_leaves_the_allocation(healthy_cluster, salloc, gate, tmp_path):
    """`cancel` on another host sends a request to the controller, since no signal reaches it. The journal records the
    sender."""
    process = salloc("sh", "-c", f"{RUN} -- {shlex.join(gate.command)}; echo run $?; sleep 600", nodes=1)
    workers = gate.wait(1, cycle=0)
    job = the_run(tmp_path, process)
    info = job.folder.read_info()
    assert info is not None
    command = shlex.join([*CLI, "cancel", job.folder.job_id])
    unshare = ["unshare", "--uts"] if os.geteuid() == 0 else ["unshare", "--user", "--map-current-user", "--uts"]
    done = subprocess.run(
        [*unshare, "sh", "-c", f"hostname elsewhere && {command}"],
        cwd=tmp_path,
        env={**os.environ, **healthy_cluster.environment()},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "CANCELLED"), done.stderr
    wait_gone([worker.pid for worker in workers.values()])
    assert (job.expect(Signalled).by or "").endswith("@elsewhere")
    until(lambda: "run 143" in (tmp_path / "out").read_text(), "the run to end with 143")
    assert SlurmHandle(info.slurm_id, healthy_cluster).show()["JobState"] == "RUNNING"
    again = nvrx("cancel", job.folder.job_id, cwd=tmp_path, env=healthy_cluster.environment())
    assert (again.returncode, again.stdout.strip()) == (0, "CANCELLED"), again.stderr


def test_runs_of_one_script_have_their_own_ids_and_nodes(healthy_cluster, gate, tmp_path):
    """Runs of one script have ids of their own. Two runs at the same time share no node, and a third run is
    refused."""
    done = f"{shlex.quote(sys.executable)} -c pass"
    (tmp_path / "mine.sh").write_text(
        "#!/bin/bash\n#SBATCH --ntasks-per-node=2 --cpus-per-task=1\n"  # the layout of other steps
        f"{RUN} --spares 1 -- {done}; echo first $?\n"
        f"{RUN} -N 1 -- {shlex.join(gate.command)} & one=$!\n"
        f"{RUN} -N 2 -- {shlex.join(gate.command)} & two=$!\n"
        f"until [ -e full ]; do sleep 0.1; done; {RUN} -N 1 -- {done}; echo third $?\n"
        "touch refused; wait $one; echo one $?; wait $two; echo two $?\n"
    )
    env = {**os.environ, **healthy_cluster.environment()}
    sent = subprocess.run(
        ["sbatch", "--parsable", "--nodes=3", "--output=out", "mine.sh"],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    job_id = sent.stdout.strip()
    until(lambda: len(list((tmp_path / "nvrx-jobs").glob("*-run[23]/plan.json"))) == 2, "two runs at once")
    (tmp_path / "full").touch()
    until((tmp_path / "refused").exists, "the third run to end")
    gate.open()
    assert SlurmHandle(job_id, healthy_cluster).wait(60.0) == 0
    printed = (tmp_path / "out").read_text()
    assert all(f"{name} {code}\n" in printed for name, code in (("first", 0), ("third", 2), ("one", 0), ("two", 0)))
    placed = {
        number: set(json.loads((tmp_path / "nvrx-jobs" / f"{job_id}-run{number}" / "job.json").read_text())["nodes"])
        for number in (1, 2, 3)
    }
    assert len(placed[1]) == 3
    assert sorted(len(placed[number]) for number in (2, 3)) == [1, 2]
    assert not placed[2] & placed[3]


def test_tasks_of_an_array_are_jobs_with_as_many_spares_as_there_are(healthy_cluster, gate, tmp_path):
    """Of three free nodes, one task gets two (a worker node and a spare) and the other task gets one, without
    spare."""
    env = {**os.environ, **healthy_cluster.environment()}
    others = len(healthy_cluster.nodes) - 3
    taken = subprocess.Popen(["srun", f"--nodes={others}", "--exclusive", "sleep", "600"], env=env)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: many\ncommand: {json.dumps(gate.command)}\nspares: 0..1\n"
        "slurm: {array: 0-1, extra: {exclusive: true}}\n"
    )
    try:
        until(
            lambda: b"R" in subprocess.check_output(["squeue", "--noheader", "--format=%t"], env=env),
            "the other nodes to be taken",
        )
        job_id = nvrx("submit", path.name, cwd=tmp_path, env=healthy_cluster.environment()).stdout.strip()
        folders = [JobFolder(tmp_path / "nvrx-jobs" / f"{job_id}_{task}") for task in (0, 1)]
        until(lambda: all(each.path.is_dir() and each.read_store() for each in folders), "both tasks to run")
        running = [(folder.job_id, "running") for folder in folders]
        until(
            lambda: running == [(each["job"], each["state"]) for each in status_of(job_id, tmp_path, env)["tasks"]],
            "status to show both tasks running",
        )
        assert status_of(job_id, tmp_path, env)["state"] == "running"
        gate.open()
        assert [SlurmHandle(each.job_id, healthy_cluster).wait(60.0) for each in folders] == [0, 0]
    finally:
        taken.terminate()
        taken.wait()
    assert sorted(each.read_plan().spares for each in folders) == [0, 1]
    assert nvrx("wait", job_id, cwd=tmp_path, env=healthy_cluster.environment()).returncode == 0
    array = status_of(job_id, tmp_path, env)
    assert (array["state"], array["exit_code"]) == ("completed", 0)
    shown = nvrx("status", job_id, cwd=tmp_path, env=healthy_cluster.environment()).stdout
    assert [line.split()[3] for line in shown.splitlines() if line.startswith(f"{job_id}_")] == ["completed"] * 2


def test_status_of_an_array_shows_what_each_task_does(healthy_cluster, gate, tmp_path, monkeypatch):
    """`status` shows a failed, a running and a pending task; only Slurm knows of the pending one. After a cancel it
    shows the last two as cancelled, also from another folder."""
    path = tmp_path / "job.yaml"
    worker = json.dumps(["bash", "-c", f"test $SLURM_ARRAY_TASK_ID != 0 && exec {shlex.join(gate.command)}"])
    path.write_text(
        f"name: many\ncommand: {worker}\nslurm: {{array: 0-2%1}}\n"
        "fault_tolerance: {max_restarts: 0, teardown: {grace: 2s}}\n"
    )
    env = healthy_cluster.environment()
    job_id = nvrx("submit", path.name, cwd=tmp_path, env=env).stdout.strip()
    try:
        gate.wait(1, cycle=0, timeout=60.0)
        array = status_of(job_id, tmp_path, env)
        assert array["state"] == "running"
        tasks = {each["job"]: each for each in array["tasks"]}
        assert {job: (each["state"], each["exit_code"]) for job, each in tasks.items()} == {
            f"{job_id}_0": ("failed", 1),
            f"{job_id}_1": ("running", None),
            f"{job_id}_2": ("pending", None),
        }
        assert tasks[f"{job_id}_2"]["pending"] == "JobArrayTaskLimit"
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        in_python = nv.job(job_id, folder=tmp_path / "nvrx-jobs").status()
        assert [each.state for each in in_python.tasks] == ["failed", "running", "pending"]
    finally:
        nvrx("cancel", job_id, cwd=tmp_path, env=env)
    assert nvrx("wait", job_id, cwd=tmp_path, env=env).returncode != 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    array = status_of(job_id, elsewhere, env)
    assert [each["state"] for each in array["tasks"]] == ["failed", "cancelled", "cancelled"]
    assert (array["state"], array["exit_code"]) == ("failed", 1)


def status_of(job_id, folder, env):
    """The object that `status JOB --json` prints."""
    with contextlib.chdir(folder):
        done = CliRunner(env=env).invoke(cli, ["status", job_id, "--json"], standalone_mode=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
