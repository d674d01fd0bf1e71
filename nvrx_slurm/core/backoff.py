"""How long a replica that crashes again and again waits before its next cycle. Pure, as all of this package.

A cycle crashes if a worker of it fails soon after it began, and it has made no new step. After the first crashes in a
row the restart is immediate; from the plan's `after`-th on each restart waits twice as long as the one before, up to
a limit. A cycle that lasted longer, or got further, ends the row. A lost node is no crash: spares are there for it.
"""

from __future__ import annotations

from nvrx_slurm.core import progress
from nvrx_slurm.core.state import Failure, Job, Replica

MOST_DOUBLINGS = 30
"""More would make no difference: the limit is reached long before."""


def count(job: Job, replica: Replica, failure: Failure) -> float:
    """Take in a failure after which the replica is restarted. Returns how many seconds after the failure its next
    cycle begins at the earliest."""
    plan = job.plan.fault_tolerance.backoff
    if not plan.max:
        return 0.0
    if progress.gained(replica) > 0 or failure.noticed - replica.began_at > plan.within:
        replica.crashes = 0
        return 0.0
    if failure.kind == "node":
        return 0.0
    replica.crashes += 1
    if replica.crashes < plan.after:
        return 0.0
    doubled = min(replica.crashes - plan.after, MOST_DOUBLINGS)
    return float(min(plan.max, plan.initial * 2**doubled))
