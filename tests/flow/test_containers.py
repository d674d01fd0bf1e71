"""Workers in containers, with the real runtimes. Agents, outside or inside, treat them as any other worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.cli import cli
from nvrx_slurm.diagnostics.stacks.process import process_name
from nvrx_slurm.errors import EXIT_NO_RESTART
from nvrx_slurm.jobspec.container import ContainerSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import Progress, WorkerFailed, WorkersStarted
from tests import container_image
from tests.harness import plan_of, wait_gone
from tests.slurm_harness import nvrx, settled, submit
from tests.slurm_jobs import CALM, GONE_S
from tests.waiting import until

TESTS = Path(__file__).parents[1]
RAISES = 200  # as in container_worker.py
RUNTIMES = ("charliecloud", "podman", "apptainer")


@pytest.fixture(params=RUNTIMES)
def runtime(request, monkeypatch):
    """A runtime of this machine. `make test` installs two of the three; apptainer is used where it is installed."""
    name = request.param
    program = {"charliecloud": "ch-run"}.get(name, name)
    if name == "apptainer" and shutil.which(program) is None:
        pytest.skip("this machine has no apptainer, and Debian 12 no package of it")
    assert shutil.which(program), f"{program} is missing: `make slurm-packages` installs it"
    if why := container_image.refusal(name):
        pytest.skip(why)
    settings = container_image.podman_settings()
    monkeypatch.setenv("CONTAINERS_CONF", str(settings))
    yield name
    settings.unlink()


def container_plan(runtime, gate, base, *, image, env=None, **more):
    role = RolePlan(
        name="main",
        command=("python3", str(TESTS / "container_worker.py"), str(gate.port)),
        workers_per_node=2,
        env=env or {},
        container=ContainerSpec(image=str(image), runtime=runtime, mounts=(f"{TESTS}:{TESTS}",), **more),
    )
    return plan_of(base, role, max_restarts=9, heartbeat__interval=0.2)


def dumped(job):
    """The output of `dump` for the job's workers."""
    asked = ["dump", job.folder.job_id, "--folder", str(job.folder.path.parent), "--timeout", "20s"]
    done = CliRunner().invoke(cli, asked, standalone_mode=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def supervisor_of(worker_pid, agent):
    """The agent's child that is an ancestor of the worker."""
    return next(pid for pid in children(agent) if worker_pid in descendants(pid))


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_worker_in_a_container_is_treated_as_any_other(runtime, run_local, gate, tmp_path):
    """Environment, folders, ids, steps, stacks, signals, exit codes, exceptions, and the effect of the supervisor's
    death are the same as outside of a container."""
    folder = container_image.image_folder()
    image = folder
    if runtime == "podman":
        image = container_image.podman_image(Path(os.environ["CONTAINERS_CONF"]))
    job = run_local(container_plan(runtime, gate, tmp_path, image=image, env={"FOO": "it's $HOME"}))

    there = gate.wait(2, cycle=0)
    env = there[1].env
    assert (env["RANK"], env["WORLD_SIZE"], env["FOO"], env["NVRX_NODE"]) == ("1", "2", "it's $HOME", "n1")
    assert (env["CWD"], env["UID"], env["PYTHON"]) == (str(tmp_path), str(os.getuid()), "/usr/bin/python3")
    assert env.get("FROM_IMAGE") == ("yes" if runtime == "podman" else None)
    assert Path(f"/proc/{there[0].pid}/root/etc/passwd").samefile("/etc/passwd") is False
    if runtime != "apptainer":  # apptainer stays as the worker's parent
        assert job.expect(WorkersStarted, cycle=0).pids == {rank: worker.pid for rank, worker in there.items()}

    # Steps and stacks.
    beat = job.expect(Progress, cycle=0)
    assert beat.step == 41
    assert dumped(job).count("in wait_at_the_gate ──") == 2

    # `exec` runs a command in the container. (Under apptainer the agent sees the worker's parent, not the worker.)
    if runtime != "apptainer":
        asked = ("exec", job.folder.job_id, "--folder", str(job.folder.path.parent), "--rank", "1", "--")
        inode = "import os; print(os.stat('/etc/passwd').st_ino)"
        shown = ("sh", "-c", f'echo $FOO; echo $RANK; pwd; python3 -c "{inode}"; exit 7')
        done = subprocess.run([sys.executable, "-m", "nvrx_slurm", *asked, *shown], capture_output=True, text=True)
        passwd = Path(f"/proc/{there[1].pid}/root/etc/passwd").stat().st_ino
        said = ["it's $HOME", "1", str(tmp_path), str(passwd)]
        assert (done.returncode, done.stdout.splitlines()) == (7, said), done.stderr

    # The exit code, and SIGTERM to the other rank.
    there[0].go(1)
    assert job.expect(WorkerFailed, cycle=0).exit_code == 1
    there = gate.wait(2, cycle=1)
    assert "asked to end" in (job.folder.cycle_logs("main-0", 0, 0) / "rank-1.out").read_text()

    if runtime == "podman":  # it reports the end of a worker late: a peer would fail first
        supervisor = supervisor_of(there[1].pid, job.agent_pid("n1"))
        clients = [pid for pid in descendants(supervisor) if process_name(pid) == "podman"]
        assert len(clients) == 2
        send_all(clients, signal.SIGSTOP)
    os.kill(there[1].pid, signal.SIGKILL)
    assert job.expect(WorkerFailed, cycle=1).signal == signal.SIGKILL

    gate.wait(2, cycle=2)[0].go(RAISES)
    assert "ValueError: as the test has said" in (job.expect(WorkerFailed, cycle=2).error or "")

    # The kernel kills the workers with the supervisor, also while the agent is stopped.
    there = gate.wait(2, cycle=3)
    agent = job.agent_pid("n1")
    supervisor = supervisor_of(there[0].pid, agent)
    os.kill(agent, signal.SIGSTOP)
    try:
        os.kill(supervisor, signal.SIGKILL)
        wait_gone([worker.pid for worker in there.values()])
    finally:
        os.kill(agent, signal.SIGCONT)

    gate.wait(2, cycle=4)
    gate.open()
    assert job.finish() == 0
    assert {path.stat().st_uid for path in job.folder.path.rglob("*")} == {os.getuid()}
    if runtime == "podman":
        left = subprocess.run(
            ["podman", "ps", "-a", "--format={{.Names}}"], capture_output=True, text=True, check=True
        )
        assert job.folder.runtime_name not in left.stdout


@pytest.fixture(params=["charliecloud", "apptainer"])
def inner_runtime(request):
    """A runtime of this machine in which agents may run."""
    program = {"charliecloud": "ch-run"}.get(request.param, request.param)
    if request.param == "apptainer" and shutil.which(program) is None:
        pytest.skip("this machine has no apptainer, and Debian 12 no package of it")
    assert shutil.which(program), f"{program} is missing: `make slurm-packages` installs it"
    if why := container_image.refusal(request.param):
        pytest.skip(why)
    return request.param


def test_agents_run_in_the_container_too(inner_runtime, run_local, gate, tmp_path):
    """With `agents: inside` the agents run on the image's Python. A worker's failure, its stacks, `exec`, the loss of
    a node and the end of the job are the same as outside."""
    image = container_image.package_image(tmp_path)
    (image / "inside").mkdir()
    plan = container_plan(
        inner_runtime, gate, tmp_path, image=image, env={"FOO": "it's $HOME"}, agents="inside", workdir="/inside"
    )
    job = run_local(msgspec.structs.replace(plan, spares=1))

    there = gate.wait(2, cycle=0)
    env, pid = there[1].env, there[1].pid
    assert (env["RANK"], env["FOO"], env["CWD"], env["NVRX_NODE"]) == ("1", "it's $HOME", "/inside", "n1")
    assert job.expect(WorkersStarted, cycle=0).pids == {rank: worker.pid for rank, worker in there.items()}
    agent = job.agent_pid("n1")
    assert Path(f"/proc/{agent}/root/inside").is_dir()  # only the image has it; apptainer binds it to its own root
    assert Path(f"/proc/{agent}/ns/mnt").samefile(f"/proc/{pid}/ns/mnt")

    assert job.expect(Progress, cycle=0).step == 41
    assert dumped(job).count("in wait_at_the_gate ──") == 2
    asked = ("exec", job.folder.job_id, "--folder", str(job.folder.path.parent), "--rank", "1", "--")
    shown = ("sh", "-c", "echo $RANK; pwd; exit 7")
    done = subprocess.run([sys.executable, "-m", "nvrx_slurm", *asked, *shown], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (7, ["1", "/inside"]), done.stderr

    there[0].go(RAISES)
    assert "ValueError: as the test has said" in (job.expect(WorkerFailed, cycle=0).error or "")
    there = gate.wait(2, cycle=1)
    assert "asked to end" in (job.folder.cycle_logs("main-0", 0, 0) / "rank-1.out").read_text()

    # The node's agent dies: its supervisor kills the workers, and the spare takes their ranks.
    os.kill(agent, signal.SIGKILL)
    wait_gone([worker.pid for worker in there.values()])
    there = gate.wait(2, cycle=2)
    assert {worker.env["NVRX_NODE"] for worker in there.values()} == {"n2"}
    gate.open()
    assert job.finish() == 0
    assert {path.stat().st_uid for path in job.folder.path.rglob("*")} == {os.getuid()}


def test_agents_inside_end_with_the_batch_host(inner_runtime, run_local, gate, tmp_path):
    """When the batch host is killed, agents and workers in containers end too."""
    image = container_image.package_image(tmp_path)
    job = run_local(container_plan(inner_runtime, gate, tmp_path, image=image, agents="inside"))
    there = gate.wait(2, cycle=0)
    agent = job.agent_pid("n1")
    job.process.kill()
    wait_gone([agent, *(worker.pid for worker in there.values())])


@pytest.mark.slurm(nodes=6)
def test_an_image_without_the_package_ends_the_job_at_once_under_slurm(healthy_cluster, tmp_path):
    """No agent is started a second time, and `submit --wait` prints one sentence that says what to install."""
    if why := container_image.refusal("charliecloud"):
        pytest.skip(why)
    image = container_image.image_folder()
    (tmp_path / "job.yaml").write_text(
        "name: bare\ncommand: python3 -c pass\nnodes: 2\n"
        f"container: {{image: {image}, runtime: charliecloud, agents: inside}}\n"
    )
    done = nvrx("submit", "--wait", "job.yaml", cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == EXIT_NO_RESTART, done.stderr
    assert done.stderr.count("container.image: its python3") == 1, done.stderr
    assert "pip install nvrx-slurm==" in done.stderr


def test_an_image_without_the_package_is_named(inner_runtime, run_local, gate, tmp_path):
    """The job ends, and its log has one sentence that says what to install in the image."""
    image = container_image.image_folder()
    job = run_local(container_plan(inner_runtime, gate, tmp_path, image=image, agents="inside"))
    assert job.finish() == EXIT_NO_RESTART
    said = [line for line in job.folder.job_log.read_text().splitlines() if "container.image" in line]
    assert len(said) == 1 and "has no nvrx-slurm that works" in said[0] and "pip install nvrx-slurm==" in said[0]


@pytest.mark.slurm(nodes=6)
def test_workers_in_containers_under_slurm(healthy_cluster, gate, tmp_path):
    """By default the agents run outside of the container. When a node dies, its worker ends with it, and a spare runs
    its rank in the image too."""
    if why := container_image.refusal("charliecloud"):
        pytest.skip(why)
    image = container_image.image_folder()
    command = json.dumps(["python3", str(TESTS / "container_worker.py"), str(gate.port)])
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: outside\ncommand: {command}\nnodes: 2\nspares: 1\nstore: {{server: bundled}}\n"
        f"container: {{image: {image}, runtime: charliecloud, mounts: ['{TESTS}']}}\n"
        f"fault_tolerance: {{{CALM}}}\n"
    )
    job = submit(healthy_cluster, path)
    there = gate.wait(2, cycle=0, timeout=GONE_S)
    settled(job, 3)
    agent, lost = job.agent_pid(there[0].env["NVRX_NODE"]), there[1]
    assert Path(f"/proc/{agent}/ns/mnt").samefile("/proc/self/ns/mnt")
    assert not Path(f"/proc/{there[0].pid}/ns/mnt").samefile("/proc/self/ns/mnt")
    healthy_cluster.kill_node(lost.env["NVRX_NODE"])
    wait_gone([lost.pid])
    again = gate.wait(2, cycle=1, timeout=GONE_S)
    assert lost.env["NVRX_NODE"] not in {worker.env["NVRX_NODE"] for worker in again.values()}, job.story()
    assert not any(Path(f"/proc/{each.pid}/ns/mnt").samefile("/proc/self/ns/mnt") for each in again.values())
    gate.open()
    assert job.finish() == 0


@pytest.mark.slurm(nodes=6)
def test_agents_inside_under_slurm(healthy_cluster, gate, tmp_path):
    """A node dies, and a spare takes its rank. Then the batch host's node dies, and the agent that is left requeues
    the job by the scontrol of the host, since the image has none."""
    if why := container_image.refusal("charliecloud"):
        pytest.skip(why)
    image = container_image.package_image(tmp_path)
    command = json.dumps(["python3", str(TESTS / "container_worker.py"), str(gate.port)])
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: inside\ncommand: {command}\nnodes: 2\nspares: 1\nstore: {{server: bundled}}\n"
        f"container: {{image: {image}, runtime: charliecloud, agents: inside, mounts: ['{TESTS}']}}\n"
        f"fault_tolerance: {{{CALM}, control_plane_grace: 10s}}\n"
    )
    job = submit(healthy_cluster, path)
    try:
        there = gate.wait(2, cycle=0, timeout=GONE_S)
        settled(job, 3)
        first, last = (there[rank].env["NVRX_NODE"] for rank in (0, 1))
        agent = job.agent_pid(first)
        assert Path(f"/proc/{agent}/ns/mnt").samefile(f"/proc/{there[0].pid}/ns/mnt")
        assert not Path(f"/proc/{agent}/ns/mnt").samefile("/proc/self/ns/mnt")
        healthy_cluster.kill_node(last)
        there = gate.wait(2, cycle=1, timeout=GONE_S)
        assert last not in {worker.env["NVRX_NODE"] for worker in there.values()}, job.story()
        healthy_cluster.kill_node(first)  # the batch host's node
        until(lambda: job.process.show()["Restarts"] == "1", "Slurm to requeue the job")
        left = next(worker.env["NVRX_NODE"] for worker in there.values() if worker.env["NVRX_NODE"] != first)
        log = job.folder.node_log(left)
        until(lambda: "scontrol: done" in log.read_text(), "the agent to log that scontrol is done")
    finally:
        job.close()
        if job.process.poll() is None:
            job.process.cancel()
