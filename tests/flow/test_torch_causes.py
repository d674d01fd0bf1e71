"""The cause that the journal names when a rank, an agent or a node of a torch world over gloo is killed.

The peers' "Connection reset by peer" often arrives first. NVRX_TORCH_KILLS: how many kills of each kind (20 for the
sixty of docs/decisions/0035).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from random import Random

import pytest

from nvrx_slurm.controller.controller import replay
from nvrx_slurm.core.state import new_job
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import Progress, RendezvousClosed, RestartDecided, WorkerFailed, WorkersStarted
from nvrx_slurm.report.failure_replay import read_failures
from nvrx_slurm.util.files import JobFiles
from tests.harness import RunningJob, plan_of
from tests.waiting import STARTS_S

WORKER = Path(__file__).parents[1] / "torch_worker.py"
KILLS = int(os.environ.get("NVRX_TORCH_KILLS", "3"))


def killed(job: RunningJob, kind: str, cycle: int, chance: Random) -> tuple[str, int | None]:
    """Kill one rank, one agent or one node, at random. Returns the node, and the rank if it was one."""
    closed = job.expect(RendezvousClosed, cycle=cycle)
    rank = chance.randrange(len(closed.nodes))
    node = closed.nodes[rank]
    if kind == "rank":
        started = job.expect(WorkersStarted, cycle=cycle, node=node)
        os.kill(started.pids[rank], signal.SIGKILL)
        return node, rank
    if kind == "agent":
        os.kill(job.agent_pid(node), signal.SIGKILL)  # its supervisor kills the workers
    else:
        job.kill_node(node)
    return node, None


@pytest.mark.torch
@pytest.mark.timeout(60 + 60 * KILLS)
@pytest.mark.parametrize("kind", ["rank", "agent", "node"])
def test_cause_is_what_was_killed(run_local, tmp_path, kind):
    """The cause is never a survivor, whichever rank's failure is reported first. Lost nodes spend no restart: their
    budget is 0."""
    if importlib.util.find_spec("torch") is None and "CI" not in os.environ:
        pytest.skip("torch is not installed; `make test-torch` installs it")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    role = RolePlan(name="main", command=(sys.executable, str(WORKER)), nodes_per_replica=3, env=environment)
    budget = Allowance(count=KILLS if kind == "rank" else 0)
    plan = plan_of(tmp_path, role, spares=0 if kind == "rank" else KILLS, max_restarts=budget)
    job, chance = run_local(plan), Random(kind)
    causes, named = [], []
    for cycle in range(KILLS):
        job.expect(Progress, cycle=cycle, timeout=STARTS_S)
        causes.append(killed(job, kind, cycle, chance))
        decided = job.expect(RestartDecided, cycle=cycle)
        named.append((decided.node, decided.rank))
    first = [record for record in job.said(WorkerFailed) if record.peer_lost]
    right = sum(cause == name for cause, name in zip(causes, named, strict=True))
    print(f"{right} of {KILLS} causes right; a survivor was heard first {len(first)} times")
    assert named == causes, job.story()
    assert replay(new_job(plan), job.entries) == []
    explained = read_failures(plan, JobFiles(job.folder.path), job.entries)[0]
    assert [(each.inquiry.failed.node, each.inquiry.failed.rank) for each in explained] == causes
