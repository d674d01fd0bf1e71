"""When callbacks run, what they see, and what happens to their exceptions."""

from __future__ import annotations

import signal

import pytest

from tests.inprocess.scenarios import fault

SOON_S = 20.0
"""Shorter than any interval of the test that uses it."""

ROUND = ["ready", "rank_assignment", "initialize", "health_check", "fn"]
OUT = ["abort", "finalize", "recheck"]


def test_callbacks_come_in_order(start) -> None:
    """Each rank runs its callbacks in this order: an iteration, its restart, the next iteration, the end."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "raise")
        group.entered([0, 1], 1)
        group.order_all([0, 1], 1, "return")
        for rank in (0, 1):
            group.ended(rank)
            story = [each for each in group.reports if each.rank == rank]
            events = [each.event for each in story if each.event != "doing" or each.command == "return"]
            assert events == ["begin", *ROUND, *OUT, *ROUND, "doing", "completion", "returned", "left"]


def test_callbacks_see_what_the_function_raised(start) -> None:
    """Finalize sees the exception on the rank that raised it, and on no other rank; Initialize of the next iteration
    does not."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "raise parts")
        group.entered([0, 1], 1)
        group.order_all([0, 1], 1, "return")
        seen = {rank: group.expect("finalize", rank).fn_exception for rank in (0, 1)}
        assert seen == {0: None, 1: "PartsError"}
        assert [each.fn_exception for each in group.all("initialize", iteration=1)] == [None, None]


def test_a_rank_that_waited_for_a_slow_one_is_not_at_fault(start) -> None:
    """A rank that has returned and waits for a slow one has no exception for FaultCounter to count. The record is
    about no rank; its text names the slow one."""
    with start(2, options={"completion_timeout": 5.0}) as group:
        group.entered([0, 1], 0)
        group.order(0, 0, "return")
        group.entered([0, 1], 1)
        group.order_all([0, 1], 1, "return")
        assert group.expect("finalize", 0).fn_exception is None
        [(rank, kind, text)] = group.expect("returned", 0).restarts[0]["records"]
        assert (rank, kind) == (None, "exception") and "for rank 1 " in text


def test_reserve_ranks_see_that_they_are(start) -> None:
    """Callbacks also run on ranks in reserve, in the mode INACTIVE; the function does not."""
    with start(3, arrangement="two active") as group:
        group.entered([0, 1], 0)
        assert group.expect("initialize", 2).mode == "inactive"
        group.order(0, 0, "raise")
        group.entered([0, 1], 1)
        group.order_all([0, 1], 1, "return")
        assert group.expect("returned", 2).value is None
        assert not group.all("fn", rank=2)


def test_a_reserve_rank_may_die(start) -> None:
    """The death of a rank in reserve interrupts the others, which go on without it."""
    with start(3, arrangement="two active") as group:
        group.entered([0, 1], 0)
        group.expect("health_check", 2)
        group.signal(2, signal.SIGKILL)
        group.entered([0, 1], 1, world_size=2)
        group.order_all([0, 1], 1, "return")


def test_what_terminate_raises_names_its_cause(start) -> None:
    """The cause of Terminate's exception is the exception that made the rank leave."""
    with start(2, faults=(fault(1, "terminate", "raise"),)) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "raise base")
        raised = group.expect("raised", 1)
        assert (raised.kind, raised.causes[0]) == ("ScenarioError", "OwnExit")
        group.entered([0], 1)
        group.order(0, 1, "return")


def test_a_health_check_error_names_its_cause(start) -> None:
    """The cause of the HealthCheckError is the exception of the check."""
    with start(2, faults=(fault(1, "recheck", "raise"),)) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "raise parts")
        raised = group.expect("raised", 1)
        assert (raised.kind, raised.causes[0]) == ("HealthCheckError", "ScenarioError")
        group.entered([0], 1)
        group.order(0, 1, "return")


@pytest.mark.parametrize("at", ["recheck", "finalize"])
def test_an_unfit_rank_that_stays_is_killed(start, at: str) -> None:
    """A rank that is out but whose program goes on is killed before the others enter the function again."""
    with start(3, faults=(fault(1, at, "raise"),), lingering=(1,)) as group:
        group.entered([0, 1, 2], 0)
        group.order(0, 0, "raise")
        group.expect("raised", 1)
        group.entered([0, 2], 1, world_size=2, alive=[0, 2])
        assert group.ended(1) < 0
        group.order_all([0, 2], 1, "return")


def test_ranks_that_disagree_are_named(start) -> None:
    """A rank assignment that leaves a gap ends the call on all ranks, with the same reason."""
    with start(3, faults=(fault(1, "rank_assignment", "raise discarded"),)) as group:
        raised = [group.expect("raised", rank) for rank in range(3)]
        assert [each.kind for each in raised] == ["InternalError", "RankDiscarded", "InternalError"]
        assert "world size" in raised[0].text and raised[0].text == raised[2].text


def test_abort_waits_for_an_atomic_part(start) -> None:
    """A rank aborts only after its atomic part has ended. The other ranks do not wait for that to abort."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "atomic")
        group.expect("atomic", 1)
        group.order(0, 0, "raise")
        group.expect("finalize", 0)
        assert not group.all("abort", rank=1)
        group.order(1, 0, "leave")
        group.entered([0, 1], 1)
        events = [each.event for each in group.reports if each.rank == 1]
        assert events.index("atomic done") < events.index("abort")
        group.order_all([0, 1], 1, "return")


def test_a_long_atomic_part_removes_no_rank(start) -> None:
    """The others wait longer than the barrier's timeout for an atomic part that makes progress."""
    bounds = {"soft_timeout": 4.0, "hard_timeout": 6.0, "heartbeat_timeout": 6.0, "barrier_timeout": 9.0}
    with start(3, options=bounds) as group:
        group.entered([0, 1, 2], 0)
        group.order(1, 0, "atomic")
        group.expect("atomic", 1)
        group.order(0, 0, "raise")
        for rank in (0, 2):
            group.until_logged(rank, "in an atomic part: waits on")
        group.order(1, 0, "leave")
        group.entered([0, 1, 2], 1, world_size=3)
        group.order_all([0, 1, 2], 1, "return")


def test_what_the_function_handles_is_its_own(start) -> None:
    """An exception that the function handles causes no restart."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "handle own")
        group.expect("done", 1, command="handle own")
        group.order_all([0, 1], 0, "return")
        assert group.expect("completion", 0).iteration == 0


def test_one_last_call_records_several_faults(start) -> None:
    """Until every rank has answered, exceptions of other ranks are recorded with the first fault."""
    with start(3, options={"last_call_wait": 20.0}) as group:
        group.entered([0, 1, 2], 0)
        group.signal(0, signal.SIGSTOP)
        for rank in (1, 2):
            group.order(rank, 0, "raise")
            group.until_logged(rank, "ScenarioError")
        group.signal(0, signal.SIGCONT)
        group.entered([0, 1, 2], 1)
        group.order_all([0, 1, 2], 1, "return")
        (restart,) = group.expect("returned", 0).restarts
        assert sorted((rank, kind) for rank, kind, _ in restart["records"]) == [(1, "exception"), (2, "exception")]


def test_a_restart_reports_its_own_faults(start) -> None:
    """Whichever rank reports a restart: it repeats no fault of an earlier restart, and leaves none out."""
    with start(4, faults=(fault(3, "rank_assignment", "kill", 2),)) as group:
        group.entered([0, 1, 2, 3], 0)
        group.order(0, 0, "kill")
        group.entered([1, 2, 3], 1)
        group.order(1, 1, "raise")
        group.entered([1, 2], 3)
        group.order(1, 3, "kill")
        group.entered([2], 4)
        group.order(2, 4, "return")
        (last,) = group.expect("returned", 2).restarts
        assert [(rank, kind) for rank, kind, _ in last["records"]] == [(0, "terminated")]
        assert last["missing"] == [0]


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_nothing_waits_for_an_interval(start, kind: str) -> None:
    """With intervals and a last call of half a minute, a restart and the end of the call are faster than that."""
    slow = dict.fromkeys(("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval"), 30.0)
    longer = {"soft_timeout": 70.0, "hard_timeout": 80.0, "heartbeat_timeout": 60.0, "barrier_timeout": 120.0}
    with start(3, options={**slow, **longer, "progress_watchdog_interval": 30.0, "last_call_wait": 30.0}) as group:
        group.entered([0, 1, 2], 0)
        group.order(1, 0, kind)
        left = [0, 1, 2] if kind == "raise" else [0, 2]
        for rank in left:
            group.expect("fn", rank, iteration=1, timeout=SOON_S)
        group.order_all(left, 1, "return")
        for rank in left:
            group.expect("left", rank, timeout=SOON_S)
