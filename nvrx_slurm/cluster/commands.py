"""Running Slurm's programs: the one place of this package that starts a command and reads what it says."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TIMED_OUT = -1
"""The return code of a command that was ended because it took longer than its bound."""

NOT_SET_UP = "Could not establish a configuration source"
"""How Slurm's programs say that no Slurm is set up for them."""

_KEPT_INSIDE_A_JOB = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class CommandOutput:
    """What a program answered."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.returncode == 0


class Runner(Protocol):
    """Runs a command to its end, `timeout_s` at most. Raises FileNotFoundError where there is no such program."""

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandOutput: ...


class SystemRunner:
    """The real thing. `environment`: variables on top of this process's own."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._extra = environment or {}

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        environment = child_environment_for(command[0], self._extra)
        if not is_set_up(environment):
            return CommandOutput(
                1, "", f"{NOT_SET_UP}: SLURM_CONF names {environment['SLURM_CONF']}, which is not there"
            )
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return CommandOutput(TIMED_OUT, "", f"{command[0]}: no answer within {timeout_s:g} s")
        return CommandOutput(done.returncode, done.stdout, done.stderr)


def is_set_up(environment: Mapping[str, str]) -> bool:
    """False where SLURM_CONF names no file: Slurm's programs look for it a whole minute before they say so."""
    path = environment.get("SLURM_CONF")
    return not path or Path(path).is_file()


def child_environment_for(program: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the program may see of this process's own environment, with `extra` on top."""
    from nvrx_slurm.jobspec.env import child_environment

    return environment_for(program, child_environment(extra or {}, with_secrets=program == "sbatch"))


def environment_for(program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What the program may see of an environment.

    A query must not depend on the user's settings: SQUEUE_PARTITION would hide jobs, SACCT_FORMAT would
    change the answer. sbatch hands its environment on to the job: there the user's variables stay, but of an outer
    job, that this process may run in, nothing is left, since srun would take its numbers for the new job's.
    """
    if program != "sbatch":
        own = f"{program.upper()}_"
        return {name: value for name, value in environment.items() if not name.startswith(own)} | {"LC_ALL": "C"}
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_INSIDE_A_JOB or not name.startswith(("SLURM_", "SLURMD_"))
    }
