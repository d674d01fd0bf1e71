"""Whether a replica that fails again and again gets any further. Judged once a failure, when its steps are known."""

from __future__ import annotations

from nvrx_slurm.core.state import Job, Replica


def is_judged(job: Job) -> bool:
    """Whether the plan says when a job counts as stuck."""
    return job.plan.fault_tolerance.progress.max_no_progress_cycles is not None


def began(replica: Replica, step: int) -> None:
    """A worker tells its first step of the cycle."""
    replica.first_step = step if replica.first_step is None else min(step, replica.first_step)
    reached(replica, step)


def reached(replica: Replica, step: int | None) -> None:
    """Somebody says how far the cycle has come."""
    if step is None:
        return
    replica.reached = step if replica.reached is None else max(step, replica.reached)


def begin(replica: Replica) -> None:
    """A new cycle runs."""
    if replica.reached is not None:
        replica.best_step = replica.reached if replica.best_step is None else max(replica.best_step, replica.reached)
    replica.first_step = replica.reached = None


def count(job: Job, replica: Replica) -> None:
    """Take the cycle that has failed into account. Steps that an earlier cycle had made already do not count: a job
    that dies at the same step each time gets nowhere."""
    new_steps = gained(replica)
    replica.no_progress = (
        0 if new_steps >= job.plan.fault_tolerance.progress.min_progress_steps else replica.no_progress + 1
    )


def is_stuck(job: Job, replica: Replica) -> str | None:
    """Why no further cycle is worth it, in words; None: go on."""
    bounds = job.plan.fault_tolerance.progress
    if bounds.max_no_progress_cycles is None or replica.no_progress < bounds.max_no_progress_cycles:
        return None
    few = f"fewer than {bounds.min_progress_steps} new steps" if bounds.min_progress_steps > 1 else "no new step"
    return (
        f"no progress: {replica.no_progress} cycles in a row have made {few} (limit {bounds.max_no_progress_cycles})"
    )


def gained(replica: Replica) -> int:
    """How many steps the cycle has made, as far as is known, that no cycle before it had made."""
    if replica.reached is None:
        return 0
    before = replica.best_step
    if before is None:  # it may have begun at a checkpoint of an earlier job; a file or a log does not tell
        before = 0 if replica.first_step is None else replica.first_step - 1
    return replica.reached - before
