"""Why a run ends early, and what that means for its attempts."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.lab.flow.outcome import Kind, Verdict
from nvrx_slurm.util.durations import words

INTERRUPTED_S = 5.0
"""How long attempts may take to undo what they did, once interrupted: GitHub's runner kills 7.5 s after SIGINT."""

LOOK_AROUND_S = 90.0
"""The same where they look around first: stacks, Slurm's answers, ends of logs."""


@dataclass(frozen=True, slots=True)
class Ending:
    """`signal`: how attempts are told; `patience_s`: how long they may take then, before they are killed."""

    why: str
    verdict: Verdict
    kind: Kind
    exit_code: int
    signal: signal.Signals
    patience_s: float


def _interruption(why: str, exit_code: int) -> Ending:
    return Ending(why, "interrupted", "error", exit_code, signal.SIGTERM, INTERRUPTED_S)


INTERRUPTIONS = {
    signal.SIGINT: _interruption("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: _interruption("terminated", EXIT_TERMINATED),
}


def out_of_time(timeout_s: float) -> Ending:
    """The whole run has reached its bound."""
    why = f"out of time: --timeout {words(timeout_s)}"
    return Ending(why, "out_of_time", "bound", EXIT_TIMEOUT, signal.SIGALRM, LOOK_AROUND_S)
