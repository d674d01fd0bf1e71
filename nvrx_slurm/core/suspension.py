"""The suspension of a whole job (`scontrol suspend`, PreemptMode=SUSPEND): all its processes stand still.

Slurm announces it to every process with SIGTSTP, two seconds ahead of SIGSTOP. The first agent to report that has the
job suspended. Agents that read the order let their workers outlive the lease, and the controller decides nothing
more until it has stood still itself, or should have. Then every deadline moves by that time.
"""

from __future__ import annotations

from msgspec.structs import replace

from nvrx_slurm.core import membership
from nvrx_slurm.core.state import ControlState
from nvrx_slurm.journal.records import Decision, JobResumed, JobSuspended, NodeResumed, Suspending


def begin(job: ControlState, fact: Suspending, now: float) -> list[Decision] | None:
    """The first announcement of a suspension: the agents that are alive may let their workers outlive the lease."""
    if membership.recognise(job, fact) is None or job.suspended_at is not None:
        return None
    number, job.suspended_at = job.suspensions, now
    job.suspensions += 1
    # No others: an agent that was given up before, and reads the order late, has no ranks that it could keep.
    alive = [node for node in job.nodes.values() if node.alive]
    for node in alive:
        node.grant = number
    incarnations = tuple(node.incarnation for node in alive)
    return [JobSuspended(incarnations=incarnations, generation=job.generation, suspension=number)]


def node_resumed(job: ControlState, fact: NodeResumed, now: float) -> list[Decision] | None:
    """The node's supervisor has confirmed the ordinary lease: from here on the clock is proof again."""
    node = membership.recognise(job, fact)
    # Late, it may be about an earlier suspension: by the grant of this one the workers outlive their lease still.
    if node is None or node.grant != fact.suspension:
        return None
    node.grant = None
    return []


def end(job: ControlState, fact: JobResumed, now: float) -> list[Decision] | None:
    """Move every deadline, and what is measured from a moment, by the time that the controller stood still."""
    if job.suspended_at is None or fact.generation != job.generation:
        return None
    job.suspended_at, by_s = None, fact.stood_still_s
    # What has arrived since the announcement was not decided on, and comes before any deadline.
    job.behind_until, job.catches_up = now, True
    job.started_at += by_s
    job.shutdown_deadline += by_s
    job.expected_until += by_s
    job.terminating_until = _moved(job.terminating_until, by_s)
    # A rate counts the time in which the job may fail: what was counted before the suspension is as recent after it.
    job.nodes_lost_at = [at + by_s for at in job.nodes_lost_at]
    job.requeued_at = [at + by_s for at in job.requeued_at]
    for replica in job.replicas.values():
        replica.opened_at += by_s
        replica.called_at += by_s
        replica.began_at += by_s
        replica.last_call_at = _moved(replica.last_call_at, by_s)
        replica.short_since = _moved(replica.short_since, by_s)
        replica.first_done_at = _moved(replica.first_done_at, by_s)
        replica.pause_until = _moved(replica.pause_until, by_s)
        replica.unsafe = {node: at + by_s for node, at in replica.unsafe.items()}
        replica.restarted_at = [at + by_s for at in replica.restarted_at]
        if (stamps := replica.stamps) is not None:
            stamps.noticed += by_s
            stamps.decided += by_s
            stamps.torn_down += by_s if stamps.torn_down else 0.0
            stamps.closed += by_s if stamps.closed else 0.0
            stamps.spawned = _moved(stamps.spawned, by_s)
    for pending in job.restart_decisions.values():
        pending.opened_at += by_s
        pending.noticed += by_s
        pending.failure = replace(pending.failure, noticed=pending.failure.noticed + by_s)
        pending.due_at += by_s
        pending.held_at = _moved(pending.held_at, by_s)
    return []


def _moved(at: float | None, by_s: float) -> float | None:
    return None if at is None else at + by_s
