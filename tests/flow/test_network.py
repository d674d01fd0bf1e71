"""The network fails, for one node, for all, for one kind of traffic: nobody is taken for dead who is not, and who may
live keeps its ranks until it cannot. Nodes have networks of their own (`tests/network.py`); a ledger has each
worker's every step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.journal.records import NodeFenced, NodeIsolated, NodeLost
from tests.fault_harness import FrozenNode
from tests.fault_jobs import causes, joined_again
from tests.harness import end_with_all, wait_gone
from tests.network import BATCH, GateNetwork
from tests.waiting import until

NODES = ("n1", "n2", "n3")
QUICK = {
    "heartbeat__interval": 0.2,
    "heartbeat__timeout": 4.0,
    "heartbeat__startup_timeout": 10.0,
    "fence_timeout": 6.0,
}
PATIENT = {"heartbeat__interval": 0.2, "heartbeat__timeout": 20.0, "fence_timeout": 30.0}


@pytest.fixture
def network(gate):
    network = GateNetwork(NODES, gate)
    yield network
    network.close()


@pytest.fixture
def start(network, gate, ledger):
    """Starts a job of two nodes and a spare, each with two workers, and waits until all are there."""
    jobs = []

    def start(**bounds):
        jobs.append(network.start(ledger.plan(gate, spares=1, max_restarts=99, **bounds)))
        gate.wait(4, cycle=0)
        jobs[-1].all_joined(*NODES)
        return jobs[-1]

    yield start
    for job in jobs:
        end_with_all(job)


def finish(job, gate, cycle):
    """The workers of that cycle end well, and the job with them."""
    try:
        workers = gate.wait(4, cycle=cycle)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.story()}") from None
    gate.open()
    assert job.finish() == 0
    return workers


def nothing_happened(job, gate, ledger):
    """The job ends well with the workers it began with, and nobody was held for dead."""
    workers = finish(job, gate, cycle=0)
    assert {line.pid for line in ledger.lines()} == {worker.pid for worker in workers.values()}
    assert job.said(NodeLost) == []


def works_on(ledger, node, steps):
    """Waits for so many more steps of that node; each takes 5 ms at least."""
    enough = ledger.steps(node=node, cycle=0) + steps
    until(lambda: ledger.steps(node=node, cycle=0) >= enough, f"{node} takes {steps} steps")


def says(job, who, words):
    """Waits until that process has logged the words."""
    until(lambda: said(job, who, words), f"{who} says {words!r}")


def said(job, who, words):
    """How often that process has logged the words."""
    return job.folder.node_log(who).read_text().count(words)


def broke(job, node):
    return said(job, "controller", f"{node}: the connection to its agent closed")


def connected_again(job, node):
    return said(job, "controller", f"{node}: its agent is connected again")


def nodes_of(workers):
    return {worker.env["NVRX_NODE"] for worker in workers.values()}


def to_the_store(job, *hosts):
    return {"hosts": hosts, "protocol": "tcp", "port": job.store_port}


def to_the_connection(job, *hosts):
    return {"hosts": hosts, "protocol": "tcp", "other_than": job.store_port}


def test_cut_off_node_kills_its_workers_before_others_get_their_ranks(start, network, gate, ledger):
    """A node that is cut off loses its workers to its own supervisor; the spare gets their ranks only then, by the
    clock, since nothing can prove the death. Healed, the node joins anew and has no ranks."""
    job = start(**QUICK)
    before = gate.wait(4, cycle=0)
    network.cut(["n2"])
    wait_gone([before[2].pid, before[3].pid])
    lost = job.expect(NodeLost, node="n2")
    assert lost.cause == "heartbeat_timeout"
    assert 0.0 < lost.safe_after_s < QUICK["fence_timeout"] + 0.4 + 2.0
    assert nodes_of(gate.wait(4, cycle=1)) == {"n1", "n3"}
    assert job.said(NodeFenced) == []
    network.heal()
    joined_again(job, "n2")
    finish(job, gate, cycle=1)
    assert causes(job) == ["n2 lost: heartbeat timeout"]
    assert nodes_of(gate.wait(4, cycle=1)) == {"n1", "n3"}


def test_job_ends_although_a_node_is_cut_off(start, network, gate):
    """Nobody waits for a node that cannot hear that the job is over: its code is what the others have made of it."""
    job = start(**QUICK)
    network.cut(["n3"])
    job.expect(NodeLost, node="n3")
    finish(job, gate, cycle=0)
    assert causes(job) == []


def test_short_cut_and_reset_connections_touch_nobody(start, network, gate, ledger):
    """Healed before the heartbeat timeout, a cut costs nothing. A third party resets the connection, again and again:
    the node connects again, and nobody is reaped."""
    job = start(**PATIENT)
    network.cut(["n2"])
    says(job, "n2", "a heartbeat did not reach the store")
    network.heal()
    until(lambda: broke(job, "n2") == connected_again(job, "n2"), "the connection after the cut")
    before = connected_again(job, "n2")
    for times in (1, 2, 3):
        assert network.reset(to_the_connection(job, "n2")) >= 1  # the controller's probe of the trap may be another
        until(
            lambda times=times: broke(job, "n2") == connected_again(job, "n2") == before + times, "a new connection"
        )
    nothing_happened(job, gate, ledger)


def test_node_cut_off_from_the_store_alone_or_the_connection_alone_lives(start, network, gate, ledger):
    """Without the store it says over its connection that it is alive; without the connection its beats arrive. So
    nobody is reaped, and its lease goes on."""
    job = start(**QUICK)
    for cut_off_from in (to_the_store, to_the_connection):
        network.rule(cut_off_from(job, "n2"))
        works_on(ledger, "n2", steps=2000)
        network.heal()
        until(lambda: broke(job, "n2") == connected_again(job, "n2"), "the connection")
    nothing_happened(job, gate, ledger)


def test_short_cut_of_all_nodes_touches_nobody(start, network, gate, ledger):
    """The controller hears nobody for longer than the heartbeat timeout: that is its own network's fault."""
    job = start(heartbeat__interval=0.2, heartbeat__timeout=3.0, fence_timeout=60.0)
    network.cut([BATCH])
    works_on(ledger, "n2", steps=1000)
    network.heal()
    nothing_happened(job, gate, ledger)


def test_long_cut_of_all_nodes_costs_one_restart(start, network, gate):
    """Every supervisor kills its workers when the lease lapses; healed, the job goes on by itself, on the same
    nodes."""
    job = start(**QUICK)
    before = gate.wait(4, cycle=0)
    network.cut([BATCH])
    wait_gone([worker.pid for worker in before.values()])
    network.heal()
    assert nodes_of(finish(job, gate, cycle=1)) == {"n1", "n2"}
    assert job.said(NodeLost) == []
    isolated = job.said(NodeIsolated)[0].node
    assert causes(job) == [f"{isolated} had lost store and controller for 6 s and stopped its workers"]


@pytest.mark.parametrize("firewall", ["refuse", "drop"])
@pytest.mark.parametrize("end", ["freezes", "dies"])
def test_behind_a_firewall_no_death_is_proven(start, network, gate, ledger, firewall, end):
    """Where a firewall on the way drops or refuses what is sent to the node's trap, ranks wait for the clock."""
    network.rule(
        {"hosts": NODES, "protocol": "udp", "then": firewall},
        {"hosts": NODES, "protocol": "tcp", "opening": True, "then": firewall},
    )
    job = start(**QUICK)
    node = FrozenNode(job, "n2")
    if end == "dies":
        job.kill_node("n2")
    lost = job.expect(NodeLost, node="n2")
    assert lost.cause == ("heartbeat_timeout" if end == "freezes" else "connection_closed")
    assert lost.safe_after_s > 0.0
    assert nodes_of(gate.wait(4, cycle=1)) == {"n1", "n3"}
    node.thaw()
    finish(job, gate, cycle=1)
    assert job.said(NodeFenced) == []
    assert causes(job) == [f"n2 lost: {lost.why}"]
    assert ("a firewall answers" in job.folder.node_log("controller").read_text()) == (firewall == "refuse")


@pytest.mark.parametrize("order", ["agent supervisor workers", "workers supervisor agent"])
def test_frozen_and_cut_off_node_takes_no_step(start, network, gate, ledger, order):
    """All of a node is stopped and cut off, so nobody can reach it: its kernel ends the lease. Thawed, in any order,
    its old workers take no step."""
    job = start(**QUICK)
    network.cut(["n2"])
    node = FrozenNode(job, "n2")
    taken = ledger.steps(node="n2", cycle=0)
    assert nodes_of(gate.wait(4, cycle=1)) == {"n1", "n3"}
    assert job.said(NodeFenced) == []
    node.thaw(tuple(order.split()))
    network.heal()
    joined_again(job, "n2")
    finish(job, gate, cycle=1)
    assert ledger.steps(node="n2", cycle=0) == taken
    assert causes(job) == ["n2 lost: heartbeat timeout"]


def test_slow_and_lossy_network_makes_nobody_late(start, network, gate, ledger):
    """200 ms each way and 5 % of frames lost, for 20 beats of every node: nobody is held for dead."""
    job = start(heartbeat__interval=1.0, heartbeat__timeout=5.0)
    network.slow(dict.fromkeys(NODES, (0.2, 0.05)))
    with network.beats(job) as heard:
        until(lambda: min(heard()[node] for node in NODES) >= 20, "20 beats of each node", timeout=100.0)
    network.heal()
    nothing_happened(job, gate, ledger)


DOOMED = """
import signal, sys
from pathlib import Path
from tests.harness import Gate, gate_plan
from tests.network import GateNetwork
gate = Gate()
network = GateNetwork(("n1", "n2", "n3"), gate)
job = network.start(gate_plan(gate, Path(sys.argv[1])))
gate.wait(4, cycle=0)
print("there", flush=True)
signal.pause()
"""


def test_nothing_outlives_a_test_that_is_killed(tmp_path):
    """SIGKILL of who made the network ends the job in it, and the namespaces go with their last processes."""
    with subprocess.Popen([sys.executable, "-c", DOOMED, str(tmp_path)], stdout=subprocess.PIPE) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"there\n"
        everybody = descendants(test.pid)
        test.kill()
    assert len(everybody) > 3 * 2 + 4
    wait_gone(everybody)
