"""A second signal ends a job without waiting for the teardown."""

from __future__ import annotations

import signal

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from tests.harness import plan_of, wait_gone
from tests.slurm_jobs import STUBBORN, gate_command
from tests.waiting import until


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_does_not_wait_for_the_teardown(run_local, gate, tmp_path, number, code):
    """Workers that ignore the stop signal, and have an hour of grace, are killed at the second signal. The exit code
    is that of the first signal."""
    role = RolePlan(name="main", command=gate_command(gate, STUBBORN), workers_per_node=2)
    job = run_local(plan_of(tmp_path, role, teardown__grace=3600.0))
    workers = gate.wait(2, cycle=0)
    job.process.send_signal(number)
    log = job.folder.node_log("n1")
    until(lambda: log.read_text().count("teardown: ask; left: rank 0") >= 3, "the teardown to go on for two seconds")
    job.process.send_signal(number)
    assert job.finish() == code
    wait_gone([worker.pid for worker in workers.values()])
