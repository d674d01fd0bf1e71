"""Asking Slurm's programs with patience: what Slurm cannot answer now, it may answer in a second.

A question without an answer is asked again with growing pauses, a bounded time long, and stderr says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from nvrx_slurm.cluster.commands import NOT_SET_UP, CommandOutput, Runner
from nvrx_slurm.cluster.slurm_text import is_without_answer, reason_of
from nvrx_slurm.errors import MissingProgramError, SlurmUnreachable
from nvrx_slurm.util.log import get_logger

log = get_logger("slurm")

PATIENCE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
COMMAND_TIMEOUT_S = 60.0
"""A site may set MessageTimeout, which Slurm's programs wait for an answer, to most of a minute."""

_T = TypeVar("_T")


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
                f"{program} finds no Slurm ({reason_of(output)}). `nvrx-slurm run` runs a job without one; for a"
                ' development cluster: `nvrx-slurm cluster up`, then `eval "$(nvrx-slurm cluster env)"`'
            )
        if is_without_answer(output):
            raise SlurmUnreachable(f"Slurm does not answer {program}: {reason_of(output)}")
        return output

    def patiently(self, first: Callable[[], _T], again: Callable[[], _T] | None = None) -> _T:
        """`first`, and when Slurm does not answer, `again` until it does or the patience is spent."""
        try:
            return first()
        except SlurmUnreachable as error:
            if self._patience_s <= 0 or not _may_answer_later(error):
                raise
            log.warning("%s; trying again for %g s", error, self._patience_s)
            return self._retry(again or first, error)

    def _retry(self, ask: Callable[[], _T], first_error: SlurmUnreachable) -> _T:
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
                if attempt.num == 1:  # has been made already: what counts it also pauses after it
                    raise first_error
                return ask()
        raise AssertionError("the last attempt returns or raises")


class _NotSetUp(SlurmUnreachable):
    """There is no Slurm to answer, and will be none in a second."""


def _may_answer_later(error: Exception) -> bool:
    return isinstance(error, SlurmUnreachable) and not isinstance(error, _NotSetUp)
