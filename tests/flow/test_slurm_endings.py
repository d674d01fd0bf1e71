"""How Slurm ends a job, and how the job uses the time that it has: cancel, preemption, the time limit."""

from __future__ import annotations

import os

import pytest

from nvrx_slurm.journal.records import JobEnded, NodeLeft, StacksDumped
from nvrx_slurm.lab.devcluster import DevCluster
from tests.slurm_harness import nvrx
from tests.slurm_jobs import CALM, POLITE, SAVING, STUBBORN, SlurmJobs, gate_command
from tests.waiting import until

pytestmark = pytest.mark.slurm

KILL_WAIT_S = 12
SETTINGS = {"KillWait": str(KILL_WAIT_S), "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}

LONG = "teardown: {grace: 1h, checkpoint_signal: USR1, checkpoint_timeout: 1h}"


@pytest.fixture(scope="module")
def strict_cluster():
    """A Slurm of three nodes with a short KillWait and with preemption."""
    with DevCluster.up(name=f"test-strict-{os.getpid()}", nodes=3, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def jobs(strict_cluster, gate, tmp_path):
    """Jobs on that Slurm; none of an earlier test is left."""
    strict_cluster.heal()
    jobs = SlurmJobs(strict_cluster, gate, tmp_path)
    yield jobs
    jobs.close()


@pytest.fixture
def patient_jobs(gate, tmp_path):
    """Jobs on a Slurm that keeps a job with a dead node in COMPLETING for longer than any test runs."""
    settings = {"SlurmdTimeout": "300"}
    with DevCluster.up(name=f"test-patient-{os.getpid()}", nodes=3, settings=settings) as cluster:
        jobs = SlurmJobs(cluster, gate, tmp_path)
        yield jobs
        jobs.close()


def saved(jobs):
    return {path.name: path.read_text() for path in jobs.folder.glob("saved-*")}


def signal_batch_host(jobs, job, name):
    """Send the signal that Slurm sends ahead of the time limit (`sbatch --signal=B:…`) now."""
    jobs.command("scancel", "--batch", f"--signal={name}", job.folder.job_id)


def test_cancelled_job_kills_before_slurm_does(jobs):
    """Workers that ignore SIGTERM are killed by their agents within KillWait, however long the grace: their stacks
    are on file, the journal is whole, nothing is left."""
    job = jobs.start(LONG, command=gate_command(jobs.gate, STUBBORN))
    jobs.running(job, 2)
    job.process.cancel()
    assert job.finish() == 143
    assert job.process.show()["JobState"] == "CANCELLED"
    jobs.all_gone(job)
    dumped = job.said(StacksDumped)
    why = "still there after the stop signal"
    assert {record.node: record.why for record in dumped} == {"n1": why, "n2": why}
    for record in dumped:
        assert record.files
        for file in record.files.values():
            assert "gate_worker.py" in (job.folder.path / file).read_text()
    assert [record.survivors for record in job.said(NodeLeft)] == [(), ()]
    assert job.said(JobEnded) == [JobEnded(exit_code=143, reason="cancelled")]


def test_cancelled_job_is_not_done_though_its_workers_exit_with_0(jobs):
    """The workers save and exit with 0 at SIGTERM, which Slurm sends to them and to the batch host at the same
    moment. The job still ends with 143."""
    job = jobs.start(CALM, command=gate_command(jobs.gate, POLITE))
    jobs.running(job, 2)
    job.process.cancel()
    assert job.finish() == 143
    assert job.said(JobEnded) == [JobEnded(exit_code=143, reason="cancelled")]
    jobs.all_gone(job)


def test_second_signal_skips_to_the_kill(jobs):
    """The first SIGTERM starts a teardown as long as KillWait allows; the second, some seconds later, ends it."""
    job = jobs.start(LONG, command=gate_command(jobs.gate, STUBBORN))
    jobs.running(job, 2)
    signal_batch_host(jobs, job, "TERM")
    log = job.folder.node_log("n1")
    until(lambda: log.read_text().count("teardown: ask; left: rank 0") >= 3, "the teardown to go on for two seconds")
    signal_batch_host(jobs, job, "TERM")
    assert job.finish() == 143
    jobs.all_gone(job)
    assert job.said(StacksDumped) == []  # that phase was skipped
    assert job.said(JobEnded) == [JobEnded(exit_code=143, reason="cancelled")]


def test_workers_save_ahead_of_the_time_limit(jobs):
    """The signal ahead of the time limit reaches every worker as `checkpoint_signal`; each saves, and the job ends
    with 124, long before the hour that it has for that is over."""
    job = jobs.start(LONG, command=gate_command(jobs.gate, SAVING.format(endless="none")))
    jobs.running(job, 2)
    signal_batch_host(jobs, job, "USR1")
    assert job.finish() == 124
    jobs.all_gone(job)
    assert saved(jobs) == {"saved-0": "n1", "saved-1": "n2"}
    assert job.said(JobEnded)[0].reason == "out of time: the job's time limit is near"
    assert job.said(StacksDumped) == []


def test_endless_saving_is_cut_off(jobs):
    """A worker that never finishes saving is killed once `checkpoint_timeout` and the grace are over, and its stacks
    show where it was; the others have saved."""
    bounds = "teardown: {grace: 6s, checkpoint_signal: USR1, checkpoint_timeout: 3s}"
    job = jobs.start(bounds, command=gate_command(jobs.gate, STUBBORN + SAVING.format(endless="1")))
    jobs.running(job, 2)
    signal_batch_host(jobs, job, "USR1")
    assert job.finish() == 124
    jobs.all_gone(job)
    assert saved(jobs) == {"saved-0": "n1", "saved-1": "n2"}
    (dumped,) = job.said(StacksDumped)
    assert "in save" in dumped.where[1]
    assert "teardown: checkpoint; left: rank 1" in job.folder.node_log("n2").read_text()


def test_job_that_is_cancelled_while_it_saves_ends_before_slurm_kills(jobs):
    """Workers that have an hour to save get what KillWait leaves once the job is cancelled; the first reason
    counts."""
    job = jobs.start(LONG, command=gate_command(jobs.gate, STUBBORN + SAVING.format(endless="1")))
    jobs.running(job, 2)
    signal_batch_host(jobs, job, "USR1")
    until(lambda: len(saved(jobs)) == 2, "workers to save")
    job.process.cancel()
    job.finish()
    jobs.all_gone(job)
    result = job.folder.read_result()
    assert result is not None
    assert result.exit_code == 124
    assert [ended.missing for ended in job.said(JobEnded)] == [()]


def test_cancelled_job_with_a_frozen_node_leaves_its_result_in_time(jobs):
    """A frozen node would keep the job beyond KillWait: the batch host ends the job before Slurm does, and the exit
    code is on file. No process is left once the node thaws."""
    job = jobs.start(CALM)
    jobs.running(job, 2)
    jobs.cluster.stop_node("n2")
    job.process.cancel()
    assert job.finish(timeout=60) == 143
    result = job.folder.read_result()
    assert result is not None
    assert (result.exit_code, result.reason) == (143, "it did not end in time, and was ended by the batch host")
    assert not job.folder.store_dir.exists()  # the batch host had the time to remove it
    jobs.cluster.restore_node("n2")
    jobs.all_gone(job)


def test_cancel_does_not_wait_for_slurm_to_clear_a_lost_node_away(patient_jobs):
    """Slurm completes a job for a minute and longer where a node of it is dead. `cancel` returns before that, once
    the job has left its result, and says so."""
    job = patient_jobs.start(CALM, spares=1)
    patient_jobs.running(job, 2)
    patient_jobs.cluster.kill_node("n2")
    patient_jobs.running(job, 2, cycle=1)
    done = nvrx("cancel", job.folder.job_id, cwd=patient_jobs.folder, env=patient_jobs.cluster.environment())
    assert (done.returncode, done.stdout) == (0, "CANCELLED\n")
    assert "done; Slurm is still completing it (COMPLETING)" in done.stderr
    patient_jobs.cluster.mark_down("n2")  # else Slurm would go on for a minute and longer
    assert job.finish() == 143
    patient_jobs.all_gone(job)
