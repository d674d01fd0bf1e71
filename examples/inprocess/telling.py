"""What a rank says of its restarts, a line each."""

from __future__ import annotations

from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess.attribution import format_interruption_records
from nvrx_slurm.inprocess.timeline import Restart, RestartPart

_told: set[int] = set()


def tell_start(call: CallWrapper, step: int) -> None:
    """Where this iteration begins."""
    print(f"iteration {call.iteration} begins after step {step}", flush=True)


def tell_restarts(call: CallWrapper) -> None:
    """What each restart was about, and how long it took: once, and a moment after it, when all of it is known."""
    for restart in call.restarts:
        if restart.iteration not in _told:
            _told.add(restart.iteration)
            print(described(restart), flush=True)


def described(restart: Restart) -> str:
    """The longest that any rank took for each phase, in milliseconds."""
    phases = ", ".join(f"{phase} {restart.slowest(phase) * 1e3:.0f}" for phase in RestartPart)
    why = format_interruption_records(restart.records)
    return f"timeline {restart.iteration}: {restart.total_s * 1e3:.0f} ms ({phases}) after {why}"
