"""A job whose workers fail right away, again and again: real processes, and the pauses between them."""

from __future__ import annotations

import signal
import sys

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import cli
from nvrx_slurm.jobspec.model import BackoffSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import RendezvousClosed, RendezvousOpened, RestartDecided
from tests.harness import plan_of

FAILS = RolePlan(name="main", command=(sys.executable, "-c", "raise SystemExit(3)"), nodes_per_replica=1)
FOR_EVER_S = 3600.0


def told(command: str, folder: str) -> str:
    done = CliRunner().invoke(cli, [command, "j1", "--folder", folder], standalone_mode=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_crash_loop_is_slowed_down_from_the_third_failure_on(run_local, tmp_path):
    """Two restarts are immediate. Each later cycle begins no sooner than the journal says. A spent budget ends the
    job."""
    backoff = BackoffSpec(after=3, within=60.0, initial=0.3, max=0.6)
    job = run_local(plan_of(tmp_path, FAILS, max_restarts=5, backoff=backoff))
    assert job.finish() == 1
    decided = {entry.record.cycle: entry for entry in job.entries if isinstance(entry.record, RestartDecided)}
    closed = {entry.record.cycle: entry.t for entry in job.entries if isinstance(entry.record, RendezvousClosed)}
    assert [entry.record.delay_s for entry in decided.values()] == [0.0, 0.0, 0.3, 0.6, 0.6, 0.0]
    assert list(closed) == list(range(6))
    for cycle in range(1, 6):
        assert closed[cycle] - decided[cycle - 1].t >= decided[cycle - 1].record.delay_s


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_job_that_waits_in_a_crash_loop_can_be_cancelled(run_local, tmp_path, number, code):
    """The wait of an hour ends at once; until then `status`, `events` and `explain` say what the job waits for."""
    backoff = BackoffSpec(after=1, within=60.0, initial=FOR_EVER_S, max=FOR_EVER_S)
    job = run_local(plan_of(tmp_path, FAILS, max_restarts=5, backoff=backoff))
    job.expect(RendezvousOpened, cycle=1)
    for command in ("status", "events", "explain"):
        text = " ".join(told(command, str(job.folder.path.parent)).split())
        assert "cycle 1 waits for 1h 00m because 1 cycle in a row failed" in text, command
    job.process.send_signal(number)
    assert job.finish() == code
    assert len(job.said(RendezvousClosed)) == 1
