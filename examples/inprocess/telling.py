"""What a rank says of its restarts, a line each."""

from __future__ import annotations

from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess.attribution import format_interruption_records
from nvrx_slurm.inprocess.timeline import Phase, Restart


def tell(call: CallWrapper, step: int) -> None:
    """Where this iteration begins and, if it follows a restart, what that was about and how long it took."""
    if call.restarts:
        print(described(call.restarts[-1]), flush=True)
    print(f"iteration {call.iteration} begins after step {step}", flush=True)


def described(restart: Restart) -> str:
    """The longest that any rank took for each phase, in milliseconds."""
    phases = ", ".join(f"{phase} {restart.slowest(phase) * 1e3:.0f}" for phase in Phase)
    why = format_interruption_records(restart.records)
    return f"timeline {restart.iteration}: {restart.total_s * 1e3:.0f} ms ({phases}) after {why}"
