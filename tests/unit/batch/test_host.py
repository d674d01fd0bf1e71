"""What the batch host asks of Slurm, and when it gives up."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from nvrx_slurm.batch import children
from nvrx_slurm.batch import host as batch_host
from nvrx_slurm.batch.host import Host
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.folder import JobFolder, JobInfo
from nvrx_slurm.util.clock import SystemClock
from tests.unit.core.fleet import plain

# Silent at first, then as Slurm shows a job in its GraceTime; writes down its other arguments.
SCONTROL = """#!/bin/sh
case "$2" in
  show) rm {0}/busy 2>/dev/null || echo JobState=RUNNING Requeue=1 Restarts=0 PreemptTime=2026-11-23T20:28:21 ;;
  *) echo "$@" >> {0}/asked; {1} ;;
esac
"""
REFUSED = 'echo "slurm_requeue: error: Requested operation is presently disabled" >&2; exit 1'


def host_of(folder: Path, cluster: str) -> Host:
    job = JobFolder(folder / "7")
    job.create()
    info = JobInfo(job_id="7", name="digits", cluster=cluster, started_at=0.0, nodes=("n1",))
    return Host(
        plan=plain(nodes=1, spares=0),
        info=info,
        folder=job,
        launcher=(),
        own_flags=False,
        store_password=None,
        env={},
        clock=SystemClock(),
    )


@pytest.mark.parametrize(
    ("answer", "logged"), [("exit 0", "done"), (REFUSED, "Requested operation is presently disabled")]
)
async def test_preempted_job_is_requeued_also_by_a_slurmctld_that_is_busy(
    answer: str, logged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A query without an answer does not lose the job, and a refusal is logged as one."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL.format(tmp_path, answer))
    scontrol.chmod(0o700)
    (tmp_path / "busy").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(batch_host, "REQUEUE_PAUSE_S", 0.0)
    with caplog.at_level(logging.INFO):
        await host_of(tmp_path, "slurm")._requeue()
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert f"scontrol requeue: {logged}" in caplog.text


async def test_controller_that_never_runs_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends with an error, and does not keep its nodes until the time limit."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(children, "RESTART_PAUSES_S", (0.0,))
    monkeypatch.setattr(batch_host, "MOST_FAILURES", 3)
    with pytest.raises(NvrxError):
        await asyncio.wait_for(host_of(tmp_path, "local")._keep_controller(), 30.0)
