"""What breaks while a job runs on a real Slurm: nodes that freeze or die, workers that hang, the control plane."""

from __future__ import annotations

import os
import re
import signal

import pytest

from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.clock import SystemClock
from nvrx_slurm.cluster.dev.waiting import wait_until
from nvrx_slurm.processes import is_alive
from nvrx_slurm.records import (
    ControllerStarted,
    NodeFenced,
    NodeJoined,
    NodeLost,
    RestartDecided,
    RoundOpened,
    SlurmNodeState,
    WorkerHung,
)
from nvrx_slurm.report.source import so_far
from tests.harness import wait_gone
from tests.slurm_harness import settled
from tests.slurm_jobs import CALM, SlurmJobs, gate_command

pytestmark = pytest.mark.slurm(nodes=6)

QUICK = f"heartbeat: {{interval: 500ms, timeout: 5s}}, {CALM}"

SECTIONED = """
from nvrx_slurm import workload
workload.beat(step=7)
open_section = workload.section("evaluation", timeout="1h")
open_section.__enter__()
"""

STATUS_LINES = (
    r"^n1 +active +main-0 +0 +7 .* \d+ ms ",  # its last beat, and its last step
    r"^n3 +standby ",
    r"^main-0 +0 +n1 +7 +0 .* evaluation ",  # rank, node, step, lag, section
    r"^main-0 +1 +n2 +7 +0 .* evaluation ",
)


@pytest.fixture
def jobs(healthy_cluster, gate, tmp_path):
    """Jobs on the session's six nodes."""
    jobs = SlurmJobs(healthy_cluster, gate, tmp_path)
    yield jobs
    jobs.close()


def ends_well(jobs, job):
    jobs.gate.open()
    assert job.finish(timeout=90) == 0, job.story()
    jobs.all_gone(job)


def test_frozen_node_is_replaced_and_joins_anew_once_thawed(jobs):
    """All that is ours on a node stops at once: it is killed while frozen, its ranks run on the spare, Slurm is asked
    about it; thawed, its agent joins anew as a spare."""
    job = jobs.start(QUICK, nodes=2, spares=1)
    before = jobs.running(job, 2)
    settled(job, 3)
    frozen = [job.agent_pid("n2"), *descendants(job.agent_pid("n2"))]
    send_all(frozen, signal.SIGSTOP)
    after = jobs.running(job, 2, cycle=1)
    assert after[1].env["NVRX_NODE"] == "n3"
    assert job.expect(NodeLost).cause == "heartbeat_timeout"
    job.expect(NodeFenced, node="n2")
    assert job.expect(SlurmNodeState, node="n2").state == "MIXED"
    wait_gone([before[1].pid])
    agent = job.agent_pid("n2")
    send_all(frozen, signal.SIGCONT)
    first = job.expect(NodeJoined, node="n2").incarnation
    anew = job.when(
        lambda r: isinstance(r, NodeJoined) and r.node == "n2" and r.incarnation != first, what="n2 to join anew"
    )
    assert anew.pid == agent
    ends_well(jobs, job)
    assert len(job.said(RoundOpened)) == 2


def test_killed_node_says_in_the_journal_what_slurm_made_of_it(jobs):
    """slurmd, step and workers of a node killed at once: proven dead within moments, while Slurm, asked then, still
    holds the node for one in use."""
    job = jobs.start(CALM, nodes=2, spares=1)
    jobs.running(job, 2)
    settled(job, 3)
    jobs.cluster.kill_node("n2")
    jobs.running(job, 2, cycle=1)
    lost = job.expect(NodeLost, node="n2")
    assert (lost.cause, lost.safe_after_s) == ("tether_lost", 0.0), job.story()
    assert job.expect(SlurmNodeState, node="n2").state == "MIXED"
    assert "n2 lost: tether lost" in job.expect(RestartDecided).cause
    jobs.cluster.mark_down("n2")  # or Slurm waits some more seconds for it at the end
    ends_well(jobs, job)


def test_hung_worker_is_restarted_with_its_stacks_on_file(jobs):
    """A worker without progress is stopped after `hang.step_timeout`; the journal names the line where it hung, and
    the file that holds its stacks."""
    beats = "from nvrx_slurm import workload\nworkload.beat(step=3)"
    hang = f"hang: {{step_timeout: 2s}}, {CALM}"
    job = jobs.start(hang, command=gate_command(jobs.gate, beats))
    jobs.running(job, 2)
    hung = job.expect(WorkerHung)
    assert hung.step == 3
    assert "gate_worker.py" in hung.where
    assert "gate_worker.py" in (job.folder.path / hung.stacks).read_text()
    jobs.running(job, 2, cycle=1)
    ends_well(jobs, job)
    assert "hung" in job.said(RestartDecided)[0].cause


def test_dump_prints_every_rank_of_a_running_job(jobs):
    """`nvrx-slurm dump` shows the stacks of all ranks on all nodes, and disturbs none of them."""
    job = jobs.start(CALM, nodes=3, command=gate_command(jobs.gate, ""))
    workers = jobs.running(job, 3)
    printed = jobs.nvrx("dump", job.folder.job_id)
    for rank in range(3):
        assert f"main-0 rank {rank} on n{rank + 1}, in" in printed
    assert printed.count("gate_worker.py") >= 3
    assert all(is_alive(worker.pid) for worker in workers.values())
    ends_well(jobs, job)
    assert len(job.said(RoundOpened)) == 1


def test_status_shows_beats_ranks_and_open_sections(jobs):
    """`nvrx-slurm status` of a running job tells each node's last beat, each rank's step, and the section that it is
    in."""
    job = jobs.start(CALM, spares=1, command=gate_command(jobs.gate, SECTIONED))
    jobs.running(job, 2)
    job.agent_pid("n3")

    def all_is_told():
        shown = jobs.nvrx("status", job.folder.job_id)
        return all(re.search(line, shown, re.MULTILINE) for line in STATUS_LINES)

    wait_until(all_is_told, timeout_s=30.0, what="status to show it all", clock=SystemClock())
    ends_well(jobs, job)


@pytest.mark.parametrize("victim", ["valkey-server", "nvrx_slurm.controller"])
def test_killed_control_plane_touches_no_worker(jobs, victim):
    """Store or controller of a Slurm job killed: every worker lives on, nothing is lost from the journal, and the job
    ends 0."""
    job = jobs.start(CALM)
    workers = jobs.running(job, 2)
    os.kill(jobs.process_of(job, victim), signal.SIGKILL)
    os.kill(workers[0].pid, signal.SIGKILL)
    jobs.running(job, 2, cycle=1)
    if victim != "valkey-server":
        job.expect(ControllerStarted, epoch=2)
    ends_well(jobs, job)
    assert job.said(NodeLost) == []
    numbers = [entry.n for entry in so_far(job.folder, live=False)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_store_that_cannot_come_back_ends_the_job(jobs):
    """Killed for good, since its file is torn, the store takes the job with it: workers are killed, the reason is on
    file, exit code 69."""
    job = jobs.start(CALM)
    workers = jobs.running(job, 2)
    host = job.folder.read_info().host_pid
    os.kill(host, signal.SIGSTOP)  # it must not be faster than we are
    os.kill(jobs.process_of(job, "valkey-server"), signal.SIGKILL)
    for file in (job.folder.store_dir / "appendonlydir").glob("*.incr.aof"):
        file.write_bytes(b"torn\n" + file.read_bytes())
    os.kill(host, signal.SIGCONT)
    assert job.finish(timeout=60) == 69, job.story()
    wait_gone([worker.pid for worker in workers.values()])
    jobs.all_gone(job)
    result = job.folder.read_result()
    assert result.exit_code == 69
    assert "the embedded store did not start" in result.reason
