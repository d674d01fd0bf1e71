"""Jobs of fault workers (`fault_worker.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import NodeJoined, RestartDecided
from tests.harness import Gate, RunningJob, plan_of

FAULT_WORKER = Path(__file__).parent / "fault_worker.py"


def fault_plan(
    gate: Gate,
    base: Path,
    fault: str,
    *words: str,
    rank: int | str = 1,
    nodes: int = 1,
    workers: int = 2,
    spares: int = 0,
    **bounds: Any,
) -> Plan:
    """A plain job whose workers all wait at the gate, and in which `rank` (or several: `0,1`) has the fault in its
    first cycle. `fault` may be `first+second`, one for each of the first cycles; `rank` may be `all`: each rank has
    it, in every cycle."""
    command = (sys.executable, str(FAULT_WORKER), str(gate.port), fault, str(rank), *words)
    role = RolePlan(name="main", command=command, nodes_per_replica=nodes, workers_per_node=workers)
    return plan_of(base, role, spares=spares, **bounds)


def ends_well(job: RunningJob, gate: Gate, *, workers: int, cycle: int) -> None:
    """All workers of the cycle arrive at the gate, and the job ends with exit code 0."""
    gate.wait(workers, cycle=cycle)
    gate.open()
    assert job.finish() == 0


def causes(job: RunningJob) -> list[str]:
    """The cause of each restart."""
    return [record.cause for record in job.said(RestartDecided)]


def joins(job: RunningJob, node: str) -> int:
    """How often the node has joined so far."""
    return sum(record.node == node for record in job.said(NodeJoined))


def joined_again(job: RunningJob, node: str, times: int = 2) -> None:
    job.when(lambda _: joins(job, node) >= times, what=f"{node} joins for the {times}. time")


def printed(job: RunningJob, rank: int, cycle: int = 0) -> bytes:
    """What the rank has printed to standard output."""
    path = job.folder.cycle_logs("main-0", 0, cycle) / f"rank-{rank}.out"
    return path.read_bytes() if path.exists() else b""
