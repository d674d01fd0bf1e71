"""How an order gets to the machine, or the network, where it is to be carried out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from nvrx_slurm.cluster.commands import child_environment_for
from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.lab.flow.stages.deeds import Evidence
from nvrx_slurm.lab.flow.stages.remote import Answer, Order, obey
from nvrx_slurm.util.clock import Clock

REMOTE_S = 20.0
"""How long a step of Slurm may take to start, do one deed, and end."""

PROGRAM = (sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.stages.remote")


class Reach(Protocol):
    """Has an order carried out on a node, and brings back the evidence. Raises FaultFailed."""

    def __call__(self, order: Order, node: str) -> Evidence: ...


def here(clock: Clock) -> Reach:
    """For a job whose processes all run on this machine."""
    return lambda order, node: obey(order, clock)


def by_command(prefix: Callable[[str], Sequence[str]], environment: Mapping[str, str]) -> Reach:
    """By a command that runs what follows it on the node, such as `srun --overlap …`."""

    def reach(order: Order, node: str) -> Evidence:
        command = [*prefix(node), *PROGRAM]
        try:
            done = subprocess.run(
                command,
                env=child_environment_for(command[0], environment),
                input=msgspec.json.encode(order),
                capture_output=True,
                timeout=REMOTE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FaultFailed(f"`{' '.join(command[:-4])}` gave no answer in {REMOTE_S:g} s") from None
        return _evidence(done, node)

    return reach


def _evidence(done: subprocess.CompletedProcess[bytes], node: str) -> Evidence:
    try:
        answer = msgspec.json.decode(done.stdout, type=Answer)
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise FaultFailed(f"{node} could not be reached: {said}") from None
    if answer.evidence is None:
        raise FaultFailed(f"on {node}: {answer.error}")
    return answer.evidence


def overlapping_step(job_id: str) -> Callable[[str], list[str]]:
    """The `srun` by which the user who owns a job runs one more program on one of its nodes, beside all others."""

    def prefix(node: str) -> list[str]:
        return [
            "srun",
            "--overlap",
            f"--jobid={job_id}",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
            "--mpi=none",
            "--quiet",
        ]

    return prefix
