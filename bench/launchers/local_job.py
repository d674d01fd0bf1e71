"""nvrx-slurm: a local job, started as `nvrx-slurm run` starts it."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import dataclass

from bench import processes
from bench.errors import BenchTimeout
from bench.launchers.base import NODES, WORKERS_PER_NODE, Task
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, NodeJoined, Prewarmed, Recovered
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.source import Journal, so_far
from nvrx_slurm.util.clock import SystemClock

JOB_ID = f"bench-{os.getpid()}"
POLITE_S = 15.0


@dataclass(frozen=True)
class NvrxSlurm:
    """Starts a local job. `prewarm`: as in job.yaml; then each node has its warm process before a measurement."""

    name: str = "nvrx-slurm"
    prewarm: PrewarmSpec | None = None

    def start(self, task: Task) -> LocalJob:
        role = RolePlan(
            name="main",
            command=task.command,
            nodes_per_replica=NODES,
            workers_per_node=WORKERS_PER_NODE,
            prewarm=self.prewarm,
        )
        plan = Plan(
            name="bench",
            roles=(role,),
            spares=task.spares,
            workdir=str(task.room),
            folder=str(task.room / "jobs"),
            fault_tolerance=plain_bounds(max_restarts=1000),
        )
        host = processes.start_job(plan, JOB_ID, task.room / "host.log")
        # With `auto` a node's first warm process has imported nothing yet.
        prewarmed = 0 if self.prewarm is None else 2 if self.prewarm.imports == "auto" else 1
        return LocalJob(host, JobFolder(task.room / "jobs" / JOB_ID), NODES + task.spares, prewarmed)


class LocalJob:
    """A running local job."""

    def __init__(self, host: subprocess.Popen[bytes], folder: JobFolder, nodes: int, prewarmed: int) -> None:
        self._host, self._folder, self._nodes, self._prewarmed = host, folder, nodes, prewarmed
        self.parent_of_nodes = host.pid

    def wait_spares(self, timeout_s: float) -> None:
        clock = SystemClock()
        deadline = clock.monotonic() + timeout_s
        journal, joined, warm = Journal(self._folder), set[str](), Counter[str]()
        while len(joined) < self._nodes or any(warm[node] < self._prewarmed for node in joined):
            if clock.monotonic() > deadline:
                raise BenchTimeout(f"{len(joined)} of {self._nodes} nodes joined in {timeout_s:.0f} s; warm: {warm}")
            records = [item.record for item in journal.poll(0.1) if isinstance(item, Entry)]
            joined |= {record.node for record in records if isinstance(record, NodeJoined)}
            warm.update(record.node for record in records if isinstance(record, Prewarmed))
        journal.close()

    def recoveries(self) -> list[Recovered]:
        """What the journal says of each recovery so far."""
        return [e.record for e in so_far(self._folder, live=True) if isinstance(e.record, Recovered)]

    def log(self) -> str:
        return self._folder.job_log.read_text(errors="replace")[-2000:] if self._folder.job_log.exists() else ""

    def stop(self) -> None:
        processes.end(self._host, polite_s=POLITE_S)
