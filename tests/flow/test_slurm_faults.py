"""What breaks while a job runs on a real Slurm: nodes that freeze or die, workers that hang, the control plane."""

from __future__ import annotations

import os
import re
import signal

import pytest

from nvrx_slurm.journal.records import NodeLost, RendezvousOpened, RestartDecided, SlurmNodeState
from nvrx_slurm.util.processes import is_alive
from tests.harness import wait_gone
from tests.slurm_harness import nvrx, settled
from tests.slurm_jobs import CALM, SlurmJobs, gate_command
from tests.waiting import until

pytestmark = pytest.mark.slurm(nodes=6)

SECTIONED = """
from nvrx_slurm import workload
workload.beat(step=7)
open_section = workload.section("evaluation", timeout="1h")
open_section.__enter__()
"""

STATUS_LINES = (
    r"^n1 +active +main-0 +0 +7 .* \d+ ms ",  # its last heartbeat, and its last step
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


def test_journal_has_slurms_state_of_a_killed_node(jobs):
    """slurmd, step and workers of a node are killed at once: the node's death is proven within moments, while Slurm,
    asked then, still reports the node as in use."""
    job = jobs.start(CALM, nodes=2, spares=1)
    jobs.running(job, 2)
    settled(job, 3)
    jobs.cluster.kill_node("n2")
    jobs.running(job, 2, cycle=1)
    lost = job.expect(NodeLost, node="n2")
    assert (lost.cause, lost.safe_after_s) == ("connection_closed", 0.0), job.story()
    assert job.expect(SlurmNodeState, node="n2").state in ("MIXED", "MIXED+NOT_RESPONDING")
    assert "n2 lost: connection to its agent closed" in job.expect(RestartDecided).cause
    jobs.cluster.mark_down("n2")  # or Slurm waits some more seconds for it at the end
    ends_well(jobs, job)


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
    assert len(job.said(RendezvousOpened)) == 1


def test_status_shows_heartbeats_ranks_and_open_sections(jobs):
    """`nvrx-slurm status` of a running job shows each node's last heartbeat, each rank's step, and the section that
    it is in."""
    job = jobs.start(CALM, spares=1, command=gate_command(jobs.gate, SECTIONED))
    jobs.running(job, 2)
    job.agent_pid("n3")

    def all_is_told():
        shown = jobs.nvrx("status", job.folder.job_id)
        return all(re.search(line, shown, re.MULTILINE) for line in STATUS_LINES)

    until(all_is_told, "status to show it all")
    ends_well(jobs, job)


def test_store_that_cannot_come_back_ends_the_job(jobs):
    """A killed store that cannot start again, since its file is torn, ends the job with 69: workers are killed, and
    the reason is on file."""
    job = jobs.start(CALM)
    workers = jobs.running(job, 2)
    host = job.folder.read_info().host_pid
    os.kill(host, signal.SIGSTOP)  # else it restarts the store before the file is torn
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


def test_wait_and_status_say_that_slurm_still_completes_a_job_that_has_ended(jobs):
    """Slurm waits for the step of a dead node. The job's result is written long before, and both commands say so."""
    job = jobs.start(CALM, nodes=2, spares=1)
    jobs.running(job, 2)
    settled(job, 3)
    jobs.cluster.kill_node("n3")
    job.expect(NodeLost, node="n3")
    jobs.gate.open()
    waited = nvrx("wait", job.folder.job_id, cwd=jobs.folder, env=jobs.cluster.environment(), timeout=90.0)
    assert (waited.returncode, "Slurm is still completing it" in waited.stderr) == (0, True), waited.stderr
    assert re.search(r"^slurm +the job has ended; Slurm has it", jobs.nvrx("status", job.folder.job_id), re.MULTILINE)
    jobs.cluster.mark_down("n3")
    ends_well(jobs, job)
    assert "slurm  " not in jobs.nvrx("status", job.folder.job_id)
