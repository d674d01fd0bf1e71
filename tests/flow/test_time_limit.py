"""A job without Slurm gets its checkpoint signal ahead of its time limit, as Slurm sends it to its own jobs."""

from __future__ import annotations

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import JobEnded, StacksDumped
from tests.harness import plan_of
from tests.slurm_jobs import SAVING, gate_command


def saving_plan(gate, tmp_path, *, endless, time_limit_s, teardown__checkpoint_timeout):
    """Two nodes with one worker each, which saves at the checkpoint signal; rank `endless` never finishes saving."""
    command = gate_command(gate, SAVING.format(endless=endless))
    role = RolePlan(name="main", command=command, nodes_per_replica=2)
    return plan_of(
        tmp_path,
        role,
        time_limit_s=time_limit_s,
        teardown__grace=1.0,
        teardown__checkpoint_signal="SIGUSR1",
        teardown__checkpoint_timeout=teardown__checkpoint_timeout,
    )


def saved(tmp_path):
    return {path.name: path.read_text() for path in tmp_path.glob("saved-*")}


def test_workers_save_before_the_time_is_up(run_local, gate, tmp_path):
    """Every worker gets the checkpoint signal although saving may take an hour. All have saved, the job ends with
    124, and no worker had to be killed."""
    job = run_local(
        saving_plan(gate, tmp_path, endless="none", time_limit_s=24.0, teardown__checkpoint_timeout=3600.0)
    )
    gate.wait(2, cycle=0)
    assert job.finish() == 124
    assert saved(tmp_path) == {"saved-0": "n1", "saved-1": "n2"}
    assert job.said(StacksDumped) == []
    assert "out of time" in job.said(JobEnded)[0].reason


def test_worker_that_never_finishes_saving_is_cut_off(run_local, gate, tmp_path):
    """`checkpoint_timeout` bounds the saving, and the grace what follows: a worker that still saves then is
    killed."""
    job = run_local(saving_plan(gate, tmp_path, endless="1", time_limit_s=24.0, teardown__checkpoint_timeout=2.0))
    gate.wait(2, cycle=0)
    assert job.finish() == 124
    assert saved(tmp_path) == {"saved-0": "n1", "saved-1": "n2"}
