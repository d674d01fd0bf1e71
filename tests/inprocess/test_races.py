"""An iteration is either completed or interrupted, and all ranks agree on which."""

from __future__ import annotations

import signal

import pytest

from tests.inprocess.harness import Group
from tests.inprocess.scenarios import KILLED
from tests.inprocess.script import Fault

CALLS = 10
MOST_RESTARTS = 3
"""One for each fault, if no two of them fall into the same restart."""


@pytest.mark.timeout(300)
def test_completion_races_with_an_exception_in_reserve(start) -> None:
    """A reserve rank fails to initialize at the moment when the active ranks return. In each of many calls all ranks
    complete the first iteration, or all complete the second."""
    failing = (Fault(2, "initialize", "raise"),)
    with start(3, arrangement="two active", faults=failing, calls=CALLS, soak=0) as group:
        for call in range(CALLS):
            for rank in range(3):
                group.expect("left", rank, call=call)
            ends = [report.iteration for report in group.all("completion", call=call)]
            assert ends in ([0, 0, 0], [1, 1, 1]), f"call {call}"
        assert [report.more for report in group.all("left") if report.more] == []


@pytest.mark.parametrize("attempt", range(5))
def test_completion_races_with_a_death(start, attempt: int) -> None:
    """A rank is killed at the moment when all ranks return. The others all complete the same iteration, with or
    without it."""
    with start(3) as group:
        group.entered([0, 1, 2], 0)
        group.order_all([0, 1, 2], 0, "return")
        group.expect("doing", attempt % 3, command="return")
        group.signal(attempt % 3, signal.SIGKILL)
        left = [rank for rank in range(3) if rank != attempt % 3]
        group.order_all(left, 1, "return")
        assert group.ended(attempt % 3) in (KILLED, 0)
        assert len({group.expect("completion", rank).iteration for rank in left}) == 1


@pytest.mark.parametrize("attempt", range(3))
def test_faults_of_all_kinds_race(start, attempt: int) -> None:
    """One rank raises, one is killed and one leaves at the same moment, in any order: the other ranks go on
    together."""
    with start(5) as group:
        group.entered(list(range(5)), 0)
        faults = [
            lambda: group.order(1, 0, "raise"),
            lambda: group.kill([2]),
            lambda: [group.order(3, iteration, "raise base") for iteration in range(MOST_RESTARTS + 1)],
        ]
        for strike in faults[attempt:] + faults[:attempt]:
            strike()
        _finish(group, [0, 1, 4])
        assert group.ended(2) == KILLED
        assert group.expect("raised", 3).kind == "OwnExit"


def _finish(group: Group, left: list[int]) -> None:
    """Have the ranks return in whichever iteration they all reach, and assert that it is the same one."""
    for iteration in range(1, MOST_RESTARTS + 1):
        group.order_all(left, iteration, "return")
    assert len({group.expect("completion", rank).iteration for rank in left}) == 1
