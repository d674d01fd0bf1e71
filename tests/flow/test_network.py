"""The network fails for one node, for all nodes, or for one kind of traffic. A node that can still be reached keeps
its ranks. An unreachable node loses its ranks only once its workers must be dead. Nodes have networks of their own
(`tests/network.py`); a ledger records every step of every worker."""

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
    """Starts a job of two nodes and a spare, each with two workers, and waits until all nodes have joined."""
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
    """Let the workers of that cycle end, and assert that the job ends with 0. Returns the workers."""
    try:
        workers = gate.wait(4, cycle=cycle)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.story()}") from None
    gate.open()
    assert job.finish() == 0
    return workers


def nothing_happened(job, gate, ledger):
    """Assert that the job ends with 0 and with its first workers, and that no node was declared dead."""
    workers = finish(job, gate, cycle=0)
    assert {line.pid for line in ledger.lines()} == {worker.pid for worker in workers.values()}
    assert job.said(NodeLost) == []


def works_on(ledger, node, steps):
    """Wait for `steps` more steps of that node; each takes at least 5 ms."""
    enough = ledger.steps(node=node, cycle=0) + steps
    until(lambda: ledger.steps(node=node, cycle=0) >= enough, f"{node} takes {steps} steps")


def says(job, who, words):
    """Waits until that process has logged the words."""
    until(lambda: said(job, who, words), f"{who} to log {words!r}")


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
    """The supervisor of a node that is cut off kills its workers. Only then does the spare get their ranks, after a
    timeout, since nothing can prove the death. Once healed, the node joins again, without ranks."""
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
    """The job does not wait for a node that cannot receive the shutdown order. Its exit code is that of the others'
    work."""
    job = start(**QUICK)
    network.cut(["n3"])
    job.expect(NodeLost, node="n3")
    finish(job, gate, cycle=0)
    assert causes(job) == []


def test_short_cut_and_reset_connections_touch_no_node(start, network, gate, ledger):
    """A cut that is healed before the heartbeat timeout costs nothing. When a third party resets the connection
    repeatedly, the node connects again each time, and no node is declared dead."""
    job = start(**PATIENT)
    network.cut(["n2"])
    says(job, "n2", "a heartbeat did not reach the store")
    network.heal()
    until(lambda: broke(job, "n2") == connected_again(job, "n2"), "the connection after the cut")
    before = connected_again(job, "n2")
    for times in (1, 2, 3):
        assert network.reset(to_the_connection(job, "n2")) >= 1  # a probe of the fence socket may be another
        until(
            lambda times=times: broke(job, "n2") == connected_again(job, "n2") == before + times, "a new connection"
        )
    nothing_happened(job, gate, ledger)


def test_node_cut_off_from_the_store_alone_or_the_connection_alone_lives(start, network, gate, ledger):
    """Without the store, the node reports over its connection that it is alive; without the connection, its
    heartbeats arrive. In both cases no node is declared dead, and its lease is renewed."""
    job = start(**QUICK)
    for cut_off_from in (to_the_store, to_the_connection):
        network.rule(cut_off_from(job, "n2"))
        works_on(ledger, "n2", steps=2000)
        network.heal()
        until(lambda: broke(job, "n2") == connected_again(job, "n2"), "a new connection")
    nothing_happened(job, gate, ledger)


def test_short_cut_of_all_nodes_touches_no_node(start, network, gate, ledger):
    """When no node's heartbeat arrives for longer than the heartbeat timeout, the controller blames its own network
    and declares no node dead."""
    job = start(heartbeat__interval=0.2, heartbeat__timeout=3.0, fence_timeout=60.0)
    network.cut([BATCH])
    works_on(ledger, "n2", steps=1000)
    network.heal()
    nothing_happened(job, gate, ledger)


def test_long_cut_of_all_nodes_costs_one_restart(start, network, gate):
    """Every supervisor kills its workers when the lease lapses. Once the network is healed, the job restarts by
    itself, on the same nodes."""
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
    """Where a firewall drops or refuses packets to the node's fence socket, its ranks are given away only after a
    timeout."""
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
    """All processes of a node are stopped, and it is cut off, so that no fence can reach it: its kernel ends the
    lease. Once continued, in any order, its old workers take no step."""
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


def test_slow_and_lossy_network_makes_no_node_late(start, network, gate, ledger):
    """With 200 ms delay each way and 5 % of frames lost, for 20 heartbeats of every node, no node is declared
    dead."""
    job = start(heartbeat__interval=1.0, heartbeat__timeout=5.0)
    network.slow(dict.fromkeys(NODES, (0.2, 0.05)))
    with network.beats(job) as heard:
        until(lambda: min(heard()[node] for node in NODES) >= 20, "20 heartbeats of each node", timeout=100.0)
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
    """SIGKILL of the process that made the network ends the job in it, and all processes that hold the
    namespaces."""
    with subprocess.Popen([sys.executable, "-c", DOOMED, str(tmp_path)], stdout=subprocess.PIPE) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"there\n"
        everybody = descendants(test.pid)
        test.kill()
    assert len(everybody) > 3 * 2 + 4
    wait_gone(everybody)
