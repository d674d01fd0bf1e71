"""Workers that live and make no progress: the hang is detected, their stacks are on file, they are started again."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import cli
from nvrx_slurm.jobspec.model import HangSpec
from nvrx_slurm.journal.records import Learned, WorkerHung, WorkersDone
from nvrx_slurm.util.processes import is_alive
from tests.fault_harness import child_of
from tests.fault_jobs import causes, ends_well, fault_plan, printed
from tests.waiting import until


def hangs_of(job, gate, count):
    """The hangs of the job's first `count` cycles, by cycle, once the job has ended with 0."""
    ends_well(job, gate, workers=2, cycle=count)
    hangs = job.said(WorkerHung)
    assert [hung.cycle for hung in hangs] == list(range(count))
    wheres = [f", in {hung.where}" if hung.where else "" for hung in hangs]
    assert causes(job) == [
        f"rank {hung.rank} on n1 hung: {hung.why}{where}" for hung, where in zip(hangs, wheres, strict=True)
    ]
    return hangs


def stacks_of(job, hung):
    return (job.folder.path / hung.stacks).read_text()


def test_native_code_that_holds_the_gil_and_uninterruptible_sleep(run_local, gate, tmp_path):
    """A worker that holds the GIL in native code is found by its missing steps, its stack names the line, and the
    replica is restarted. A worker in state D cannot print its stack: the kernel's data on it is on file, and the
    replica is restarted."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    bounds = {"hang": HangSpec(step_timeout=1.0), "teardown__grace": 1.0}
    job = run_local(fault_plan(gate, tmp_path, "holds_the_gil+sleeps_uninterruptibly", str(fifo), **bounds))
    stuck, asleep = hangs_of(job, gate, 2)
    for hung in (stuck, asleep):
        assert (hung.rank, hung.step) == (1, 7)
    assert stuck.why.startswith("no step for") and "after step 7" in stuck.why
    assert stuck.where.endswith("in holds_the_gil")
    assert "in holds_the_gil" in stacks_of(job, stuck)
    assert "state    D" in stacks_of(job, asleep)


def test_each_open_section_has_its_own_deadline(run_local, gate, tmp_path):
    """Of two nested sections, the hang names the one whose timeout has passed, whether it is the outer or the inner
    one."""
    fault = "hangs_in_an_outer_section+hangs_in_an_inner_section"
    job = run_local(fault_plan(gate, tmp_path, fault, hang=HangSpec(step_timeout=1000.0)))
    for hung, section in zip(hangs_of(job, gate, 2), ("checkpoint", "upload"), strict=True):
        assert hung.rank == 1
        assert hung.why.startswith(f'section "{section}" open for')
        assert hung.why.endswith("(limit 1 s)")
        assert hung.limit_s == 1.0
        assert hung.where.endswith("in wait_quietly")


def test_worker_that_ends_while_its_agent_stands_still_has_not_hung(run_local, gate, tmp_path):
    """When a stopped agent goes on, it finds at the same time that a worker has ended and that its next step is
    overdue. The worker has ended; it has not hung."""
    bounds = {"hang": HangSpec(step_timeout=5.0), "heartbeat__timeout": 60.0, "fence_timeout": 90.0}
    job = run_local(fault_plan(gate, tmp_path, "takes_a_step", rank=0, nodes=2, workers=1, **bounds))
    workers = gate.wait(2, cycle=0)
    agent = job.agent_pid("n1")
    until(lambda: printed(job, 0), "it has taken its step")
    os.kill(agent, signal.SIGSTOP)
    workers[0].go(exit_code=0)
    with pytest.raises(subprocess.TimeoutExpired):  # the freeze itself takes so long
        job.process.wait(6.0)
    os.kill(agent, signal.SIGCONT)
    job.expect(WorkersDone, node="n1")
    workers[1].go(exit_code=0)
    assert job.finish() == 0
    assert job.said(WorkerHung) == []


def test_worker_that_never_begins(run_local, gate, tmp_path):
    """A worker without a first `beat` within the startup timeout counts as hung."""
    plan = fault_plan(gate, tmp_path, "never_begins", workers=1, rank=0, hang=HangSpec(startup_timeout=6.0))
    job = run_local(plan)
    gate.wait(1, cycle=1)[0].go()  # it calls no `beat` either, but ends before the timeout
    assert job.finish() == 0
    (hung,) = job.said(WorkerHung)
    assert hung.why.startswith("no first step")
    assert hung.where.endswith("in wait_quietly")


def test_worker_that_falls_silent(run_local, gate, tmp_path):
    """A worker that prints nothing for as long as `no_output` counts as hung. This needs no import in the worker."""
    plan = fault_plan(gate, tmp_path, "prints_and_falls_silent", workers=1, rank=0, hang=HangSpec(no_output=6.0))
    job = run_local(plan)
    gate.wait(1, cycle=1)[0].go()
    assert job.finish() == 0
    (hung,) = job.said(WorkerHung)
    assert hung.why.startswith("no output for")
    assert hung.where.endswith("in wait_quietly")
    assert printed(job, 0) == b"the last word\n"


def test_learned_deadline_outlives_cycle_and_controller(run_local, gate, tmp_path):
    """The step deadline that is learned in one cycle applies in the next, also under a new controller: a worker that
    stops after its first steps there is found by the learned deadline."""
    bounds = HangSpec(learn=True, warmup=5, safety_factor=2.0)
    job = run_local(fault_plan(gate, tmp_path, "steps_then_learns", rank="all", workers=1, hang=bounds))
    worker = gate.wait(1, cycle=0)[0]
    until(lambda: printed(job, 0), "it has taken its steps")
    os.kill(child_of(job.process.pid, "nvrx_slurm.controller"), signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    job.expect(Learned, role="main")
    gate.wait(1, cycle=1)
    job.expect(WorkerHung, cycle=1, timeout=60.0)
    ends_well(job, gate, workers=1, cycle=2)
    (hung,) = job.said(WorkerHung)
    assert "(learned limit 30 s) after step 3" in hung.why


def test_live_worker_is_dumped_and_goes_on(run_local, gate, tmp_path):
    """`nvrx-slurm dump JOB --rank 1` prints what a stuck worker does now, and neither stops nor restarts it."""
    job = run_local(fault_plan(gate, tmp_path, "holds_the_gil"))
    before = gate.wait(2, cycle=0)
    asked = ["dump", job.folder.job_id, "--rank", "1", "--folder", str(job.folder.path.parent), "--timeout", "30s"]

    def stuck():
        done = CliRunner().invoke(cli, asked, standalone_mode=False)
        assert done.exit_code == 0, done.output
        return done.stdout if "in holds_the_gil" in done.stdout else None

    said = until(stuck, "its stack to name the line")
    assert "main-0 rank 1 on n1, in " in said and "rank 0" not in said
    assert all(is_alive(worker.pid) for worker in before.values())
    assert causes(job) == []
    before[0].go(exit_code=7)
    ends_well(job, gate, workers=2, cycle=1)
