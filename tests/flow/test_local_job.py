"""Whole jobs on this machine: real agents, real store, real workers, real deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import (
    JobEnded,
    NodeLost,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    RestartDecided,
    Shutdown,
    WorkerFailed,
)
from tests.harness import gate_plan, plan_of, wait_gone


def ready(job, gate, *, nodes, workers=2, cycle=0):
    """Wait until a cycle's workers all run; returns them by rank."""
    there = gate.wait(nodes * workers, cycle=cycle)
    job.expect(RendezvousClosed, cycle=cycle)
    return there


def test_job_runs_to_its_end_with_torchruns_environment(run_local, gate, tmp_path):
    """Every rank has the environment that torchrun would give it. Once all are done, the job, spares included, ends
    with 0. Until then the store's password is in one 0600 file, and in no command line, log or journal."""
    job = run_local(gate_plan(gate, tmp_path))
    workers = ready(job, gate, nodes=2)
    assert_secrets_are_in_one_file(job)
    assert sorted(workers) == [0, 1, 2, 3]
    env = workers[3].env
    assert (env["LOCAL_RANK"], env["GROUP_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("1", "1", "4", "2")
    assert env["NVRX_NODE"] == "n2"
    assert len({(w.env["MASTER_ADDR"], w.env["MASTER_PORT"]) for w in workers.values()}) == 1
    gate.open()
    assert job.finish() == 0
    assert job.said(JobEnded) == [JobEnded(exit_code=0, reason="done")]
    assert (job.folder.cycle_logs("main-0", 0, 0) / "rank-2.out").read_text() == "rank 2 waits\n"
    assert "[main-0 2] rank 2 waits" in job.folder.job_log.read_text()
    assert not (job.folder.path / "store.json").exists()


def assert_secrets_are_in_one_file(job):
    address = job.folder.read_store()
    assert (job.folder.path / "store.json").stat().st_mode & 0o777 == 0o600
    assert job.folder.path.stat().st_mode & 0o777 == 0o700
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    open_files = [path for path in job.folder.path.rglob("*") if path.is_file() and path.name != "store.json"]
    assert job.folder.path / "plan.json" in open_files
    for secret in (address.password, address.token):
        assert secret not in listed
        for path in open_files:
            assert secret.encode() not in path.read_bytes()


def test_killed_node_is_replaced_by_the_spare(run_local, gate, tmp_path):
    """A node's death costs one rendezvous: the spare runs its ranks, the others keep theirs, the job ends with 0."""
    job = run_local(gate_plan(gate, tmp_path))
    before = ready(job, gate, nodes=2)
    job.all_joined("n3")
    job.kill_node("n2")
    after = ready(job, gate, nodes=2, cycle=1)
    assert {rank: w.env["NVRX_NODE"] for rank, w in after.items()} == {0: "n1", 1: "n1", 2: "n3", 3: "n3"}
    assert after[0].env["MASTER_PORT"] != before[0].env["MASTER_PORT"]
    wait_gone([w.pid for w in before.values()])
    gate.open()
    assert job.finish() == 0
    assert job.said(NodeLost)[0].cause == "connection_closed"
    phases = job.said(Recovered)[0].phases
    assert sum(phases.values()) == pytest.approx(job.said(Recovered)[0].total_s)


def test_two_killed_nodes_are_replaced_by_two_spares(run_local, gate, tmp_path):
    """A job survives as many dead nodes as it has spares, also at the same moment."""
    job = run_local(gate_plan(gate, tmp_path, nodes=3, spares=2, workers=1))
    ready(job, gate, nodes=3, workers=1)
    job.all_joined("n4", "n5")
    job.kill_node("n1")
    job.kill_node("n3")
    last = job.when(
        lambda r: isinstance(r, RendezvousClosed) and set(r.nodes) == {"n4", "n2", "n5"}, what="both replaced"
    )
    gate.wait(3, cycle=last.cycle)
    gate.open()
    assert job.finish() == 0


def test_without_spares_the_job_stops_for_a_retry(run_local, gate, tmp_path):
    """No spare and no `min_nodes`: exit code 75, and the reason says what is missing."""
    job = run_local(gate_plan(gate, tmp_path, spares=0))
    workers = ready(job, gate, nodes=2)
    job.kill_node("n1")
    assert job.finish() == 75
    assert "needs 2 nodes and has 1" in job.said(Shutdown)[0].reason
    wait_gone([w.pid for w in workers.values()])


def test_without_spares_min_nodes_lets_the_job_go_on_smaller(run_local, gate, tmp_path):
    """With `min_nodes: 1` the survivor goes on alone, as rank 0 of a smaller world."""
    job = run_local(gate_plan(gate, tmp_path, spares=0, min_nodes=1))
    ready(job, gate, nodes=2)
    job.kill_node("n1")
    after = ready(job, gate, nodes=1, cycle=1)
    assert {w.env["WORLD_SIZE"] for w in after.values()} == {"2"}
    gate.open()
    assert job.finish() == 0


def test_killed_spare_restarts_no_worker_and_a_failed_worker_restarts_all_in_place(run_local, gate, tmp_path):
    """The death of a spare touches no worker. A worker's failure, by exit code or signal, restarts the replica in
    place and spends one restart."""
    job = run_local(gate_plan(gate, tmp_path, max_restarts=2))
    before = ready(job, gate, nodes=2)
    job.kill_node("n3")
    job.expect(NodeLost, node="n3")
    before[1].go(exit_code=7)
    again = ready(job, gate, nodes=2, cycle=1)
    os.kill(again[1].pid, signal.SIGSEGV)
    last = ready(job, gate, nodes=2, cycle=2)
    gate.open()
    assert job.finish() == 0
    for workers in (again, last):
        assert {w.env["NVRX_NODE"] for w in workers.values()} == {"n1", "n2"}
    assert [(failed.exit_code, failed.signal) for failed in job.said(WorkerFailed)] == [(7, None), (None, 11)]
    assert [decided.restarts_left for decided in job.said(RestartDecided)] == [1, 0]
    assert [opened.cycle for opened in job.said(RendezvousOpened)] == [0, 1, 2]  # none for the spare


def test_spent_restart_budget_ends_with_1(run_local, gate, tmp_path):
    """One failure more than `max_restarts` ends the job with 1."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, max_restarts=1))
    ready(job, gate, nodes=1)[0].go(exit_code=3)
    ready(job, gate, nodes=1, cycle=1)[0].go(exit_code=3)
    assert job.finish() == 1
    assert "restart budget spent" in job.said(Shutdown)[0].reason


def test_command_that_cannot_start_says_why(run_local, tmp_path):
    """The shutdown's reason names the missing program, and no restart is tried."""
    role = RolePlan(name="main", command=("no-such-program",), nodes_per_replica=1)
    job = run_local(plan_of(tmp_path, role, max_restarts=3))
    assert job.finish() == 93
    assert "No such program" in job.said(Shutdown)[0].reason


def test_wrong_option_of_the_wrapper_is_not_tried_again(run_local, tmp_path):
    """Each start would end with the same exception: the job ends at once, and says what is wrong."""
    script = "from nvrx_slurm import inprocess; inprocess.Wrapper(barrier_timeout=-1)"
    role = RolePlan(name="main", command=(sys.executable, "-c", script), nodes_per_replica=1)
    job = run_local(plan_of(tmp_path, role, max_restarts=3))
    assert job.finish() == 93
    [shutdown] = job.said(Shutdown)
    assert "an option of its in-process wrapper is wrong" in shutdown.reason
    assert "OptionError: " in shutdown.reason
    assert "barrier_timeout" in shutdown.reason


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_cancelled_job_leaves_no_worker(run_local, gate, tmp_path, number, code):
    """A signal to the batch host ends all workers and gives the shell's exit code for it."""
    job = run_local(gate_plan(gate, tmp_path, spares=0))
    workers = ready(job, gate, nodes=2)
    job.process.send_signal(number)
    assert job.finish() == code
    wait_gone([w.pid for w in workers.values()])


def test_time_limit_ends_the_job_with_124(run_local, gate, tmp_path):
    """Shortly before the time limit the workers are stopped, and the job ends with 124."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, time_limit_s=24.0))
    workers = ready(job, gate, nodes=1)
    assert job.finish() == 124
    wait_gone([w.pid for w in workers.values()])


def test_replica_restarts_alone(run_local, gate, tmp_path):
    """The death of a rollout node restarts that rollout on a spare; the policy's processes go on untouched."""
    policy = RolePlan(name="policy", command=gate.command, nodes_per_replica=2, workers_per_node=1)
    rollout = RolePlan(name="rollout", command=gate.command, replicas=2, nodes_per_replica=1)
    job = run_local(plan_of(tmp_path, policy, rollout, spares=1))
    before = gate.wait(2, cycle=0, replica="policy-0")
    victim = gate.wait(1, cycle=0, replica="rollout-1")[0]
    job.all_joined("n5")
    job.kill_node(victim.env["NVRX_NODE"])
    after = gate.wait(1, cycle=1, replica="rollout-1")[0]
    assert after.env["NVRX_NODE"] == "n5"
    gate.open()
    assert job.finish() == 0
    assert {opened.replica for opened in job.said(RendezvousOpened) if opened.cycle} == {"rollout-1"}
    assert {w.pid for w in gate.wait(2, cycle=0, replica="policy-0").values()} == {w.pid for w in before.values()}


def test_output_larger_than_any_pipe_reaches_the_files(run_local, tmp_path):
    """Nothing that a worker printed before its end is lost, to the last byte."""
    code = "import sys; sys.stdout.write('x' * 99 + '\\n'); sys.stdout.write(('y' * 1023 + '\\n') * 4096)"
    role = RolePlan(name="main", command=(sys.executable, "-c", code), nodes_per_replica=1)
    job = run_local(plan_of(tmp_path, role))
    assert job.finish() == 0
    assert (job.folder.cycle_logs("main-0", 0, 0) / "rank-0.out").stat().st_size == 100 + 4096 * 1024
