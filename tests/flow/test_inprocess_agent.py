"""Restarts in process under an agent: each is reported to the agent, which acts only when a process is gone."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from nvrx_slurm.agent.supervisor import send_all
from nvrx_slurm.cli import cli
from nvrx_slurm.jobspec.model import HangSpec, StoreSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.journal.records import (
    NodeReady,
    Prewarmed,
    RestartDecided,
    RestartedInProcess,
    WorkerFailed,
    WorkerHung,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.lab.flow.replaying import replay
from tests.fault_harness import child_of
from tests.harness import Gate, RunningJob, Waiting, plan_of, wait_gone
from tests.inprocess.servers import Valkey
from tests.inprocess_worker import HOLD, RAISE
from tests.waiting import until

WORKER = Path(__file__).parents[1] / "inprocess_worker.py"
ONE_NODE = {"nodes": 1, "workers": 2}


def wrapped_plan(
    gate: Gate,
    base: Path,
    *words: str,
    nodes: int = 2,
    workers: int = 1,
    spares: int = 0,
    prewarm: PrewarmSpec | None = None,
    **bounds: Any,
) -> Plan:
    """A plain job of wrapped workers: two of them, one per node, by default."""
    command = (sys.executable, str(WORKER), str(gate.port), *words)
    role = RolePlan(name="main", command=command, nodes_per_replica=nodes, workers_per_node=workers, prewarm=prewarm)
    return plan_of(base, role, spares=spares, **bounds)


def restarts(job: RunningJob) -> list[RestartedInProcess]:
    return job.said(RestartedInProcess)


def replays(job: RunningJob, plan: Plan) -> bool:
    """Whether a replay of the journal through the core leads to the same decisions."""
    return replay(plan, job.entries).parting is None


def monitor_of(worker: Waiting) -> int:
    return child_of(worker.pid, "inprocess/monitor")


def shown(job: RunningJob, *command: str) -> str:
    """The output of a user's command on the job."""
    where = [job.folder.job_id, "--folder", str(job.folder.path.parent)]
    done = CliRunner().invoke(cli, [*command, *where], standalone_mode=False)
    assert done.exit_code == 0, done.output
    return done.stdout


# ------------------------------------------------------------------------------------------- the channel


def test_what_a_rank_reports_reaches_the_journal_and_changes_nothing(run_local, gate, tmp_path):
    """Each datagram, also one of 16,384 ranks, becomes one fact. No decision follows, and a replay agrees."""
    plan = wrapped_plan(gate, tmp_path, "tells:2:16384", nodes=1)
    job = run_local(plan)
    gate.wait(1, cycle=0)[0].go()
    assert job.finish() == 0
    first, second = restarts(job)
    assert (first.replica, first.cycle, first.node, first.restart.iteration) == ("main-0", 0, "n1", 1)
    assert second.restart.world_size == 16_384
    assert first.restart.cause == "exception on rank 0 (ValueError: no such layer: 49)"
    assert job.said(RestartDecided) == []
    assert replays(job, plan)
    assert "2 restarts; the last in" in shown(job, "status")
    assert json.loads(shown(job, "status", "--json"))["restarts_in_process"] == 2
    assert "restarted_in_process" in shown(job, "events")


def test_a_storm_of_restarts_is_counted_and_does_not_fill_the_journal(run_local, gate, tmp_path):
    """Fewer than 20 journal entries count all 100 restarts; none is lost at the end of the job."""
    job = run_local(wrapped_plan(gate, tmp_path, "tells:100:2", nodes=1))
    gate.wait(1, cycle=0)[0].go()
    assert job.finish() == 0
    assert len(restarts(job)) < 20
    assert sum(restart.times for restart in restarts(job)) == 100


# ------------------------------------------------------------------------------------------- in process


def test_an_exception_restarts_in_process_and_the_agents_do_nothing(run_local, gate, tmp_path):
    """Processes and cycle stay the same, no restart of the budget is spent, and the journal has each restart with its
    cause and phases. On each node a file that only its owner can read has the address of the job's store; it is
    removed with the job. A store that is killed between two restarts comes back with its data, and the group goes on
    in the same call."""
    plan = wrapped_plan(gate, tmp_path)
    job = run_local(plan)
    workers = gate.wait(2, cycle=0)
    (path,) = {Path(worker.env["NVRX_STORE_FILE"]) for worker in workers.values()}
    assert path.is_absolute() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {"url", "password"} <= json.loads(path.read_bytes()).keys()
    for iteration in (1, 2, 3):
        if iteration == 3:
            os.kill(child_of(job.process.pid, "valkey"), signal.SIGKILL)
        workers[iteration % 2].go(RAISE)
        told = job.when(
            lambda record, i=iteration: isinstance(record, RestartedInProcess) and record.restart.iteration == i,
            what=f"iteration {iteration}",
        )
        assert f"told to fail in iteration {iteration - 1}" in told.restart.cause
        assert (told.cycle, told.restart.world_size, told.restart.lost) == (0, 2, 0)
        assert told.restart.total_s > 0 and {rank.rank for rank in told.restart.ranks} == {0, 1}
    gate.open()
    assert job.finish() == 0
    assert (len(restarts(job)), job.said(WorkerFailed), job.said(RestartDecided)) == (3, [], [])
    assert len(job.said(WorkersStarted)) == 2
    assert replays(job, plan)
    assert not path.exists()


def test_a_killed_worker_after_a_restart_in_process_is_replaced_by_the_agents(run_local, gate, tmp_path):
    """After SIGKILL of a worker, the agents replace all workers of the cycle, the wrappers do not restart in process,
    no monitor is left, and the new group begins at its first iteration. A frozen monitor does not delay the agent:
    the failure is reported, and the teardown kills the monitor too. Each fault has one restart."""
    plan = wrapped_plan(gate, tmp_path, teardown__grace=1.0)
    job = run_local(plan)
    before = gate.wait(2, cycle=0)
    before[0].go(RAISE)
    job.expect(RestartedInProcess, cycle=0)
    watching = [monitor_of(worker) for worker in before.values()]
    os.kill(before[1].pid, signal.SIGKILL)
    after = gate.wait(2, cycle=1)
    wait_gone([*watching, *(worker.pid for worker in before.values())], timeout=0.0)
    after[1].go(RAISE)
    again = job.expect(RestartedInProcess, cycle=1)
    assert (again.restart.iteration, again.restart.call) == (1, 0)
    monitor = monitor_of(after[1])
    os.kill(monitor, signal.SIGSTOP)
    os.kill(after[1].pid, signal.SIGKILL)
    job.expect(WorkerFailed, cycle=1, rank=1, signal=9)
    gate.wait(2, cycle=2)
    wait_gone([monitor], timeout=0.0)
    gate.open()
    assert job.finish() == 0
    assert [record.cycle for record in restarts(job)] == [0, 1]
    assert [(failed.rank, failed.signal) for failed in job.said(WorkerFailed)] == [(1, 9), (1, 9)]
    assert len(job.said(RestartDecided)) == 2
    assert max(ready.teardown_s for ready in job.said(NodeReady)) < 3.0
    assert replays(job, plan)
    assert "restarted in process 1 time in this cycle" in shown(job, "explain")


def test_a_warm_worker_restarts_in_process(run_local, gate, tmp_path):
    """A worker that is forked from a warm process with the wrapper imported restarts in process as any other worker.
    After a death the next workers are forked from the warm process again."""
    warm = PrewarmSpec(imports=("nvrx_slurm.inprocess",))
    job = run_local(wrapped_plan(gate, tmp_path, prewarm=warm))
    for node in ("n1", "n2"):
        job.expect(Prewarmed, node=node)
    before = gate.wait(2, cycle=0)
    os.kill(before[1].pid, signal.SIGKILL)
    for cycle in (1, 2):
        workers = gate.wait(2, cycle=cycle)
        starts = [job.expect(WorkersStarted, cycle=cycle, node=node) for node in ("n1", "n2")]
        assert [(start.warm, start.cold) for start in starts] == [(1, None), (1, None)]
        workers[0].go(RAISE)
        told = job.expect(RestartedInProcess, cycle=cycle)
        assert (told.restart.iteration, told.restart.world_size, told.restart.lost) == (1, 2, 0)
        if cycle == 1:
            watching = [monitor_of(worker) for worker in workers.values()]
            os.kill(workers[1].pid, signal.SIGKILL)
            gate.wait(2, cycle=2)
            wait_gone([*watching, *(worker.pid for worker in workers.values())], timeout=0.0)
    gate.open()
    assert job.finish() == 0
    assert len(job.said(RestartDecided)) == 2


def test_a_lost_node_after_a_restart_in_process_is_replaced_by_a_hot_spare(run_local, gate, tmp_path):
    """All processes of a node die at once, the monitor too: a spare takes its rank, and the others restart with it. A
    killed agent leaves no process behind either, although monitors have sessions of their own and ignore signals."""
    job = run_local(wrapped_plan(gate, tmp_path, spares=2))
    before = gate.wait(2, cycle=0)
    before[0].go(RAISE)
    job.expect(RestartedInProcess, cycle=0)
    job.kill_node(before[1].env["NVRX_NODE"])
    after = gate.wait(2, cycle=1)
    assert after[1].env["NVRX_NODE"] == "n3"
    after[1].go(RAISE)
    job.expect(RestartedInProcess, cycle=1)
    everybody = [pid for worker in after.values() for pid in (worker.pid, monitor_of(worker))]
    os.kill(job.agent_pid("n3"), signal.SIGKILL)
    gate.wait(2, cycle=2)
    wait_gone(everybody)
    gate.open()
    assert job.finish() == 0
    assert [(record.cycle, record.restart.lost) for record in restarts(job)] == [(0, 0), (1, 0)]
    assert job.said(WorkerFailed) == []


def test_a_worker_that_leaves_its_group_is_replaced_not_restarted_without(run_local, gate, tmp_path):
    """SystemExit with a code is no Exception: the rank leaves its group, its process ends, and the agent restarts
    all."""
    job = run_local(wrapped_plan(gate, tmp_path, "exits", **ONE_NODE))
    before = gate.wait(2, cycle=0)
    before[1].go(7)
    gate.wait(2, cycle=1)
    gate.open()
    assert job.finish() == 0
    assert restarts(job) == []
    assert [(failed.rank, failed.exit_code) for failed in job.said(WorkerFailed)] == [(1, 7)]


def test_a_rank_that_is_unfit_is_replaced_not_restarted_without(run_local, gate, tmp_path):
    """An exception in Finalize ends the rank's process. This fault, too, has exactly one restart, by the agents."""
    job = run_local(wrapped_plan(gate, tmp_path, "unfit:1", **ONE_NODE))
    gate.wait(2, cycle=0)[0].go(RAISE)
    failed = job.expect(WorkerFailed, cycle=0)
    assert failed.rank == 1
    assert "cannot be finalized" in (failed.error or "")
    gate.wait(2, cycle=1)
    gate.open()
    assert job.finish() == 0
    assert (restarts(job), len(job.said(RestartDecided))) == ([], 1)


def test_a_process_past_its_hard_timeout_is_replaced_by_the_agents(run_local, gate, tmp_path):
    """Soft timeout: a function without progress restarts in process, without the agent, as long as its process
    reacts. Hard timeout: the monitor ends the process, and the agent replaces it; meanwhile no rank restarts without
    it."""
    job = run_local(wrapped_plan(gate, tmp_path, "hasty", **ONE_NODE))
    workers = gate.wait(2, cycle=0)
    assert "soft_timeout" in job.expect(RestartedInProcess, cycle=0).restart.cause
    assert job.said(RestartDecided) == []
    workers[1].go(HOLD)
    failed = job.expect(WorkerFailed, cycle=0)
    assert (failed.rank, failed.signal) == (1, signal.SIGTERM)
    gate.wait(2, cycle=1)
    gate.open()
    assert job.finish() == 0
    assert [decided.rank for decided in job.said(RestartDecided)] == [1]
    assert all(record.restart.lost == 0 for record in restarts(job))


# --------------------------------------------------------------------- without agents, with a site's store


def test_a_restart_needs_no_agent_and_is_reported_once_it_is_back(run_local, gate, tmp_path):
    """The agents are frozen while the group restarts and ends. Once continued, they report both, in order."""
    words = (f"marks:{tmp_path}",)
    job = run_local(wrapped_plan(gate, tmp_path, *words, fence_timeout=60.0, heartbeat__timeout=60.0))
    workers = gate.wait(2, cycle=0)
    job.expect(WorkersStarted, node="n1")
    job.expect(WorkersStarted, node="n2")
    agents = [job.agent_pid(node) for node in ("n1", "n2")]
    send_all(agents, signal.SIGSTOP)
    workers[1].go(RAISE)
    until(lambda: all((tmp_path / f"1.{rank}").exists() for rank in workers), "all ranks to begin again")
    gate.open()
    wait_gone([worker.pid for worker in workers.values()])
    send_all(agents, signal.SIGCONT)
    assert job.finish() == 0
    (restart,) = restarts(job)
    said = [type(entry.record) for entry in job.entries if getattr(entry.record, "node", None) == restart.node]
    assert said.index(RestartedInProcess) < said.index(WorkersDone)


def test_the_sites_own_store_serves_the_group_too(run_local, gate, tmp_path):
    """With `store.url` the ranks meet on the site's store, with the password that only the job's owner can read."""
    server = Valkey(tmp_path / "site", "secret")
    try:
        plan = wrapped_plan(gate, tmp_path, **ONE_NODE)
        plan = msgspec.structs.replace(plan, store=StoreSpec(url=f"{server.url}/0"))
        job = run_local(plan, env={"NVRX_SLURM_STORE_PASSWORD": "secret"})
        gate.wait(2, cycle=0)[1].go(RAISE)
        job.expect(RestartedInProcess, cycle=0)
        gate.open()
        assert job.finish() == 0
        assert job.said(WorkerFailed) == []
    finally:
        server.end()


# ------------------------------------------------------------------------------------------- hangs and ends


def test_a_restart_that_takes_longer_than_a_step_may_is_no_hang(run_local, gate, tmp_path):
    """A restart in process may take longer than the step timeout. The group's first step after it has the startup
    timeout."""
    job = run_local(wrapped_plan(gate, tmp_path, "once", "slow:8", hang=HangSpec(step_timeout=5.0), **ONE_NODE))
    gate.wait(2, cycle=0)
    assert job.finish() == 0
    (restart,) = restarts(job)
    assert restart.restart.phases["finalized"] >= 8.0
    assert job.said(WorkerHung) == []


def test_a_worker_that_hangs_after_a_restart_is_found(run_local, gate, tmp_path):
    """The deadlines apply again after the restart: a function that does not reach its first step is a hang."""
    job = run_local(wrapped_plan(gate, tmp_path, hang=HangSpec(startup_timeout=8.0), **ONE_NODE))
    gate.wait(2, cycle=0)[1].go(RAISE)
    job.expect(RestartedInProcess, cycle=0)
    hung = job.expect(WorkerHung, cycle=0)
    assert "after its restart in process" in hung.why
    gate.wait(2, cycle=1)
    gate.open()
    assert job.finish() == 0
