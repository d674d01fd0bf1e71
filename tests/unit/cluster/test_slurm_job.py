"""What Slurm says of a job that it has signalled. The text is copied from Slurm 22.05.8 and shortened."""

from __future__ import annotations

import pytest

from nvrx_slurm.cluster.slurm_job import SlurmJob, job_of

SHOWN = "JobId=7 JobName=small JobState={} Reason=None Requeue={} Restarts={} EndTime=2026-11-23T20:28:27{}"
IN_GRACE = " PreemptEligibleTime=2026-11-23T20:28:15 PreemptTime=2026-11-23T20:28:21"


@pytest.mark.parametrize(
    ("state", "requeue", "restarts", "time", "job"),
    [
        ("RUNNING", 1, 0, " PreemptTime=None", SlurmJob(False, False, True)),  # its time limit is near
        ("COMPLETING", 1, 0, "", SlurmJob(False, False, True, "cancel")),  # scancel
        ("TIMEOUT", 1, 0, "", SlurmJob(False, False, True, "time_limit")),
        ("NODE_FAIL", 1, 0, "", SlurmJob(False, False, True, "agents_gone")),
        ("RUNNING", 1, 0, IN_GRACE, SlurmJob(True, True, True)),
        ("RUNNING", 0, 0, IN_GRACE, SlurmJob(True, True, False)),
        ("COMPLETING", 1, 1, "", SlurmJob(True, False, False)),  # PreemptMode=REQUEUE, and `scontrol requeue`
        ("PREEMPTED", 1, 0, "", SlurmJob(True, False, True)),  # PreemptMode=CANCEL
        ("COMPLETING", 1, 1, IN_GRACE, SlurmJob(True, False, False)),  # the grace is over
    ],
)
def test_preemption_is_recognised_by_what_slurm_shows(state, requeue, restarts, time, job) -> None:
    """It shows by its time, by a restart that the job's processes do not know of, or by its state."""
    assert job_of(SHOWN.format(state, requeue, restarts, time), generation=0) == job


@pytest.mark.parametrize(
    ("reason", "taken"), [("TimeLimit", "time_limit"), ("NodeDown", "agents_gone"), ("None", "cancel")]
)
def test_reason_shows_the_end_while_slurm_completes_it(reason: str, taken: str) -> None:
    """`COMPLETING` does not show how the job will have ended."""
    shown = SHOWN.format("COMPLETING", 1, 0, "").replace("Reason=None", f"Reason={reason}")
    assert job_of(shown, generation=0) == SlurmJob(False, False, True, taken)


def test_words_of_the_users_script_are_not_slurms() -> None:
    """A user may type `sbatch train.sh JobState=x Restarts=9`, in hydra's form."""
    shown = f"{SHOWN.format('RUNNING', 1, 0, '')} Command=/home/me/train.sh JobState=x Restarts=9 PreemptTime=now"
    assert job_of(shown, generation=0) == SlurmJob(False, False, True)


def test_restarts_of_earlier_generations_are_no_evidence() -> None:
    """The processes of generation 2 know of two restarts."""
    assert job_of(SHOWN.format("RUNNING", 1, 2, ""), generation=2) == SlurmJob(False, False, True)


@pytest.mark.parametrize("said", ["", "slurm_load_jobs error: Invalid job id specified"])
def test_slurm_that_says_nothing_is_no_evidence(said: str) -> None:
    """The signal then has the meaning that it has without Slurm."""
    assert job_of(said, generation=0) is None
