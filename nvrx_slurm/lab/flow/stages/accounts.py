"""The processes of a job on this machine: which they are, and what each is doing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.diagnostics.stacks.dump import dump
from nvrx_slurm.lab.devcluster.processes import environment_of, read_table
from nvrx_slurm.lab.flow.stages.deeds import SUPERVISOR, command_line, is_of_job

MOST_PROCESSES = 128
_CALLED = {
    "nvrx_slurm.batch": "batch host",  # whose line ends in srun's, and that in the agent's
    "srun": "srun",
    SUPERVISOR: "supervisor",
    "nvrx_slurm.agent": "agent",
    "nvrx_slurm.controller": "controller",
    "valkey-server": "store",
    "redis-server": "store",
}
"""What is known by its command line; the first words that fit count."""


def processes_of(folder: Path, marks: Mapping[str, str] | None = None, node: str = "") -> list[int]:
    """Everything of the job in `folder` that runs on this machine, or on one of the `node`s that it pretends to be.
    `marks`: variables by which more of the job is told."""
    found = []
    for pid in read_table():
        environment = environment_of(pid)
        marked = marks is not None and marks.items() <= environment.items()
        elsewhere = node and environment.get("SLURMD_NODENAME", node) != node
        if not elsewhere and (marked or is_of_job(pid, str(folder))):
            found.append(pid)
    return found


def described(pid: int) -> str:
    """`agent on n2, pid 4711: python -P -m nvrx_slurm.agent`."""
    line = command_line(pid)
    return f"{_name(pid, line)}, pid {pid}: {line}"


def _name(pid: int, line: str) -> str:
    environment = environment_of(pid)
    node = environment.get("NVRX_NODE") or environment.get("SLURMD_NODENAME")
    worker = f"rank {environment['RANK']}" if "RANK" in environment else "process"
    name = next((name for words, name in _CALLED.items() if words in line), worker)
    return f"{name} on {node}" if node else name


async def write_accounts(folder: Path, out: Path, timeout_s: float, node: str = "") -> list[Path]:
    """One file a process: its stacks, as far as py-spy sees them, and what /proc says. Bounded; stops nobody.

    Nobody is asked by signal: workers' own stacks come by the job's dump.
    """
    pids = processes_of(folder, node=node)[:MOST_PROCESSES]
    groups = {f"{_name(pid, command_line(pid))} pid {pid}": [pid] for pid in pids}
    report = await dump(groups, dump_dir=out / "nobody-is-asked", out=out, why="diagnosis", timeout_s=timeout_s)
    return sorted(report.files.values())
