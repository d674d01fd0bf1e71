"""The development cluster, for real: daemons, jobs, and node losses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.lab.devcluster import DevCluster, names, places, programs, remove
from nvrx_slurm.lab.devcluster.daemons import MARK, living, recorded
from nvrx_slurm.lab.devcluster.processes import environment_of, kill, read_table
from nvrx_slurm.lab.devcluster.spec import of_cluster
from nvrx_slurm.util.clock import SystemClock
from tests.waiting import until

pytest_plugins = ["tests.slurm_cluster"]
pytestmark = pytest.mark.slurm(nodes=6)

NOTICED_S = 90.0  # slurmctld marks a silent node as down after 15 to 20 s

# Each task leaves a detached process behind, makes a file with its node's name, and runs until it reads from its
# pipe.
TASK = """\
(setsid tail -f /dev/null >/dev/null 2>&1 &)
exec 3<> {folder}/pipe-$SLURMD_NODENAME  # for writing too: then opening never blocks, frozen or not
touch {folder}/started-$SLURMD_NODENAME
read -r _ <&3
touch {folder}/finished-$SLURMD_NODENAME
"""
SCRIPT = """\
#!/bin/bash
srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task=1 bash {folder}/task.sh &
wait $!
exit 0
"""


@pytest.fixture
def small() -> Iterator[DevCluster]:
    """A cluster of two nodes that a test may ruin."""
    with DevCluster.up(name="test-small", nodes=2) as cluster:
        yield cluster


class Job:
    """A batch job with a task on each of its nodes."""

    def __init__(self, cluster: DevCluster, folder: Path, nodes: int) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "task.sh").write_text(TASK.format(folder=folder))
        (folder / "job.sh").write_text(SCRIPT.format(folder=folder))
        for node in cluster.nodes:
            os.mkfifo(folder / f"pipe-{node}")
        options = ["--parsable", f"--nodes={nodes}", "--no-kill", f"--output={folder}/out"]
        self.id = programs.ask(cluster.environment(), "sbatch", *options, str(folder / "job.sh")).strip()
        until(lambda: len(self.seen("started")) == nodes, f"{nodes} tasks to start")

    def seen(self, event: str) -> set[str]:
        return {path.name.partition("-")[2] for path in self.folder.glob(f"{event}-*")}

    def go(self) -> None:
        """Let every task end that still waits."""
        for pipe in self.folder.glob("pipe-*"):
            with contextlib.suppress(OSError):  # no reader: the node is dead, or not of this job
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"go\n")
                os.close(descriptor)

    def state(self) -> str:
        environment = self.cluster.environment()
        return programs.ask(environment, "squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T").strip()


def test_a_job_runs_on_all_six_nodes(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """Six nodes run one task each of the same step, each under its own name."""
    job = Job(healthy_cluster, tmp_path, nodes=6)
    assert job.seen("started") == set(healthy_cluster.nodes)
    job.go()
    until(lambda: job.state() == "COMPLETED", "the job to complete")
    assert job.seen("finished") == set(healthy_cluster.nodes)


def test_a_killed_node_takes_all_its_processes_along_and_no_others(
    healthy_cluster: DevCluster, tmp_path: Path
) -> None:
    """Detached processes die too, the other tasks live on, Slurm sees the node go down, and the job completes."""
    job = Job(healthy_cluster, tmp_path, nodes=6)
    victims = set(healthy_cluster.node_processes("n3"))
    others = set().union(*(healthy_cluster.node_processes(n) for n in healthy_cluster.nodes if n != "n3"))
    assert set(healthy_cluster.kill_node("n3")) >= victims
    alive = read_table().keys()
    assert not victims & alive
    assert others <= alive
    assert healthy_cluster.node_processes("n3") == []
    until(lambda: programs.node_states(healthy_cluster.environment())["n3"].startswith("down"), "down", NOTICED_S)
    assert job.state() == "RUNNING"
    job.go()
    until(lambda: job.state() == "COMPLETED", "the job to complete")
    assert job.seen("finished") == set(healthy_cluster.nodes) - {"n3"}


def test_marking_a_killed_node_down_spares_the_wait(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """Once the dead node is marked down in slurmctld, the job's step ends without it."""
    job = Job(healthy_cluster, tmp_path, nodes=3)
    (victim,) = {"n2"} & job.seen("started")
    healthy_cluster.kill_node(victim)
    healthy_cluster.mark_down(victim)
    job.go()
    until(lambda: job.state() == "COMPLETED", "the job to complete")


def test_a_restored_node_runs_jobs_again(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """After kill and restore, a job over all nodes runs."""
    healthy_cluster.kill_node("n5")
    healthy_cluster.mark_down("n5")
    healthy_cluster.restore_node("n5")
    job = Job(healthy_cluster, tmp_path, nodes=6)
    assert "n5" in job.seen("started")


def test_a_stopped_node_freezes_and_goes_on_where_it_was(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """Frozen processes are alive and do nothing; restored, they finish their work."""
    job = Job(healthy_cluster, tmp_path, nodes=6)
    frozen = healthy_cluster.stop_node("n4")
    assert len(frozen) >= 4  # slurmd, slurmstepd, the task, and what it detached
    table = read_table()
    assert {table[pid].state for pid in frozen} == {"T"}
    job.go()
    until(lambda: len(job.seen("finished")) == 5, "the other tasks to finish")
    assert "n4" not in job.seen("finished")
    healthy_cluster.restore_node("n4")
    until(lambda: job.state() == "COMPLETED", "the job to complete")
    assert "n4" in job.seen("finished")


def test_a_node_is_restored_while_a_job_waits_for_it(healthy_cluster: DevCluster) -> None:
    """A frozen node that backfill has reserved for a pending job, with the state `planned`, can be restored."""
    environment = healthy_cluster.environment()
    options = ["--exclusive", "--output=/dev/null", "--time=5"]
    programs.ask(environment, "sbatch", *options, "--nodelist=n1", "--wrap=sleep 100")
    programs.ask(environment, "sbatch", *options, "--nodes=6", "--wrap=true")
    until(lambda: programs.node_states(environment)["n2"] == "planned", "Slurm to plan the second job")
    healthy_cluster.stop_node("n2")
    healthy_cluster.restore_node("n2")


def test_heal_ends_jobs_and_restores_every_node(healthy_cluster: DevCluster, tmp_path: Path) -> None:
    """After `heal` every node is idle and runs nothing but its slurmd, also one that was killed or stopped."""
    Job(healthy_cluster, tmp_path, nodes=6)
    healthy_cluster.kill_node("n2")
    healthy_cluster.stop_node("n6")
    healthy_cluster.heal()
    status = healthy_cluster.status()
    assert status.healthy
    assert [(node.slurm_state, node.processes) for node in status.nodes] == [("idle", 1)] * 6


def test_two_clusters_live_side_by_side(slurm_cluster: DevCluster, small: DevCluster) -> None:
    """Two clusters share no port and no process, and each lists its own nodes."""
    assert len(programs.node_states(slurm_cluster.environment())) == 6
    assert len(programs.node_states(small.environment())) == 2
    table = read_table()
    assert not of_cluster(slurm_cluster.spec, table) & of_cluster(small.spec, table)
    ports = [port for spec in (slurm_cluster.spec, small.spec) for port in (spec.controller_port, *spec.node_ports)]
    assert len(ports) == len({*ports}) == 2 + 6 + 2
    assert {"test-small", slurm_cluster.name} <= set(names())


def test_down_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """Daemons, steps, tasks and what they detached are gone, and both folders too."""
    cluster = DevCluster.up(name="test-gone", nodes=2)
    Job(cluster, tmp_path, nodes=2)
    pids = of_cluster(cluster.spec, read_table())
    assert len(pids) > len(cluster.spec.daemons)
    cluster.down()
    assert not pids & read_table().keys()
    assert not cluster.spec.places.state.exists()
    assert not cluster.spec.places.runtime.exists()


def test_down_works_after_the_daemons_were_killed(tmp_path: Path) -> None:
    """`down` still finds and ends steps and tasks whose slurmd is dead."""
    cluster = DevCluster.up(name="test-half", nodes=2)
    Job(cluster, tmp_path, nodes=2)
    pids = of_cluster(cluster.spec, read_table())
    daemons = set(living(cluster.spec.places, read_table()).values())
    kill(lambda table: daemons & table.keys(), SystemClock())
    assert not cluster.status().healthy
    cluster.down()
    # a task's detached process without a slurmstepd is found by its environment
    assert not pids & read_table().keys()


def test_down_works_when_cluster_json_is_damaged(small: DevCluster) -> None:
    """`remove` finds the daemons by their records, and leaves nothing."""
    pids = of_cluster(small.spec, read_table())
    (small.spec.places.state / "cluster.json").write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        DevCluster.load(small.name)
    remove(small.name)
    assert not pids & read_table().keys()
    assert not small.spec.places.state.exists()
    assert not small.spec.places.runtime.exists()


def test_a_name_is_taken_once(small: DevCluster) -> None:
    """A second `up` of the same name touches nothing and says what to do."""
    with pytest.raises(UsageError, match=r"already exists.*down --name test-small"):
        DevCluster.up(name=small.name)
    assert small.status().healthy


def processes_of(name: str) -> list[int]:
    return [pid for pid in read_table() if environment_of(pid).get(MARK, "").endswith(f"/{name}")]


def test_a_failed_start_leaves_nothing_and_shows_the_log() -> None:
    """slurmctld dies while the nodes start: the error ends with its log, and nothing is left behind."""

    def kill_slurmctld(message: str) -> None:
        if message.startswith("starting"):
            os.kill(living(places.existing("test-broken"), read_table())["slurmctld"], signal.SIGKILL)

    with pytest.raises(NvrxError, match=r"slurmctld ended instead of serving(?s:.)*Running as primary controller"):
        DevCluster.up(name="test-broken", nodes=1, say=kill_slurmctld)
    assert "test-broken" not in names()
    assert processes_of("test-broken") == []


def test_an_interrupted_start_leaves_nothing() -> None:
    """Ctrl-C while the nodes start takes down what had been started."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DevCluster.up(name="test-broken", nodes=1, say=interrupt)
    assert "test-broken" not in names()
    assert processes_of("test-broken") == []


def called(*command: str) -> str:
    """What the command prints; it must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


def test_the_cluster_outlives_the_command_that_started_it() -> None:
    """`cluster up` has returned, and another process sees every daemon alive and every node idle."""
    command = [sys.executable, "-m", "nvrx_slurm", "cluster"]
    called(*command, "up", "--name", "test-cli", "--nodes", "2")
    try:
        status = json.loads(called(*command, "status", "--name", "test-cli", "--json"))
        assert [node["slurm_state"] for node in status["nodes"]] == ["idle", "idle"]
        assert status["daemons"] == {"munged": "alive", "slurmctld": "alive"}
        exports = called(*command, "env", "--name", "test-cli")
        assert called("bash", "-c", f"{exports}\nsinfo -h -o %D").strip() == "2"
    finally:
        called(*command, "down", "--name", "test-cli")
    assert "test-cli" not in names()


def test_accounting_answers_for_a_finished_job(tmp_path: Path) -> None:
    """With --accounting, sacct reports how a job ended."""
    with DevCluster.up(name="test-acct", nodes=1, accounting=True) as cluster:
        job = Job(cluster, tmp_path, nodes=1)
        job.go()

        def told() -> bool:
            options = ["-n", "-X", "-j", job.id, "-o", "State"]
            return programs.ask(cluster.environment(), "sacct", *options).split()[-1:] == ["COMPLETED"]

        until(told, "sacct to report COMPLETED")


def test_every_daemon_is_recorded(small: DevCluster) -> None:
    """The records name exactly the daemons that the spec lists."""
    assert set(recorded(small.spec.places)) == set(small.spec.daemons)
    found = places.existing(small.name)
    assert (found.state, found.runtime) == (small.spec.places.state, small.spec.places.runtime)
