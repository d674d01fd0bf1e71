"""Workers that end early, will not end, leave processes behind, or run out of memory."""

from __future__ import annotations

import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.jobspec.model import HangSpec
from nvrx_slurm.journal.records import NodeReady, StacksDumped, WorkerFailed
from nvrx_slurm.util.processes import is_alive
from tests.fault_jobs import causes, ends_well, fault_plan, printed
from tests.harness import wait_gone
from tests.waiting import until


@pytest.mark.parametrize("nodes", [1, 2], ids=["on its own node", "across nodes"])
def test_early_exit_with_0_ends_the_wait_of_the_others(run_local, gate, tmp_path, nodes):
    """One rank ends with 0 and the others wait for it: after `exit_skew` they count as hung, and all are
    restarted."""
    workers = 2 // nodes
    plan = fault_plan(
        gate, tmp_path, "exits_early", nodes=nodes, workers=workers, hang=HangSpec(exit_skew=5.0), max_restarts=1
    )
    job = run_local(plan)
    ends_well(job, gate, workers=2, cycle=1)
    (cause,) = causes(job)
    assert "hung" in cause and "with exit code 0" in cause and "still runs" in cause


def test_worker_that_ignores_sigterm_is_killed_within_the_budget(run_local, gate, tmp_path):
    """The stacks of a worker that ignores SIGTERM are on file before it is killed, and the node is ready in time."""
    job = run_local(fault_plan(gate, tmp_path, "ignores_sigterm", nodes=1, teardown__grace=8.0))
    workers = gate.wait(2, cycle=0)
    until(lambda: printed(job, 1) == b"deaf\n", "rank 1 to ignore SIGTERM")
    workers[0].go(exit_code=7)
    ends_well(job, gate, workers=2, cycle=1)
    dumped = job.said(StacksDumped)[0]
    assert dumped.where[1].endswith("in wait_quietly")
    assert "wait_quietly" in (job.folder.path / dumped.files[1]).read_text()
    assert job.said(NodeReady)[0].teardown_s >= 1.0
    assert causes(job) == ["rank 0 on n1 exited with code 7"]


def test_eight_workers_of_64_that_ignore_sigterm_are_dumped_and_killed(run_local, gate, tmp_path):
    """Stacks are on file for the eight workers that ignore SIGTERM, and for no other worker; then the eight are
    killed."""
    deaf = range(0, 64, 8)
    ranks = ",".join(map(str, deaf))
    job = run_local(fault_plan(gate, tmp_path, "ignores_sigterm", rank=ranks, workers=64, teardown__grace=10.0))
    before = gate.wait(64, cycle=0, timeout=90.0)
    until(lambda: all(printed(job, rank) == b"deaf\n" for rank in deaf), "eight to ignore SIGTERM")
    before[1].go(exit_code=7)
    gate.wait(64, cycle=1, timeout=90.0)
    wait_gone([worker.pid for worker in before.values()], timeout=0.0)
    gate.open()
    assert job.finish() == 0
    (dumped,) = job.said(StacksDumped)
    assert sorted(dumped.files) == list(deaf)
    assert "teardown: terminate; left: rank 0, rank 8" in job.folder.node_log("n1").read_text()


def test_what_a_worker_leaves_behind_does_not_outlive_the_cycle(run_local, gate, tmp_path):
    """A worker's daemon (own session, parent gone, SIGTERM ignored) is gone before the next cycle begins. 500
    children that ignore SIGTERM are all killed."""
    bounds = {"workers": 1, "rank": 0, "teardown__grace": 1.0}
    job = run_local(fault_plan(gate, tmp_path, "leaves_a_daemon+has_500_children", **bounds))
    worker = gate.wait(1, cycle=0)[0]
    daemon = int(until(lambda: printed(job, 0).endswith(b"\n") and printed(job, 0), "its daemon's pid").split()[1])
    assert is_alive(daemon)
    worker.go(exit_code=7)
    worker = gate.wait(1, cycle=1)[0]
    assert not is_alive(daemon)
    until(lambda: printed(job, 0, cycle=1) == b"all there\n", "it has its children")
    children = descendants(worker.pid)
    assert len(children) == 500
    worker.go(exit_code=7)
    gate.wait(1, cycle=2)
    wait_gone(children, timeout=0.0)
    ends_well(job, gate, workers=1, cycle=2)


def test_exception_is_reported_before_the_worker_ends(run_local, gate, tmp_path):
    """A worker that raises an exception and then does not exit is restarted, with the exception as the cause. A
    worker with 1 GB of memory is known to have failed by its own report, not by the end of its process. A worker that
    gets no more memory is restarted, and the journal names that as the cause."""
    fault = "raises_and_lingers+raises_with_a_gigabyte+runs_out_of_memory"
    job = run_local(fault_plan(gate, tmp_path, fault, workers=1, rank=0, teardown__grace=1.0))
    ends_well(job, gate, workers=1, cycle=3)
    for failed in job.said(WorkerFailed)[:2]:
        assert (failed.exit_code, failed.error) == (1, "ValueError: no such layer: 49")
    lingers, large, no_memory = causes(job)
    assert lingers == "rank 0 on n1 failed: ValueError: no such layer: 49"
    assert large.startswith("rank 0 on n1 failed: ValueError: no such layer: 49")
    assert no_memory.startswith("rank 0 on n1 failed: MemoryError")
    assert len(job.said(WorkerFailed)) == 3
