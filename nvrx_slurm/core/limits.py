"""Whether and when a failed replica may be restarted: budgets, progress, and the pause between crashes.

Budgets count failed workers, lost nodes and preemptions apart. A job that makes no new step is stuck. A cycle crashes
if a worker of it fails soon after it began, and it has made no new step. After the first crashes in a row the restart
is immediate; from the plan's `after`-th on each restart waits twice as long as the one before, up to a limit. A cycle
that lasted longer, or made a step, ends the row.

All counts live across cycles and generations: a controller gets them back with the journal.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.core.state import ControlState, Failure, Replica
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.util.durations import words


def restarts_left(job: ControlState, replica: Replica, now: float) -> int:
    """How many more worker failures the replica would be restarted after, as things stand."""
    bounds = job.plan.fault_tolerance
    left = [bounds.max_restarts.left(replica.restarted_at, now)]
    if bounds.max_job_restarts is not None:
        left.append(bounds.max_job_restarts.left(_of_all(job), now))
    return min(left)


def worker_budget_spent(job: ControlState, replica: Replica, now: float) -> str | None:
    """Which budget another worker failure would overdraw, in words; None: it may be restarted."""
    own, whole = job.plan.fault_tolerance.max_restarts, job.plan.fault_tolerance.max_job_restarts
    if not own.left(replica.restarted_at, now):
        return f"restart budget spent ({_describe(replica.restarted_at, own, now)})"
    if whole is not None and not whole.left(_of_all(job), now):
        return f"the job's restart budget is spent ({_describe(_of_all(job), whole, now)})"
    return None


def node_budget_spent(job: ControlState, now: float) -> str | None:
    """The same for another lost node."""
    allowance = job.plan.fault_tolerance.max_node_losses
    if allowance is None or allowance.left(job.nodes_lost_at, now):
        return None
    return f"budget for lost nodes spent ({_describe(job.nodes_lost_at, allowance, now)})"


def preemptions_spent(job: ControlState, now: float) -> str | None:
    """Whether the job was requeued more often than it may, in words; the latest time counts."""
    allowance = job.plan.fault_tolerance.max_preemptions
    if allowance is None or allowance.used(job.requeued_at, now) <= allowance.count:
        return None
    return f"preempted or requeued too often ({_describe(job.requeued_at, allowance, now)})"


def _of_all(job: ControlState) -> list[float]:
    return [at for replica in job.replicas.values() for at in replica.restarted_at]


def _describe(times: Sequence[float], allowance: Allowance, now: float) -> str:
    within = "" if allowance.per_s is None else f" per {words(allowance.per_s)}"
    return f"{allowance.used(times, now)} of {allowance.count}{within}"


def judges_progress(job: ControlState) -> bool:
    """Whether the plan says when a job counts as stuck."""
    return job.plan.fault_tolerance.progress.max_no_progress_cycles is not None


def first_step(replica: Replica, step: int) -> None:
    """A worker reports its first step of the cycle."""
    replica.first_step = step if replica.first_step is None else min(step, replica.first_step)
    reach_step(replica, step)


def reach_step(replica: Replica, step: int | None) -> None:
    """A worker, or its node, reports how far the cycle has come."""
    if step is None:
        return
    replica.reached = step if replica.reached is None else max(step, replica.reached)


def start_cycle(replica: Replica) -> None:
    """A new cycle runs."""
    if replica.reached is not None:
        replica.best_step = replica.reached if replica.best_step is None else max(replica.best_step, replica.reached)
    replica.first_step = replica.reached = None


def count_cycle(job: ControlState, replica: Replica) -> None:
    """Take the cycle that has failed into account."""
    # Steps that an earlier cycle had made already do not count: a job that dies at the same step each time is stuck.
    new_steps = steps_gained(replica)
    enough = job.plan.fault_tolerance.progress.min_progress_steps
    replica.no_progress = 0 if new_steps >= enough else replica.no_progress + 1


def is_stuck(job: ControlState, replica: Replica) -> str | None:
    """Why no further cycle is worth it, in words; None: go on."""
    bounds = job.plan.fault_tolerance.progress
    if bounds.max_no_progress_cycles is None or replica.no_progress < bounds.max_no_progress_cycles:
        return None
    few = f"fewer than {bounds.min_progress_steps} new steps" if bounds.min_progress_steps > 1 else "no new step"
    limit = bounds.max_no_progress_cycles
    return f"no progress: {replica.no_progress} cycles in a row have made {few} (limit {limit})"


def steps_gained(replica: Replica) -> int:
    """How many steps the cycle has made, as far as is known, that no cycle before it had made."""
    if replica.reached is None:
        return 0
    before = replica.best_step
    if before is None:  # it may have begun at a checkpoint of an earlier job; a file or a log does not tell
        before = 0 if replica.first_step is None else replica.first_step - 1
    return replica.reached - before


# Keeps 2**n a finite float; the limit is reached long before.
MOST_DOUBLINGS = 30


def count_crash(job: ControlState, replica: Replica, failure: Failure) -> float:
    """Take in a failure after which the replica is restarted. Returns how many seconds after the failure its next
    cycle begins at the earliest."""
    plan = job.plan.fault_tolerance.backoff
    if not plan.max:
        return 0.0
    if steps_gained(replica) > 0 or failure.noticed - replica.began_at > plan.within:
        replica.crashes = 0
        return 0.0
    if failure.kind == "node":  # neither a crash nor the end of a row: the spares are there for it
        return 0.0
    replica.crashes += 1
    if replica.crashes < plan.after:
        return 0.0
    doubled = min(replica.crashes - plan.after, MOST_DOUBLINGS)
    return float(min(plan.max, plan.initial * 2**doubled))
