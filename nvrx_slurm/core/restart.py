"""What is done about a failure: the one place where a restart is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nvrx_slurm.core import rendezvous
from nvrx_slurm.core.state import Job, Phase, Replica
from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.records import Decision, ReplicaEnded, RestartDecided, Shutdown


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong in a cycle. A lost node spends spares, a failed worker spends the budget."""

    kind: Literal["worker", "node"]
    cause: str
    node: str
    noticed: float
    rank: int | None = None
    step: int | None = None
    hung: bool = False  # it lives: its stacks, and those of all who wait for it, tell why


Action = Literal["restart_replica", "restart_job", "ignore", "fail_job", "stop"]


def decide(replica: Replica, failure: Failure, max_restarts: int) -> Action:
    """The action for the first failure of a cycle. Pure: it changes nothing."""
    policy = replica.role.on_failure
    restarts = policy in ("restart_replica", "restart_job")
    if restarts and failure.kind == "worker" and replica.restarts >= max_restarts:
        return "stop"
    return policy


def act(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    """Decide about a failure of a running replica, and set what follows from it in motion."""
    limit = job.plan.fault_tolerance.max_restarts
    action = decide(replica, failure, limit)
    if failure.kind == "worker" and action in ("restart_replica", "restart_job"):
        replica.restarts += 1
    decided = RestartDecided(
        replica=replica.id,
        cycle=replica.cycle,
        action=action,
        cause=failure.cause,
        node=failure.node,
        rank=failure.rank,
        step=failure.step,
        restarts_left=max(0, limit - replica.restarts),
    )
    return [decided, *_FOLLOW[action](job, replica, failure, now)]


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


def _stop(job: Job, replica: Replica, failure: Failure, now: float) -> list[Decision]:
    spent = f"restart budget spent ({replica.restarts} of {job.plan.fault_tolerance.max_restarts})"
    return [Shutdown(exit_code=EXIT_FAILED, reason=f"{spent}; last: {failure.cause}", dump=_dump(failure))]


def _dump(failure: Failure) -> str | None:
    return failure.cause if failure.hung else None


# ---------------------------------------------------------------------------------------- early exits


def exits_due_at(job: Job, replica: Replica) -> float | None:
    """When the nodes of a running replica that have not finished are held for hung; None: never."""
    skew_s = job.plan.fault_tolerance.hang.exit_skew_s
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
        skew_s = job.plan.fault_tolerance.hang.exit_skew_s
        finished = f"{', '.join(sorted(replica.done))} finished {skew_s:g} s ago"
        cause = f"{', '.join(late)} hung: {finished} with exit code 0, and this still runs"
        failure = Failure(kind="worker", cause=cause, node=late[0], noticed=now, hung=True)
        decisions += act(job, replica, failure, now)
    return decisions


_FOLLOW = {
    "restart_replica": _restart_replica,
    "restart_job": _restart_job,
    "ignore": _ignore,
    "fail_job": _fail_job,
    "stop": _stop,
}
