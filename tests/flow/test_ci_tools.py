"""`ci record`, `replay` and `matrix` on real jobs: what a job did is asked of it again, and holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.api.handle import Job
from nvrx_slurm.folder import JobFolder
from nvrx_slurm.records import NodeJoined, Progress, Record, WorkersStarted
from nvrx_slurm.report.source import follow
from nvrx_slurm.testing.faults import kill_local_node

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "ci" / "jobs"
TIMES = 3


def nvrx(*words: str, cwd: Path, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """The command line, as a user has it."""
    command = [sys.executable, "-m", "nvrx_slurm", "ci", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


class Watched:
    """A job's journal as it grows: waits for entries, one after the other."""

    def __init__(self, job: Job) -> None:
        self._entries = follow(JobFolder(job.folder))
        self.seen: list[Record] = []

    def until(self, wanted: Callable[[list[Record]], object]) -> None:
        """Read on until what was read is enough."""
        while not wanted(self.seen):
            self.seen.append(next(self._entries).record)

    def of(self, kind: type, **fields: object) -> list:
        return [
            record
            for record in self.seen
            if isinstance(record, kind) and all(getattr(record, key) == value for key, value in fields.items())
        ]


@pytest.fixture
def hurt_job(job) -> Job:
    """A job of four nodes that lost a worker by SIGKILL, then a node, and went on to its end."""
    hurt = job(JOBS / "plain.yaml", command="python3 steps.py --until 'recovered cycle=2'")
    watched = Watched(hurt)
    watched.until(lambda _: len(watched.of(NodeJoined)) == 6 and watched.of(Progress, rank=1, cycle=0))
    (started,) = [each for each in watched.of(WorkersStarted, cycle=0) if 1 in each.pids]
    subprocess.run(["kill", "-KILL", str(started.pids[1])], check=True)
    watched.until(lambda _: watched.of(Progress, rank=2, cycle=1))
    (node,) = {each.node for each in watched.of(WorkersStarted, cycle=1) if 2 in each.pids}
    kill_local_node(watched.of(NodeJoined, node=node)[-1].pid)
    assert hurt.wait(60) == 0
    return hurt


def test_recorded_flow_passes_again(hurt_job, tmp_path):
    """A job that was hurt by hand becomes a flow with the same faults, and each run of it passes."""
    done = nvrx("record", str(hurt_job.folder), "-o", "flow.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    flow = (tmp_path / "flow.yaml").read_text()
    assert "do: {kill_worker: 1}" in flow
    assert "do: {kill_node: {of_rank: 2}}" in flow
    for number in range(TIMES):
        done = nvrx("run", "flow.yaml", "--on", "local", "--artifacts", f"run-{number}", cwd=tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{flow}"
