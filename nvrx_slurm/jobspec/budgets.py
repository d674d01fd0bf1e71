"""How a teardown fits into the time that Slurm leaves for it. Pure, and standard library only: agents import it.

Slurm ends a job in two ways. Before the time limit it sends a signal, as early as the job asked for (`--signal` of
sbatch(1)). A job that is cancelled or preempted gets SIGTERM, and SIGKILL after KillWait (slurm.conf(5)).
"""

from __future__ import annotations

import math

# What a teardown takes beyond the workers' grace: the kill itself, and the writing of result and journal.
AFTER_GRACE_S = 8.0

NOTICE_MARGIN_S = 30.0
SHORTEST_NOTICE_S = 60.0


def least_notice_s(grace_s: float, checkpoint_s: float) -> float:
    """What a job needs before its time limit, to save (`checkpoint_s`; 0: it does not) and to tear down."""
    return checkpoint_s + grace_s + AFTER_GRACE_S


def most_notice_s(time_limit_s: float) -> float:
    """How much of its time limit a job may spend on the notice."""
    return time_limit_s / 2


def notice_s(grace_s: float, checkpoint_s: float, time_limit_s: float | None) -> int:
    """How long before its time limit Slurm signals the job: with a margin; in a short job a quarter, if enough."""
    ample = max(SHORTEST_NOTICE_S, checkpoint_s + grace_s + NOTICE_MARGIN_S)
    if time_limit_s is None:
        return math.ceil(ample)
    least = min(least_notice_s(grace_s, checkpoint_s), most_notice_s(time_limit_s))
    return math.ceil(max(least, min(ample, time_limit_s // 4)))


def grace_within(kill_wait_s: float) -> float:
    """The longest grace that workers can have where SIGKILL comes `kill_wait_s` after the first signal."""
    # Below a KillWait of 16 s each side gets half: a full AFTER_GRACE_S would leave the workers little, or nothing.
    return max(kill_wait_s - AFTER_GRACE_S, kill_wait_s / 2)
