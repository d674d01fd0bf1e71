"""The states of a job, and what each means for a caller that waits for it: one table."""

from __future__ import annotations

from enum import StrEnum

from nvrx_slurm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_TIMEOUT,
)


class JobState(StrEnum):
    """Where a job stands, in Slurm's own words; a local job uses the same ones.

    `UNKNOWN` says that neither squeue nor sacct knows the job. It is not terminal: absent is not finished.
    """

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def terminal(self) -> bool:
        """Whether the job is over."""
        return self in _ENDINGS

    @property
    def exit_code(self) -> int | None:
        """The exit code that stands for the state where the job left no result of its own; None while it lives."""
        return _ENDINGS.get(self)


_ENDINGS = {
    JobState.COMPLETED: EXIT_DONE,
    JobState.CANCELLED: EXIT_TERMINATED,
    JobState.FAILED: EXIT_FAILED,
    JobState.OUT_OF_MEMORY: EXIT_FAILED,
    JobState.TIMEOUT: EXIT_TIMEOUT,
    JobState.DEADLINE: EXIT_TIMEOUT,
    JobState.PREEMPTED: EXIT_RETRY,
    JobState.NODE_FAIL: EXIT_RETRY,
    JobState.BOOT_FAIL: EXIT_RETRY,
    JobState.REVOKED: EXIT_RETRY,
}

# What Slurm also says; see JOB STATE CODES in squeue(1) and sacct(1).
_SYNONYMS = {
    "REQUEUE_HOLD": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.REQUEUED,
    "RESV_DEL_HOLD": JobState.PENDING,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
    # Slurm puts a job that it could not launch back into the queue, and holds it.
    "LAUNCH_FAILED": JobState.REQUEUED,
    "RECONFIG_FAIL": JobState.BOOT_FAIL,
}

_BY_RESULT = {
    EXIT_DONE: JobState.COMPLETED,
    EXIT_TIMEOUT: JobState.TIMEOUT,
    EXIT_INTERRUPTED: JobState.CANCELLED,
    EXIT_TERMINATED: JobState.CANCELLED,
}


def state_of_word(word: str) -> JobState:
    """`CANCELLED by 1000` and `CANCELLED+` are CANCELLED too. A word that no table has is UNKNOWN."""
    name = word.split()[0].rstrip("+").upper() if word.split() else ""
    return _SYNONYMS.get(name) or JobState.__members__.get(name, JobState.UNKNOWN)


def state_of_result(exit_code: int) -> JobState:
    """The state that a job's own exit code stands for."""
    return _BY_RESULT.get(exit_code, JobState.FAILED)


def state_of_array(states: list[JobState]) -> JobState:
    """One state for a whole job array: over when every element is, and then as the first that did not complete."""
    living = [state for state in states if not state.terminal]
    if living:
        return JobState.RUNNING if JobState.RUNNING in living else living[0]
    return next((state for state in states if state is not JobState.COMPLETED), JobState.COMPLETED)
