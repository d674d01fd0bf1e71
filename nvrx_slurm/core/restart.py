"""What a failure sets in motion. Whether there is a restart at all is decided in `restart_decision`."""

from __future__ import annotations

from nvrx_slurm.core import limits, rendezvous, restart_decision
from nvrx_slurm.core.state import Failure, Job, Phase, Replica
from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.journal.records import Decision, ReplicaEnded, RestartDecided, Shutdown


def handle_failure(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    """Set in motion what follows from a failure of a running replica. What may need evidence is decided when its next
    rendezvous could close; all else now."""
    limits.reach_step(replica, failure.step)
    pending, asked = restart_decision.open_decision(job, replica, failure, now)
    policy = replica.role.on_failure
    if pending.holds:
        return [*asked, *_FOLLOW[policy](job, replica, failure, now)]
    decisions = restart_decision.decide(job, pending, now)
    decided = decisions[-1]
    if isinstance(decided, RestartDecided):  # and no shutdown
        decisions += _FOLLOW[decided.action](job, replica, failure, now)
    return [*asked, *decisions]


def _restart_replica(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    return rendezvous.open_round(job, replica, now, failure.noticed, _dump(failure))


def _restart_job(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    opened: list[Decision] = []
    for other in job.replicas.values():
        if other.phase is Phase.RUNNING:
            opened += rendezvous.open_round(job, other, now, failure.noticed, _dump(failure))
    return opened


def _ignore(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    replica.phase = Phase.FAILED
    return [ReplicaEnded(replica=replica.id, cycle=replica.cycle, outcome="failed")]


def _fail_job(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    return [Shutdown(exit_code=EXIT_FAILED, reason=f"{replica.id}: {failure.cause}", dump=_dump(failure))]


def _dump(failure: Failure) -> str | None:
    return failure.cause if failure.hung else None


# ---------------------------------------------------------------------------------------- early exits


def exits_due_at(job: Job, replica: Replica) -> float | None:
    """When the nodes of a running replica that have not finished are held for hung; None: never."""
    skew_s = job.plan.fault_tolerance.hang.exit_skew
    if skew_s is None or replica.first_done_at is None or replica.phase is not Phase.RUNNING:
        return None
    return replica.first_done_at + skew_s


def end_exit_skew(job: Job, now: float) -> list[Decision]:
    """Act on replicas of which some nodes finished long ago while others run on and on."""
    decisions: list[Decision] = []
    for replica in job.replicas.values():
        due_at = exits_due_at(job, replica)
        if due_at is None or now < due_at:
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


_FOLLOW = {
    "restart_replica": _restart_replica,
    "restart_job": _restart_job,
    "ignore": _ignore,
    "fail_job": _fail_job,
}
