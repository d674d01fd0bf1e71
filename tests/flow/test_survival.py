"""The store, the controller, the agent, the supervisor and the batch host of a job are killed."""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    NodeLost,
    RendezvousClosed,
    RendezvousOpened,
)
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.processes import is_alive
from tests.fault_harness import child_of
from tests.harness import gate_plan, plan_of, wait_gone
from tests.waiting import until

# A worker that leaves behind a process with its own session and without a parent, which writes its pid to a file.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
    while True: time.sleep(1000)
while True: time.sleep(1000)
"""


def freeze_host_and_kill(job, words, seconds):
    """SIGKILL a child of the batch host and keep the host from starting it again for some seconds."""
    victim = child_of(job.process.pid, words)
    job.process.send_signal(signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    SystemClock().sleep(seconds)
    job.process.send_signal(signal.SIGCONT)


def numbers(job):
    return [entry.n for entry in job.entries]


@pytest.mark.parametrize("victim", ["valkey-server", "nvrx_slurm.controller"])
def test_control_plane_down_for_ten_seconds_touches_no_worker(run_local, gate, tmp_path, victim):
    """Store or controller killed for 10 s: every worker lives on, a failure meanwhile is handled afterwards, the
    journal has no gap, and the job ends 0."""
    job = run_local(gate_plan(gate, tmp_path, spares=0, heartbeat__timeout=5.0))
    before = gate.wait(4, cycle=0)
    freeze_host_and_kill(job, victim, seconds=10.0)
    assert all(is_alive(w.pid) for w in before.values())
    os.kill(before[0].pid, signal.SIGKILL)
    gate.wait(4, cycle=1)
    gate.open()
    assert job.finish() == 0
    assert job.said(NodeLost) == []
    assert numbers(job) == list(range(1, len(job.entries) + 1))


def test_controller_killed_at_any_moment_comes_back_and_goes_on(run_local, gate, tmp_path):
    """Killed again and again while rendezvous open and close, the controller loses and repeats nothing."""
    job = run_local(gate_plan(gate, tmp_path, spares=0, max_restarts=99))
    chance = random.Random(7)
    workers = gate.wait(4, cycle=0)
    for cycle in range(1, 9):
        os.kill(workers[chance.randrange(4)].pid, signal.SIGKILL)
        SystemClock().sleep(chance.random() * 0.05)
        os.kill(child_of(job.process.pid, "nvrx_slurm.controller"), signal.SIGKILL)
        workers = gate.wait(4, cycle=cycle)
        job.expect(ControllerStarted, epoch=cycle + 1)
    gate.open()
    assert job.finish() == 0
    assert numbers(job) == list(range(1, len(job.entries) + 1))
    assert [r.cycle for r in job.said(RendezvousOpened)] == list(range(9))
    assert [r.cycle for r in job.said(RendezvousClosed)] == list(range(9))


@pytest.mark.parametrize("victim", ["agent", "supervisor"])
def test_no_orphan_when_the_agent_or_its_supervisor_dies(run_local, tmp_path, victim):
    """When either is killed by SIGKILL, its workers end with it, and even their daemons, which have lost their
    parent."""
    note = tmp_path / "daemon.pid"
    role = RolePlan(name="main", command=(sys.executable, "-c", DAEMON, str(note)), nodes_per_replica=1)
    job = run_local(plan_of(tmp_path, role))
    agent = job.agent_pid("n1")
    until(lambda: note.exists() and note.read_text(), "the daemon's pid")
    everybody = [pid for pid in descendants(agent) if pid != agent]
    assert int(note.read_text()) in everybody
    if victim == "agent":
        os.kill(agent, signal.SIGKILL)
        wait_gone([agent, *everybody])
        assert job.finish() == 75
    else:
        os.kill(child_of(agent, "agent.supervisor"), signal.SIGKILL)
        wait_gone(everybody)
        job.expect(RendezvousClosed, cycle=1)  # the agent lives, and its node is used again
        job.process.terminate()
        assert job.finish() == 143


def test_nothing_outlives_a_killed_batch_host(run_local, gate, tmp_path):
    """SIGKILL of the batch host ends the whole job: store, controller, agents, workers."""
    job = run_local(gate_plan(gate, tmp_path))
    gate.wait(4, cycle=0)
    job.agent_pid("n3")
    everybody = descendants(job.process.pid)
    assert len(everybody) >= 2 + 3 * 2 + 4
    job.process.kill()
    job.process.wait()
    wait_gone(everybody)
