"""How a teardown fits into the time that Slurm allows for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.jobspec.budgets import grace_within, least_notice_s, most_notice_s, notice_s

SECONDS = st.floats(min_value=0, max_value=1e6)


@pytest.mark.parametrize(
    ("limit_s", "seconds"), {None: 60, 86400.0: 60, 240.0: 60, 200.0: 50, 120.0: 30, 60.0: 18}.items()
)
def test_a_short_job_gets_a_shorter_notice(limit_s: float | None, seconds: int) -> None:
    """With the default grace of 10 s the job gets a minute's notice, or a quarter of a short time limit, if that is
    enough."""
    assert notice_s(10.0, 0.0, limit_s) == seconds


@given(SECONDS, SECONDS, st.none() | st.floats(min_value=60, max_value=1e8))
def test_a_notice_that_can_fit_fits(grace_s: float, checkpoint_s: float, limit_s: float | None) -> None:
    """If the limit allows it, the notice covers saving, teardown and the final records, and never takes more than
    half of the limit."""
    told_s = notice_s(grace_s, checkpoint_s, limit_s)
    needed_s = least_notice_s(grace_s, checkpoint_s)
    if limit_s is None or needed_s <= most_notice_s(limit_s):
        assert told_s >= needed_s
    if limit_s is not None:
        assert told_s <= math.ceil(most_notice_s(limit_s))


@pytest.mark.parametrize(("kill_wait_s", "left_s"), {30.0: 22.0, 120.0: 112.0, 16.0: 8.0, 5.0: 2.5, 0.0: 0.0}.items())
def test_kill_wait_leaves_the_workers_what_the_result_does_not_need(kill_wait_s: float, left_s: float) -> None:
    """8 s of KillWait, or half of a short one, are kept for the kill and the job's result."""
    assert grace_within(kill_wait_s) == left_s
