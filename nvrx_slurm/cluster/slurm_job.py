"""What Slurm says of a running job that was signalled: whether it is preempted, and whether it may be requeued.

A preemption with a GraceTime sets PreemptTime, and signals the steps alone with SIGTERM; or, with
`preempt_send_user_signal`, as the job asked to be signalled ahead of its time limit. Without a GraceTime the job is
taken down at once: it counts one restart more, or its state is PREEMPTED (slurm.conf(5), PreemptMode).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nvrx_slurm.cluster.slurm_nodes import said
from nvrx_slurm.cluster.slurm_text import fields_of

# The job's end waits for the answer: with KillWait at 20 s and more it can.
ANSWER_S = 2.0

_TAKEN: dict[str, Literal["time_limit", "agents_gone"]] = {
    "TIMEOUT": "time_limit",
    "TimeLimit": "time_limit",
    "NODE_FAIL": "agents_gone",
    "NodeDown": "agents_gone",
}


class SlurmJob(msgspec.Struct, frozen=True):
    """`preempted`: Slurm takes its nodes back; `has_grace`: later, not at once. `may_requeue`: its user allows it,
    and Slurm has not done it. `taken`: why Slurm ends the job, or has ended it; None: it runs, or is preempted."""

    preempted: bool
    has_grace: bool
    may_requeue: bool
    taken: Literal["cancel", "time_limit", "agents_gone"] | None = None


async def signalled_job(job_id: str, generation: int) -> SlurmJob | None:
    """What Slurm says of this job, in its `generation`; None where it does not answer soon."""
    return job_of(await said("scontrol", "--oneliner", "show", "job", job_id, timeout_s=ANSWER_S), generation)


def job_of(stdout: str, generation: int) -> SlurmJob | None:
    """The job in what `scontrol --oneliner show job` prints. One that was requeued has a restart more than its
    processes know of."""
    shown = fields_of(stdout)
    if "JobState" not in shown:
        return None
    has_grace = shown.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
    requeued = int(shown.get("Restarts", 0)) > generation
    taken_down = requeued or shown["JobState"] == "PREEMPTED"
    if taken_down or shown["JobState"] in ("RUNNING", "SUSPENDED", "CONFIGURING", "PENDING"):
        taken: Literal["cancel", "time_limit", "agents_gone"] | None = None
    else:  # its base state is hidden while it is COMPLETING, the reason is not
        taken = _TAKEN.get(shown["JobState"]) or _TAKEN.get(shown.get("Reason", ""), "cancel")
    return SlurmJob(
        preempted=has_grace or taken_down,
        has_grace=has_grace and not taken_down,
        may_requeue=shown.get("Requeue") == "1" and not requeued,
        taken=taken,
    )
