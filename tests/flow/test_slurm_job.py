"""Whole jobs on a real Slurm: six nodes, real slurmd, real node loss."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.folder import JobFolder
from nvrx_slurm.records import JobEnded, JobStarted, NodeLost, RoundClosed, RoundOpened, Shutdown
from tests.harness import RunningJob, wait_gone
from tests.slurm_harness import SlurmHandle, nvrx, settled, started_again, submit

pytestmark = pytest.mark.slurm(nodes=6)


def job_yaml(folder: Path, gate, *, nodes=4, spares=2, extra="", bounds="teardown: {grace: 5s}") -> Path:
    path = folder / "job.yaml"
    path.write_text(
        f"name: flow\ncommand: {json.dumps(gate.command)}\nnodes: {nodes}\nspares: {spares}\n"
        f"workers_per_node: 1\nfault_tolerance: {{{bounds}}}\n{extra}\n"
    )
    return path


@pytest.fixture
def launch(healthy_cluster, gate, tmp_path):
    """Submits jobs; cancels what a failed test leaves."""
    jobs = []

    def start(**options):
        jobs.append(submit(healthy_cluster, job_yaml(tmp_path, gate, **options)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
        if job.process.poll() is None:
            job.process.cancel()


def running(job, gate, count, cycle=0):
    there = gate.wait(count, cycle=cycle)
    job.expect(RoundClosed, cycle=cycle)
    return there


def test_job_with_spares_completes(launch, gate):
    """Four nodes work, two stand by; all exit 0, and Slurm says COMPLETED."""
    job = launch()
    workers = running(job, gate, 4)
    assert [workers[rank].env["NVRX_NODE"] for rank in range(4)] == ["n1", "n2", "n3", "n4"]
    for spare in ("n5", "n6"):
        job.agent_pid(spare)
    gate.open()
    assert job.finish() == 0
    assert job.process.show()["JobState"] == "COMPLETED"
    assert job.said(RoundClosed)[0].standby <= 2


def test_lost_node_is_replaced_inside_the_allocation(launch, gate, healthy_cluster):
    """slurmd, step and workers of a node killed at once: its ranks run on a spare, the job ends 0."""
    job = launch()
    running(job, gate, 4)
    settled(job, 6)
    healthy_cluster.kill_node("n2")
    after = running(job, gate, 4, cycle=1)
    assert [after[rank].env["NVRX_NODE"] for rank in range(4)] == ["n1", "n5", "n3", "n4"]
    gate.open()
    job.expect(JobEnded, exit_code=0)
    assert job.finish(timeout=60) == 0
    assert job.said(NodeLost)[0].cause == "tether_lost"


def test_two_lost_nodes_then_a_third(launch, gate, healthy_cluster):
    """Two spares cover two deaths; the third ends the job with 75."""
    job = launch()
    running(job, gate, 4)
    settled(job, 6)
    healthy_cluster.kill_node("n2")
    running(job, gate, 4, cycle=1)
    healthy_cluster.kill_node("n3")
    running(job, gate, 4, cycle=2)
    healthy_cluster.kill_node("n4")
    job.expect(JobEnded, exit_code=75)
    for node in ("n2", "n3", "n4"):
        healthy_cluster.mark_down(node)
    assert job.finish(timeout=60) == 75


def test_min_nodes_goes_on_smaller(launch, gate, healthy_cluster):
    """Without a spare the survivors go on when `min_nodes` allows it."""
    job = launch(nodes=3, spares=0, extra="min_nodes: 2")
    running(job, gate, 3)
    settled(job, 3)
    healthy_cluster.kill_node("n3")
    after = running(job, gate, 2, cycle=1)
    assert {w.env["WORLD_SIZE"] for w in after.values()} == {"2"}
    healthy_cluster.mark_down("n3")
    gate.open()
    assert job.finish(timeout=60) == 0


def test_lost_spare_restarts_nobody(launch, gate, healthy_cluster):
    """The loss of a spare is recorded, and no worker notices."""
    job = launch()
    running(job, gate, 4)
    settled(job, 6)
    healthy_cluster.kill_node("n6")
    job.expect(NodeLost, node="n6")
    healthy_cluster.mark_down("n6")
    gate.open()
    assert job.finish(timeout=60) == 0
    assert len(job.said(RoundOpened)) == 1


def test_failed_worker_restarts_in_place_until_the_budget_is_spent(launch, gate):
    """A worker that exits 3 is restarted on its node; beyond the budget the job ends 1, which Slurm shows too."""
    job = launch(nodes=2, spares=1, bounds="max_restarts: 1")
    running(job, gate, 2)[0].go(exit_code=3)
    after = running(job, gate, 2, cycle=1)
    assert after[0].env["NVRX_NODE"] == "n1"
    after[1].go(exit_code=3)
    assert job.finish() == 1
    assert job.process.show()["JobState"] == "FAILED"


def test_cancel_leaves_no_worker(launch, gate, healthy_cluster, tmp_path):
    """`nvrx-slurm cancel` ends every worker, and Slurm says CANCELLED."""
    job = launch(nodes=2, spares=1)
    workers = running(job, gate, 2)
    done = nvrx("cancel", job.folder.job_id, cwd=tmp_path, env=healthy_cluster.environment())
    assert done.returncode == 0, done.stderr
    job.finish()
    wait_gone([w.pid for w in workers.values()])
    assert job.process.show()["JobState"] == "CANCELLED"
    assert job.said(JobEnded)[0].exit_code == 143


def test_time_limit_ends_with_124(launch, gate):
    """Before Slurm's time limit strikes the job stops its workers and says why."""
    job = launch(nodes=2, spares=0, extra="slurm: {time: 1m, extra: {}}")
    workers = running(job, gate, 2)
    assert job.finish(timeout=90) == 124
    assert job.said(Shutdown)[0].exit_code == 124
    wait_gone([w.pid for w in workers.values()])


def test_rendered_script_submitted_with_plain_sbatch_does_the_same(healthy_cluster, gate, tmp_path):
    """`render` and plain `sbatch` need nothing else of ours on the command line."""
    path = job_yaml(tmp_path, gate, nodes=2, spares=1)
    env = healthy_cluster.environment()
    script = nvrx("render", path.name, cwd=tmp_path, env=env).stdout
    (tmp_path / "job.sh").write_text(script)
    sent = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert sent.returncode == 0, sent.stderr
    gate.wait(2, cycle=0)
    gate.open()
    job_id = sent.stdout.strip()
    job = RunningJob(JobFolder(tmp_path / "nvrx-jobs" / job_id), SlurmHandle(job_id, healthy_cluster))
    assert job.finish() == 0


def test_requeued_job_goes_on_as_its_next_generation(launch, gate, healthy_cluster):
    """After `scontrol requeue` the same folder holds both generations in one journal without a gap."""
    job = launch(nodes=2, spares=0)
    running(job, gate, 2)
    env = {**os.environ, **healthy_cluster.environment()}
    subprocess.run(["scontrol", "requeue", job.folder.job_id], env=env, check=True)
    started_again(job, env)
    job.when(lambda r: isinstance(r, JobStarted) and r.generation == 1, what="generation 1", timeout=60)
    gate.wait(2, cycle=0, generation=1)
    gate.open()
    assert job.finish(timeout=60) == 0
    assert [entry.n for entry in job.entries] == list(range(1, len(job.entries) + 1))


def test_lost_batch_host_is_requeued_by_the_survivors(launch, gate, healthy_cluster):
    """The first node dies, with store and controller: the others stop their workers and give the job back to the
    queue, and its next generation runs, in the same journal."""
    job = launch(nodes=2, spares=1, bounds="control_plane_grace: 2s, teardown: {grace: 5s}")
    workers = running(job, gate, 2)
    healthy_cluster.kill_node("n1")
    env = {**os.environ, **healthy_cluster.environment()}
    wait_gone([w.pid for w in workers.values()])
    healthy_cluster.restore_node("n1")
    started_again(job, env)
    gate.wait(2, cycle=0, generation=1, timeout=60)
    gate.open()
    assert job.finish(timeout=60) == 0
    assert [entry.n for entry in job.entries] == list(range(1, len(job.entries) + 1))
