"""The table of states: every state of Slurm is known, and only that of an ended job is terminal."""

from __future__ import annotations

import pytest

from nvrx_slurm.cluster.states import JobState, state_of_array, state_of_result, state_of_word

# JOB STATE CODES of squeue(1) and sacct(1), 22.05 to 24.11
ENDED = {
    "BOOT_FAIL": 75,
    "CANCELLED": 143,
    "COMPLETED": 0,
    "DEADLINE": 124,
    "FAILED": 1,
    "NODE_FAIL": 75,
    "OUT_OF_MEMORY": 1,
    "PREEMPTED": 75,
    "REVOKED": 75,
    "TIMEOUT": 124,
}
LIVING = [
    "COMPLETING",
    "CONFIGURING",
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "RUNNING",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "POWER_UP_NODE",
    "LAUNCH_FAILED",
]


@pytest.mark.parametrize(("word", "exit_code"), ENDED.items())
def test_a_state_of_an_ended_job_is_terminal_and_stands_for_an_exit_code(word: str, exit_code: int) -> None:
    """The state alone shows that the job has ended, and roughly how."""
    state = state_of_word(word)
    assert (state, state.terminal, state.exit_code) == (word, True, exit_code)


@pytest.mark.parametrize("word", LIVING)
def test_a_state_of_a_living_job_is_known_and_not_terminal(word: str) -> None:
    """A requeued, held or suspended job is waited for."""
    state = state_of_word(word)
    assert state is not JobState.UNKNOWN
    assert not state.terminal
    assert state.exit_code is None


@pytest.mark.parametrize("word", ["", "SOMETHING_NEW", "  "])
def test_a_word_that_slurm_may_invent_is_unknown_and_not_terminal(word: str) -> None:
    """A state of a newer Slurm ends no wait."""
    assert state_of_word(word) is JobState.UNKNOWN
    assert not JobState.UNKNOWN.terminal


@pytest.mark.parametrize("word", ["CANCELLED by 1000", "CANCELLED+", "cancelled"])
def test_what_sacct_adds_to_a_state_is_ignored(word: str) -> None:
    """sacct adds who cancelled the job, and cuts words to a column's width."""
    assert state_of_word(word) is JobState.CANCELLED


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [
        (0, "COMPLETED"),
        (1, "FAILED"),
        (75, "FAILED"),
        (93, "FAILED"),
        (124, "TIMEOUT"),
        (130, "CANCELLED"),
        (143, "CANCELLED"),
    ],
)
def test_a_jobs_own_exit_code_stands_for_a_state(exit_code: int, state: str) -> None:
    """A result gives the state if no other source does."""
    assert state_of_result(exit_code) == state


@pytest.mark.parametrize(
    ("elements", "whole"),
    [
        (["COMPLETED", "RUNNING", "PENDING"], "RUNNING"),
        (["FAILED", "PENDING"], "PENDING"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
    ],
)
def test_a_job_array_is_over_when_each_element_is(elements: list[str], whole: str) -> None:
    """One failed element does not end the wait for the others, and is not forgotten at the end."""
    assert state_of_array([JobState(word) for word in elements]) == whole
