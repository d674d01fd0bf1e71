"""Signals by which a user makes workers save: Slurm sends them to every process of the step."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import NodeLeft, NodeLost
from nvrx_slurm.util.processes import HURRY
from tests.fault_harness import child_of, supervisor_of
from tests.harness import plan_of
from tests.waiting import until

SAVES = """
import signal, sys, time
def save(number, frame):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.{name}, save)
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_signal_for_the_workers_ends_no_agent(run_local, tmp_path, name):
    """At a signal of `sbatch --signal=USR1@90` or `scancel --signal=USR2` the worker saves, and the job ends with the
    worker's exit code."""
    role = RolePlan(name="main", command=(sys.executable, "-c", SAVES.format(name=name)))
    job = run_local(plan_of(tmp_path, role))
    out = job.folder.cycle_logs("main-0", 0, 0) / "rank-0.out"
    until(lambda: out.exists() and "up" in out.read_text(), "the worker to run")
    agent = job.agent_pid("n1")
    supervisor = supervisor_of(agent)
    for pid in (agent, supervisor, child_of(supervisor, "print")):
        os.kill(pid, signal.Signals[name])
    assert job.finish() == 0
    assert out.read_text() == "up\nsaved\n"
    assert not job.said(NodeLost)
    assert name not in {left.reason for left in job.said(NodeLeft)}


DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1000)
"""


def test_the_batch_hosts_order_reaches_an_agent_that_does_not_leave(run_local, tmp_path):
    """The batch host sends the signal twice, as no user does: the agent kills its workers at once, and leaves."""
    role = RolePlan(name="main", command=(sys.executable, "-c", DEAF))
    job = run_local(plan_of(tmp_path, role, teardown__grace=600.0))
    out = job.folder.cycle_logs("main-0", 0, 0) / "rank-0.out"
    until(lambda: out.exists() and "up" in out.read_text(), "the worker to run")
    os.kill(job.agent_pid("n1"), HURRY)
    until(lambda: "left to the workers" in job.folder.node_log("n1").read_text(), "the first to be ignored")
    os.kill(job.agent_pid("n1"), HURRY)
    assert job.expect(NodeLeft, node="n1").reason == HURRY.name
