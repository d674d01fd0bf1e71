"""Calls can follow one another, cannot be nested, and leave nothing behind."""

from __future__ import annotations

from tests.inprocess.script import Fault


def test_calls_follow_one_another(start) -> None:
    """Three calls with a restart in each: every call begins as the first one did."""
    with start(2, calls=3) as group:
        for call in range(3):
            group.entered([0, 1], 0, call=call, world_size=2)
            group.order(call % 2, 0, "raise")
            group.entered([0, 1], 1, call=call)
            group.order_all([0, 1], 1, "return")
            for rank in (0, 1):
                assert group.expect("returned", rank, call=call).value == f"value of {rank}"
                assert group.expect("left", rank, call=call).more == {}


def test_calls_shrink(start) -> None:
    """A rank that was lost in one call is not waited for in the next."""
    with start(4, calls=3) as group:
        group.entered([0, 1, 2, 3], 0, call=0)
        group.order(1, 0, "kill")
        group.entered([0, 2, 3], 1, call=0, world_size=3)
        group.order_all([0, 2, 3], 1, "return")
        group.entered([0, 2, 3], 0, call=1, world_size=3)
        group.order(0, 0, "kill")
        group.entered([2, 3], 1, call=1, world_size=2)
        group.order_all([2, 3], 1, "return")
        entries = group.entered([2, 3], 0, call=2, world_size=2)
        assert [report.facts["rank"] for report in entries] == [0, 1]
        group.order_all([2, 3], 0, "return")


def test_a_death_after_a_call_is_known_in_the_next(start) -> None:
    """A rank that is killed after a call has completed is not waited for in the next."""
    with start(3, calls=2, faults=(Fault(1, "completion", "kill"),)) as group:
        group.entered([0, 1, 2], 0, call=0)
        group.order_all([0, 1, 2], 0, "return")
        entries = group.entered([0, 2], 0, call=1, world_size=2)
        assert [report.facts["rank"] for report in entries] == [0, 1]
        group.order_all([0, 2], 0, "return")


def test_a_wrapped_call_in_a_wrapped_call_is_refused(start) -> None:
    """The inner call raises an error that says so, and the outer call goes on."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(0, 0, "nest")
        assert "inside" in group.expect("refused", 0).text
        group.order_all([0, 1], 0, "return")
        assert group.expect("returned", 0).value == "value of 0"


def test_a_wrapped_call_in_another_thread_is_refused(start) -> None:
    """The call in the thread raises an error, and the outer call goes on."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "nest in thread")
        assert group.expect("refused", 1).text
        group.order_all([0, 1], 0, "return")
        assert group.expect("returned", 1).value == "value of 1"


def test_threads_and_files_are_as_many_after_a_restart(start) -> None:
    """From the second iteration on, the threads and descriptors of each iteration are the same."""
    with start(2) as group:
        for iteration in range(4):
            group.entered([0, 1], iteration)
            group.order(iteration % 2, iteration, "raise")
        group.entered([0, 1], 4)
        group.order_all([0, 1], 4, "return")
        for rank in (0, 1):
            seen = {(*report.threads, report.fds) for report in group.all("fn", rank=rank) if report.iteration > 0}
            assert len(seen) == 1


def test_a_rank_that_never_comes_is_named(start) -> None:
    """A rank that dies before its first call is waited for until the barrier's timeout, whose error names it."""
    bounds = {"soft_timeout": 6.0, "hard_timeout": 8.0, "heartbeat_timeout": 8.0, "barrier_timeout": 12.0}
    with start(3, faults=(Fault(1, "begin", "kill"),), options=bounds) as group:
        for rank in (0, 2):
            raised = group.expect("raised", rank)
            assert (raised.kind, "rank 1" in raised.text) == ("TimeoutError", True)
