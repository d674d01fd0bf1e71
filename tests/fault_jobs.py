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
    """A plain job of which `rank` (or several: `0,1`) has the fault in its first cycle (`first+second`: one in each
    of its first cycles; `all`: each rank, always), and all wait at the gate."""
    command = (sys.executable, str(FAULT_WORKER), str(gate.port), fault, str(rank), *words)
    role = RolePlan(name="main", command=command, nodes_per_replica=nodes, workers_per_node=workers)
    return plan_of(base, role, spares=spares, **bounds)


def ends_well(job: RunningJob, gate: Gate, *, workers: int, cycle: int) -> None:
    """The cycle runs whole, and the job ends with 0."""
    gate.wait(workers, cycle=cycle)
    gate.open()
    assert job.finish() == 0


def causes(job: RunningJob) -> list[str]:
    """What each restart was for."""
    return [record.cause for record in job.said(RestartDecided)]


def joins(job: RunningJob, node: str) -> int:
    """How often the node has joined so far."""
    return sum(record.node == node for record in job.said(NodeJoined))


def joined_again(job: RunningJob, node: str, times: int = 2) -> None:
    job.when(lambda _: joins(job, node) >= times, what=f"{node} joins for the {times}. time")


def printed(job: RunningJob, rank: int, cycle: int = 0) -> bytes:
    """What the rank has printed."""
    path = job.folder.cycle_logs("main-0", 0, cycle) / f"rank-{rank}.out"
    return path.read_bytes() if path.exists() else b""
