"""What the cluster's own Slurm commands say, as values."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from nvrx_slurm.errors import MissingProgramError, SlurmUnreachable
from nvrx_slurm.lab.devcluster.programs import find

_COMMAND_TIMEOUT_S = 20


def ask(environment: Mapping[str, str], *command: str) -> str:
    """What one Slurm command of this cluster prints. Raises SlurmUnreachable with its complaint."""
    program = find(command[0])
    if program is None:
        raise MissingProgramError(f"{command[0]} is not installed")
    try:
        result = subprocess.run(
            [program, *command[1:]],
            env={"PATH": os.defpath, **environment},
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(f"`{' '.join(command)}` gave no answer in {_COMMAND_TIMEOUT_S} s") from None
    if result.returncode:
        raise SlurmUnreachable(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


def node_states(environment: Mapping[str, str]) -> dict[str, str]:
    """Node → Slurm's state, such as `idle`, `down*` (the star: it does not answer) or `mixed`."""
    return parse_node_states(ask(environment, "sinfo", "--noheader", "--Node", "--format=%N %T"))


def parse_node_states(text: str) -> dict[str, str]:
    """The value of `sinfo -h -N -o '%N %T'`."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def unfinished_jobs(environment: Mapping[str, str]) -> list[str]:
    """Ids of the jobs that wait, run or complete."""
    return ask(environment, "squeue", "--noheader", "--format=%A").split()


def cancel_all(environment: Mapping[str, str], user: str) -> None:
    """Ask Slurm to cancel every job of the user."""
    ask(environment, "scancel", f"--user={user}")


def set_node_state(environment: Mapping[str, str], node: str, state: str) -> None:
    """What `scontrol update` does: `RESUME`, or `DOWN`."""
    ask(environment, "scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=nvrx-slurm")
