"""What a real Slurm reports on nodes that are healthy, marked down, and lost."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.slurm_nodes import SlurmNode, node_state, node_states
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.lab.devcluster import DevCluster
from tests.waiting import until

pytestmark = pytest.mark.slurm(nodes=6)

NOTICED_S = 90.0  # slurmctld marks a silent node as down after 15 to 20 s


@pytest.fixture
def cluster(healthy_cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> DevCluster:
    """The session's Slurm, as the one that this process uses, in a time zone far from UTC."""
    for name, value in healthy_cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    return healthy_cluster


def once_down(name: str) -> SlurmNode:
    """Slurm's answer on the node, once its state begins with DOWN."""
    seen: dict[str, SlurmNode] = {}

    def is_down() -> bool:
        seen.update(asyncio.run(node_states([name])))
        return name in seen and seen[name].state.startswith("DOWN")

    until(is_down, f"Slurm to report {name} as down", timeout=NOTICED_S)
    return seen[name]


def booted_at() -> float:
    """When this machine, and with it every node of the cluster, was booted, according to the kernel."""
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime")))


def test_several_nodes_are_asked_about_at_once(cluster: DevCluster) -> None:
    """One call returns each node's state and boot time, in any time zone of the user; an unknown node is left out."""
    found = asyncio.run(node_states(["n1", "n3", "nope"]))
    assert {name: node.state for name, node in found.items()} == {"n1": "IDLE", "n3": "IDLE"}
    for node in found.values():
        assert node.booted_at == pytest.approx(booted_at(), abs=5)
        assert node.proves_dead(heard_at=booted_at() - 1000)
        assert not node.proves_dead(heard_at=booted_at() + 1)
    assert asyncio.run(node_state("nope")) is None


def test_a_lost_node_is_down_and_that_proves_nothing(cluster: DevCluster) -> None:
    """Slurm reports a killed node as DOWN and not responding, and reports the same of a frozen node, whose processes
    live."""
    cluster.kill_node("n4")
    cluster.stop_node("n2")
    for found in (once_down("n4"), once_down("n2")):
        assert (found.state, found.reason) == ("DOWN+NOT_RESPONDING", "Not responding")
        assert not found.proves_dead(heard_at=booted_at() + 1)


def test_a_node_that_is_marked_down_has_the_given_reason(cluster: DevCluster) -> None:
    """Slurm's answer has the reason that was given when the node was marked down."""
    cluster.kill_node("n5")
    cluster.mark_down("n5")
    assert once_down("n5").reason == "nvrx-slurm"


def test_a_batch_host_that_slurm_has_taken_from_its_job_is_named(cluster: DevCluster) -> None:
    """`--no-kill` keeps the job RUNNING on its other nodes, without its script."""
    wrapped = ["sbatch", "--parsable", "--no-kill", "--nodes=2", "--output=/dev/null", "--wrap=sleep 900"]
    job_id = subprocess.run(wrapped, check=True, capture_output=True, text=True).stdout.strip()
    slurm = SlurmCluster()
    until(lambda: slurm.states([job_id])[job_id] is JobState.RUNNING, "the job's start", timeout=NOTICED_S)
    assert slurm.lost_batch_host(job_id) is None
    host = slurm.nodes(job_id)[0]
    cluster.kill_node(host)
    cluster.mark_down(host)
    until(lambda: slurm.lost_batch_host(job_id) == host, f"Slurm to take {host} from the job", timeout=NOTICED_S)
    assert slurm.states([job_id])[job_id] is JobState.RUNNING
    slurm.cancel(job_id)
