"""Running Slurm's programs: with which environment, how long, and how often when Slurm does not answer.

What Slurm cannot answer now it may answer in a second: such a question is asked again, with growing pauses and for
a bounded time, and stderr says so.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from nvrx_slurm.cluster.slurm_text import flags_of
from nvrx_slurm.errors import MissingProgramError, SlurmUnreachable
from nvrx_slurm.util.log import get_logger

log = get_logger("slurm")

PATIENCE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
# A site may set MessageTimeout, which Slurm's programs wait for an answer, to most of a minute.
COMMAND_TIMEOUT_S = 60.0

# The return code of a command that was ended because it took longer than its bound.
TIMED_OUT = -1

# How Slurm's programs say that no Slurm is set up for them.
NOT_SET_UP = "Could not establish a configuration source"

_PREFIX = re.compile(r"^\w+: (?:error|fatal): ")
_REFUSED = "Batch job submission failed: "
_KEPT_INSIDE_A_JOB = ("SLURM_CONF", "SLURM_CLUSTERS")

# sbatch(1), "input environment variables": the flags whose variables are not SBATCH_ and the flag's name.
_MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")  # sbatch takes one of these only
_VARIABLES = {
    "time": ("TIMELIMIT",),
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "switches": ("REQ_SWITCH", "WAIT4SWITCH"),
    "cpu-freq": ("CPU_FREQ_REQ",),
    "segment": ("SEGMENT_SIZE",),
}
# Those that sbatch takes under a second name, too.
_SECOND_NAMES = {"clusters": "SLURM_CLUSTERS", "hint": "SLURM_HINT"}
# What nvrx-slurm decides for each job, also where the script has no flag for it. With WAIT sbatch would wait for the
# job's end.
_DECIDED = ("ARRAY_INX", "JOB_NAME", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "REQUEUE", "SIGNAL", "WAIT")

# slurmctld or slurmdbd did not answer; asking again may help. From slurm_errno.c and slurm_protocol_api.c.
_NO_ANSWER = (
    "Unable to contact slurm controller",
    "Unable to contact slurm database",
    "Problem talking to",  # the database
    "can't be reached now",  # a cluster named with -M
    "Protocol authentication error",  # munged is down
    "Socket timed out",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Communication connection failure",
    "Communication shutdown failure",
    "Message receive failure",
    "Message send failure",
    "Zero Bytes were transmitted",
    "Slurm controller not responding",
    "Slurm temporarily unable to accept job",
    "Resource temporarily unavailable",
    "try again in a bit",  # the job's entry in the database is just being made
    "Slurm backup controller in standby mode",
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class CommandOutput:
    """What a program answered."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def lacks_answer(self) -> bool:
        """Whether the program failed only because the other side did not answer."""
        return self.returncode == TIMED_OUT or (not self.ok and any(words in self.stderr for words in _NO_ANSWER))

    @property
    def reason(self) -> str:
        """Slurm's own reason, in one line: the summary that sbatch ends with first, then what led to it."""
        lines = [_PREFIX.sub("", line.strip()) for line in self.stderr.splitlines() if line.strip()]
        summary = [line.removeprefix(_REFUSED) for line in lines if line.startswith(_REFUSED)]
        details = [line for line in lines if not line.startswith(_REFUSED)]
        return "; ".join(dict.fromkeys(summary + details)) or f"exit code {self.returncode}, and no word why"


class Runner(Protocol):
    """Runs a command to its end, `timeout_s` at most. Raises FileNotFoundError where there is no such program."""

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandOutput: ...


class SystemRunner:
    """The real thing. `environment`: variables on top of this process's own."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._extra = environment or {}

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        environment = child_environment_for(command[0], self._extra)
        if command[0] == "sbatch" and os.path.isfile(command[-1]):
            environment = for_script(Path(command[-1]).read_text(encoding="utf-8"), environment)
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
                # The terminal's Ctrl-C would end sbatch, and not the job that it may have submitted by then.
                start_new_session=command[0] == "sbatch",
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
    """What the program may see of an environment."""
    if program != "sbatch":
        # A query must not depend on the user's settings: SQUEUE_PARTITION would hide jobs, SACCT_FORMAT would change
        # the answer.
        # LC_ALL=C: answers are recognised by their words (`_NO_ANSWER`), and some of these come from strerror(3).
        own = f"{program.upper()}_"
        return {name: value for name, value in environment.items() if not name.startswith(own)} | {"LC_ALL": "C"}
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    # sbatch hands its environment on to the job. Of an outer job, which this process runs in, nothing may be left:
    # srun would take its numbers for the new job's.
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_INSIDE_A_JOB or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }


def for_script(script: str, environment: Mapping[str, str]) -> dict[str, str]:
    """sbatch's environment for this script: without the variables that sbatch would prefer to the script's flags. The
    other SBATCH_ variables stay as defaults of the user or the site."""
    flags = flags_of(script).keys()
    names = (_VARIABLES.get(flag, (flag.upper().replace("-", "_"),)) for flag in flags)
    dropped = {f"SBATCH_{name}" for name in itertools.chain(_DECIDED, *names)}
    dropped |= {_SECOND_NAMES[flag] for flag in flags & _SECOND_NAMES.keys()}
    return {name: value for name, value in environment.items() if name not in dropped}


class SlurmPrograms:
    """sbatch and its friends. `patience_s`: how long a question without an answer is asked again."""

    def __init__(self, runner: Runner, patience_s: float) -> None:
        self._runner = runner
        self._patience_s = patience_s

    def ask(self, *command: str) -> CommandOutput:
        """The program's answer. Raises MissingProgramError, and SlurmUnreachable in the end."""
        return self.patiently(lambda: self.run(*command))

    def run(self, *command: str) -> CommandOutput:
        """One attempt. Raises MissingProgramError, SlurmUnreachable."""
        program = command[0]
        try:
            output = self._runner(command, timeout_s=COMMAND_TIMEOUT_S)
        except FileNotFoundError:
            raise MissingProgramError(
                f"{program} is not on PATH: there is no Slurm here. `nvrx-slurm run` runs a job without one,"
                " and `nvrx-slurm cluster up` starts one on this machine"
            ) from None
        if NOT_SET_UP in output.stderr:
            raise _NotSetUp(
                f"{program} finds no Slurm ({output.reason}). `nvrx-slurm run` runs a job without one; for a"
                ' development cluster: `nvrx-slurm cluster up`, then `eval "$(nvrx-slurm cluster env)"`'
            )
        if output.lacks_answer:
            raise SlurmUnreachable(f"Slurm does not answer {program}: {output.reason}")
        return output

    def patiently(self, first: Callable[[], _T], again: Callable[[], _T] | None = None) -> _T:
        """`first`, and when Slurm does not answer, `again` until it does or the patience is spent."""
        try:
            return first()
        except SlurmUnreachable as error:
            if self._patience_s <= 0 or not _may_answer_later(error):
                raise
            log.warning("%s; trying again for %g s", error, self._patience_s)
            first_error = error
        import stamina  # only now: it costs as much as all of click, and Slurm nearly always answers

        logging.getLogger("stamina").addHandler(logging.NullHandler())  # what is shown is the line above
        attempts = stamina.retry_context(
            on=_may_answer_later,
            attempts=None,
            timeout=self._patience_s,
            wait_initial=FIRST_PAUSE_S,
            wait_max=LONGEST_PAUSE_S,
        )
        for attempt in attempts:
            with attempt:
                # The first attempt has been made above. stamina pauses after each failure, so it is given that one.
                if attempt.num == 1:
                    raise first_error
                return (again or first)()
        raise AssertionError("the last attempt returns or raises")


class _NotSetUp(SlurmUnreachable):
    """There is no Slurm to answer, and will be none in a second."""


def _may_answer_later(error: Exception) -> bool:
    return isinstance(error, SlurmUnreachable) and not isinstance(error, _NotSetUp)
