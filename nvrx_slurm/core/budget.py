"""How often things may happen: failed workers, lost nodes and preemptions, each counted apart.

All of it lives across cycles and generations: a controller gets it back with the journal.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.core.state import Job, Replica
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.util.durations import words


def of_replica(job: Job) -> Allowance:
    """How many worker failures each replica is restarted after."""
    return job.plan.fault_tolerance.max_restarts


def used(times: Sequence[float], allowance: Allowance, now: float) -> int:
    """How many of what has happened still counts."""
    if allowance.per_s is None:
        return len(times)
    return sum(now - allowance.per_s < at for at in times)


def restarts_left(job: Job, replica: Replica, now: float) -> int:
    """How many more worker failures the replica would be restarted after, as things stand."""
    left = [_left(replica.restarted_at, of_replica(job), now)]
    if (whole := job.plan.fault_tolerance.max_job_restarts) is not None:
        left.append(_left(_of_all(job), whole, now))
    return min(left)


def worker_budget_spent(job: Job, replica: Replica, now: float) -> str | None:
    """Which budget another worker failure would overdraw, in words; None: it may be restarted."""
    own, whole = of_replica(job), job.plan.fault_tolerance.max_job_restarts
    if not _left(replica.restarted_at, own, now):
        return f"restart budget spent ({_told(replica.restarted_at, own, now)})"
    if whole is not None and not _left(_of_all(job), whole, now):
        return f"the job's restart budget is spent ({_told(_of_all(job), whole, now)})"
    return None


def node_budget_spent(job: Job, now: float) -> str | None:
    """The same for another lost node."""
    allowance = job.plan.fault_tolerance.max_node_losses
    if allowance is None or _left(job.nodes_lost_at, allowance, now):
        return None
    return f"budget for lost nodes spent ({_told(job.nodes_lost_at, allowance, now)})"


def preemptions_spent(job: Job, now: float) -> str | None:
    """Whether the job has come back more often than it may, in words; the latest time counts."""
    allowance = job.plan.fault_tolerance.max_preemptions
    if allowance is None or used(job.requeued_at, allowance, now) <= allowance.count:
        return None
    return f"preempted or requeued too often ({_told(job.requeued_at, allowance, now)})"


def _left(times: Sequence[float], allowance: Allowance, now: float) -> int:
    return max(0, allowance.count - used(times, allowance, now))


def _of_all(job: Job) -> list[float]:
    return [at for replica in job.replicas.values() for at in replica.restarted_at]


def _told(times: Sequence[float], allowance: Allowance, now: float) -> str:
    within = "" if allowance.per_s is None else f" per {words(allowance.per_s)}"
    return f"{used(times, allowance, now)} of {allowance.count}{within}"
