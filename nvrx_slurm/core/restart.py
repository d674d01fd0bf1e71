"""What a failure sets in motion. Whether there is a restart at all is decided in `restart_decision`."""

from __future__ import annotations

from nvrx_slurm.core import limits, rendezvous, restart_decision
from nvrx_slurm.core.state import ControlState, Failure, Phase, Replica
from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.journal.records import Decision, ReplicaEnded, RestartDecided, Shutdown


def handle_failure(job: ControlState, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    """Set in motion what follows from a failure of a running replica. What may need evidence is decided when its next
    rendezvous could close; all else now."""
    limits.reach_step(replica, failure.step)
    pending, asked = restart_decision.open_decision(job, replica, failure, now)
    if pending.holds:
        # The nodes tear down while the evidence arrives: the recovery takes the longer of the two, not their sum.
        return [*asked, *_follow(job, replica, failure, now)]
    decisions = restart_decision.decide(job, pending, now)
    if isinstance(decisions[-1], RestartDecided):  # and no shutdown
        decisions += _follow(job, replica, failure, now)
    return [*asked, *decisions]


def _follow(job: ControlState, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    """Do what the role's `on_failure` says."""
    # Of a hang the stacks are wanted from every rank that waits for it, so the nodes write them before they stop it.
    dump = failure.cause if failure.hung else None
    match replica.role.on_failure:
        case "ignore":
            replica.phase = Phase.FAILED
            return [ReplicaEnded(replica=replica.id, cycle=replica.cycle, outcome="failed")]
        case "fail_job":
            return [Shutdown(exit_code=EXIT_FAILED, reason=f"{replica.id}: {failure.cause}", dump=dump)]
        case "restart_replica" | "restart_job":
            opened: list[Decision] = []
            restarted = restart_decision.restarted_with(job, replica)
            for other in job.replicas.values():
                if other.id in restarted:
                    opened += rendezvous.open_rendezvous(job, other, now, failure.noticed, dump)
            return opened


# ---------------------------------------------------------------------------------------- early exits


def exits_due_at(job: ControlState, replica: Replica) -> float | None:
    """When the nodes of a running replica that have not finished are held for hung; None: never."""
    skew_s = job.plan.fault_tolerance.hang.exit_skew
    if skew_s is None or replica.first_done_at is None or replica.phase is not Phase.RUNNING:
        return None
    return replica.first_done_at + skew_s


def end_exit_skew(job: ControlState, now: float) -> list[Decision]:
    """Act on replicas of which some nodes finished long ago while others run on and on."""
    decisions: list[Decision] = []
    for replica in job.replicas.values():
        due_at = exits_due_at(job, replica)
        if due_at is None or not job.is_over(due_at, now):
            continue
        late = [name for name in replica.order if name not in replica.done]
        skew_s = job.plan.fault_tolerance.hang.exit_skew
        finished = f"{', '.join(sorted(replica.done))} finished {skew_s:g} s ago"
        cause = f"{', '.join(late)} hung: {finished} with exit code 0, and this still runs"
        failure = Failure(kind="worker", cause=cause, node=late[0], noticed=now, hung=True)
        decisions += handle_failure(job, replica, failure, now)
        if isinstance(decisions[-1], Shutdown):
            break
    return decisions
