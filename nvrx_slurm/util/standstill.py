"""Whether this process has stood still: what it sees itself of SIGSTOP, a cgroup's freezer, or a suspended job."""

from __future__ import annotations

import asyncio

from nvrx_slurm.util.clock import Clock

LOOK_EVERY_S = 0.1
# A busy machine keeps a process waiting for less.
STOOD_STILL_S = 1.0

# Slurm (its slurmstepd) sends SIGSTOP two seconds after SIGTSTP: a pause that ends before is no suspension.
AHEAD_S = 1.5

# The nodes of a job are suspended up to seconds apart, and the first announcement counts for all of them.
MOST_AHEAD_S = 10.0


async def standstill(clock: Clock) -> float:
    """A standstill has been announced: return how long it lasted once it is over, 0 when none has come."""
    began = last = clock.monotonic()
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = clock.monotonic()
        stood_still_s = now - last - LOOK_EVERY_S
        if stood_still_s >= STOOD_STILL_S and now - began >= AHEAD_S + STOOD_STILL_S:
            return stood_still_s
        if now - began >= MOST_AHEAD_S:
            return 0.0
        last = now
