"""A node dies, freezes or thaws: its ranks run on another node, and never on two. A ledger records every step of
every worker."""

from __future__ import annotations

import os
import random
import signal

import pytest

from nvrx_slurm.agent.supervisor import send_all
from nvrx_slurm.journal.records import NodeFenced, NodeLost, RendezvousClosed
from tests.fault_harness import FrozenNode, child_of, supervisor_of, without_socket_filters
from tests.fault_jobs import causes, joined_again, joins
from tests.harness import wait_gone
from tests.waiting import until

QUICK = {"heartbeat__interval": 0.2, "heartbeat__timeout": 4.0, "heartbeat__startup_timeout": 10.0}


def finish(job, gate, cycle):
    gate.wait(4, cycle=cycle)
    gate.open()
    assert job.finish() == 0


def test_node_that_thaws_in_time_goes_on_and_a_killed_ones_ranks_move_to_the_spare(run_local, gate, ledger):
    """A node that is stopped for less than the heartbeat timeout costs no restart and no new worker. SIGKILL of all
    that runs on it is detected by its closed connection, the restart has that as its one cause, and no workers
    overlap."""
    job = run_local(ledger.plan(gate, spares=1, heartbeat__interval=0.2, heartbeat__timeout=20.0))
    before = gate.wait(4, cycle=0)
    job.all_joined("n3")
    node = FrozenNode(job, "n2")
    taken = ledger.steps(node="n2", cycle=0)
    at_work = ledger.steps(node="n1", cycle=0)
    until(lambda: ledger.steps(node="n1", cycle=0) > at_work + 100, "the other node works on")
    node.thaw()
    until(lambda: ledger.steps(node="n2", cycle=0) > taken + 10, "the thawed node works on")
    job.kill_node("n2")
    finish(job, gate, cycle=1)
    first = {line.pid for line in ledger.lines() if line.cycle == 0}
    assert first == {worker.pid for worker in before.values()}
    [lost] = job.said(NodeLost)
    assert (lost.node, lost.cause, lost.safe_after_s) == ("n2", "connection_closed", 0.0)
    assert causes(job) == ["n2 lost: connection to its agent closed"]


ORDERS = [
    ("workers", "supervisor", "agent"),
    ("supervisor", "workers", "agent"),
    ("agent", "supervisor", "workers"),
]


def test_thawed_node_takes_no_step(run_local, gate, ledger):
    """All processes of a node are stopped, the node is declared dead, and its processes are continued, once in each
    order: its old workers take no step, and the node joins again, without ranks. Then only an agent is stopped: its
    workers run on, and are killed before their ranks start elsewhere."""
    job = run_local(ledger.plan(gate, **QUICK))
    workers = gate.wait(4, cycle=0)
    job.all_joined("n3", "n4")
    frozen = []
    for cycle, order in enumerate(ORDERS):
        name = workers[2].env["NVRX_NODE"]
        node, taken, joined = FrozenNode(job, name), ledger.steps(node=name, cycle=cycle), joins(job, name)
        workers = gate.wait(4, cycle=cycle + 1)
        assert name not in {worker.env["NVRX_NODE"] for worker in workers.values()}
        assert job.expect(NodeLost, node=name).safe_after_s > 20.0
        frozen.append((name, cycle, taken))
        fenced = [each for each, *_ in frozen]
        job.when(lambda _: [record.node for record in job.said(NodeFenced)] == fenced, what=f"{fenced} fenced")  # noqa: B023  called at once
        wait_gone(node.workers)  # while the node is frozen
        node.thaw(order)
        joined_again(job, name, joined + 1)
    name = workers[2].env["NVRX_NODE"]
    agent, joined = job.agent_pid(name), joins(job, name)
    os.kill(agent, signal.SIGSTOP)
    gate.wait(4, cycle=4)
    wait_gone([workers[2].pid, workers[3].pid], timeout=0.0)
    os.kill(agent, signal.SIGCONT)
    joined_again(job, name, joined + 1)
    finish(job, gate, cycle=4)
    for each, cycle, taken in frozen:
        assert ledger.steps(node=each, cycle=cycle) == taken
    assert causes(job)[:3] == [f"{each} lost: heartbeat timeout" for each, *_ in frozen]


def test_without_a_fence_the_lease_ends_the_workers(run_local, gate, ledger):
    """Without a fence socket, when only the agent is stopped, its supervisor kills the workers once their lease
    lapses, and their ranks start elsewhere only when that must have happened. When all of a node is stopped, the
    supervisor kills the workers before anything else once it is continued, since the lease has lapsed."""
    bounds = {**QUICK, "fence_timeout": 6.0}
    job = without_socket_filters(lambda: run_local(ledger.plan(gate, **bounds)))
    before = gate.wait(4, cycle=0)
    job.all_joined("n3", "n4")
    agent = job.agent_pid("n2")
    os.kill(agent, signal.SIGSTOP)
    wait_gone([before[2].pid, before[3].pid])
    after = gate.wait(4, cycle=1)
    assert {worker.env["NVRX_NODE"] for worker in after.values()} == {"n1", "n3"}
    assert job.expect(NodeLost, node="n2").safe_after_s > 0.0
    os.kill(agent, signal.SIGCONT)
    joined_again(job, "n2")

    node = FrozenNode(job, "n3")
    taken = ledger.steps(node="n3", cycle=1)
    job.expect(NodeLost, node="n3")
    until(lambda: ledger.steps(node="n1", cycle=1) > taken, "the other nodes work on")
    os.kill(node.supervisor, signal.SIGCONT)
    wait_gone(node.workers)
    gate.wait(4, cycle=2)
    node.thaw()
    joined_again(job, "n3")
    finish(job, gate, cycle=2)
    assert ledger.steps(node="n3", cycle=1) == taken
    assert job.said(NodeFenced) == []
    assert "no fence" in job.folder.node_log("n2").read_text()


class Rounds:
    """Random faults, one a cycle, each on a node that works."""

    def __init__(self, job, gate, chance):
        self.job, self.gate, self.chance = job, gate, chance
        self.spares_left = 2  # of three: one is kept for a frozen node
        self.frozen = []
        self.faults = [self.freeze, self.freeze_agent, self.kill_supervisor, self.kill_worker]
        self.deaths = [self.kill_node, self.kill_agent]

    def strike(self, workers):
        """Inject a random fault on a node of the cycle to which these workers belong."""
        node = self.chance.choice(sorted({worker.env["NVRX_NODE"] for worker in workers.values()}))
        fault = self.chance.choice(self.faults + self.deaths * bool(self.spares_left))
        self.spares_left -= fault in self.deaths
        fault(node, workers)
        if self.chance.random() < 0.3:
            os.kill(child_of(self.job.process.pid, "nvrx_slurm.controller"), signal.SIGKILL)
        return f"{fault.__name__} {node}"

    def thaw_all(self):
        """Continue the frozen nodes, each in a random order of its processes."""
        for node in self.frozen:
            order = ["agent", "supervisor", "workers"]
            self.chance.shuffle(order)
            node.thaw(tuple(order))
        self.frozen.clear()

    def kill_node(self, node, workers):
        self.job.kill_node(node)

    def kill_agent(self, node, workers):
        os.kill(self.job.agent_pid(node), signal.SIGKILL)

    def freeze(self, node, workers):
        self.frozen.append(FrozenNode(self.job, node))

    def freeze_agent(self, node, workers):
        frozen = FrozenNode(self.job, node)
        send_all([frozen.supervisor, *frozen.workers], signal.SIGCONT)
        self.frozen.append(frozen)

    def kill_supervisor(self, node, workers):
        os.kill(supervisor_of(self.job.agent_pid(node)), signal.SIGKILL)

    def kill_worker(self, node, workers):
        mine = [worker for worker in workers.values() if worker.env["NVRX_NODE"] == node]
        os.kill(self.chance.choice(mine).pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_rank_is_ever_held_twice(run_local, gate, ledger, seed):
    """Under random kills and freezes, in random order, of the controller too, each rank has one live worker at a
    time."""
    job = run_local(ledger.plan(gate, spares=3, max_restarts=99, **QUICK))
    rendezvous = Rounds(job, gate, random.Random(seed))
    job.all_joined("n1", "n2", "n3", "n4", "n5")
    happened = []
    workers = gate.wait(4, cycle=0)
    for cycle in range(1, 6):
        happened.append(rendezvous.strike(workers))
        job.when(lambda r: isinstance(r, RendezvousClosed) and r.cycle == cycle, what=f"a new cycle after {happened}")  # noqa: B023  called at once
        workers = gate.wait(4, cycle=cycle)
        rendezvous.thaw_all()
    gate.open()
    assert job.finish() == 0, happened
