"""Commands of a user that act on a running job: real agents, real store, real workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from click.testing import CliRunner, Result

from nvrx_slurm.api.handle import job as handle
from nvrx_slurm.cli import cli
from nvrx_slurm.errors import RefusedByJob, UsageError
from nvrx_slurm.journal.records import (
    CommandEnded,
    NodeDrained,
    NodeUndrained,
    RendezvousClosed,
    RestartDecided,
    RestartOrdered,
)
from tests.harness import WAIT_S, RunningJob, gate_plan, wait_gone


def typed(job: RunningJob, command: str, *args: str) -> Result:
    """Run the command on this job."""
    where = ("--folder", str(job.folder.path.parent))
    return CliRunner().invoke(cli, [command, job.folder.job_id, *where, *args], standalone_mode=False)


def exec_in_background(job: RunningJob, rank: int) -> subprocess.Popen[str]:
    """Start an `exec` whose command does not end by itself, and wait until that command has begun."""
    argv = [sys.executable, "-m", "nvrx_slurm", "exec", job.folder.job_id, f"--folder={job.folder.path.parent}"]
    argv += [f"--rank={rank}", "--", "sh", "-c", "echo here; sleep 1000"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_user_restarts_drains_and_undrains(run_local, gate, tmp_path):
    """A restart keeps nodes and budget; a drain moves ranks to the spare; a drain without a spare is refused."""
    job = run_local(gate_plan(gate, tmp_path, nodes=2, spares=1, workers=1, max_restarts=0))
    first = gate.wait(2, cycle=0)
    job.agent_pid("n3")

    result = typed(job, "exec", "--rank", "1", "--", "sh", "-c", "echo $RANK on $NVRX_NODE; exit 7")
    assert (result.return_value, result.stdout) == (7, "1 on n2\n")
    assert job.expect(CommandEnded).exit_code == 7
    assert typed(job, "exec", "--rank", "0", "--", "sh", "-c", "kill -9 $$").return_value == 128 + signal.SIGKILL
    assert isinstance(typed(job, "exec", "--rank", "2", "--", "true").exception, UsageError)
    assert isinstance(typed(job, "exec", "--rank", "0").exception, UsageError), "no command"

    # The command ends with the user's `exec`, and at the latest with the cycle.
    left, torn_down = (exec_in_background(job, rank) for rank in (0, 1))
    for process in (left, torn_down):
        assert process.stdout is not None
        process.stdout.close()
    left.kill()
    left.wait()
    assert job.expect(CommandEnded, signal=signal.SIGTERM).node == "n1"

    result = typed(job, "restart", "--wait")
    assert result.exit_code == 0, result.output
    assert torn_down.wait(WAIT_S) == 1
    second = gate.wait(2, cycle=1)
    wait_gone([worker.pid for worker in first.values()])
    assert {rank: worker.env["NVRX_NODE"] for rank, worker in second.items()} == {0: "n1", 1: "n2"}

    result = typed(job, "drain", "n1", "--wait")
    assert result.exit_code == 0, result.output
    third = gate.wait(2, cycle=2)
    assert {rank: worker.env["NVRX_NODE"] for rank, worker in third.items()} == {0: "n3", 1: "n2"}
    assert job.expect(RendezvousClosed, cycle=2).promoted == ("n3",)

    assert isinstance(typed(job, "drain", "n2").exception, RefusedByJob)
    assert isinstance(typed(job, "drain", "n9").exception, UsageError)
    assert isinstance(typed(job, "restart", "--replica", "other").exception, UsageError)

    status = json.loads(typed(job, "status", "--json").output)
    assert {node["name"]: node["state"] for node in status["nodes"]} == {
        "n1": "drained",
        "n2": "active",
        "n3": "active",
    }
    assert (status["restarts"], status["restarts_asked"], status["last_failure"]) == (0, 2, None)
    assert [recovery["node"] for recovery in status["recoveries"]] == ["", "n1"]

    assert isinstance(typed(job, "explain").exception, UsageError), "nothing has failed"
    handle(job.folder.job_id, folder=job.folder.path.parent).undrain("n1")
    job.when(lambda record: isinstance(record, NodeUndrained), what="the undrain")
    assert json.loads(typed(job, "status", "--json").output)["spares_left"] == ["n1"]
    gate.open()
    assert job.finish() == 0
    assert [each.node for each in job.said(RestartOrdered)] == [None, "n1"]
    assert job.said(NodeDrained)[0].node == "n1"
    assert job.said(RestartDecided) == []
    assert isinstance(typed(job, "restart").exception, UsageError), "it has ended"
