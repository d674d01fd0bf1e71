"""Runs with the same name never mix. A running one is left alone, and a new one may follow one that has ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.inprocess.harness import Group
from tests.inprocess.script import Script
from tests.inprocess.servers import Valkey


def _scripts(tmp_path: Path, store: tuple[str, dict[str, object]], **said: object) -> list[Script]:
    return [Script(folder=str(tmp_path / name), store=store, **said) for name in "ab"]


def _stores(tmp_path: Path, valkey: Valkey) -> dict[str, tuple[str, dict[str, object]]]:
    return {
        "redis": ("RedisStore", {"url": valkey.url}),
        "files": ("FileStore", {"path": str(tmp_path / "store")}),
        "default": ("RedisStore", {}),
    }


def _return(group: Group, ranks: list[int], iteration: int = 0) -> None:
    group.order_all(ranks, iteration, "return")
    assert [group.ended(rank) for rank in ranks] == [0] * len(ranks)


def _all_give_up(group: Group, ranks: list[int], iteration: int) -> None:
    """Have all ranks raise RestartAbort, without a restart between."""
    for rank in ranks[1:]:
        group.order(rank, iteration, "abort when restarted")
        group.expect("doing", rank, iteration=iteration, command="abort when restarted")
    group.order(ranks[0], iteration, "raise abort")


def _assert_refused(group: Group, running: Group) -> None:
    """Assert that each rank has one clear error, which names a process of the run that owns the name."""
    pids = {str(process.pid) for process in running.ranks.values()}
    for rank in range(group.world):
        raised = group.expect("raised", rank)
        assert raised.kind == "StoreError"
        assert pids & set(raised.text.split()), raised.text
        assert "NVRX_INPROCESS_GROUP" in raised.text
    assert not group.all("fn")


@pytest.mark.parametrize("attempt", range(3))
def test_two_runs_of_one_name_that_start_together_do_not_mix(
    start, valkey: Valkey, tmp_path: Path, attempt: int
) -> None:
    """All ranks of the older run enter the function, and none of the other run."""
    scripts = _scripts(tmp_path, ("RedisStore", {"url": valkey.url}))
    # The ranks read in each other's environment, in /proc, which run is older. A forked rank has none there.
    with (
        start(3, scripts[0], interpreters=True) as first,
        start(3, scripts[1], name=first.name, interpreters=True) as second,
    ):
        first.entered([0, 1, 2], 0, world_size=3)
        _assert_refused(second, first)
        _return(first, [0, 1, 2])


def test_a_run_of_another_size_leaves_the_running_one_alone(start, valkey: Valkey, tmp_path: Path) -> None:
    """The new run is refused, and the running one can still restart."""
    scripts = _scripts(tmp_path, ("RedisStore", {"url": valkey.url}))
    with start(2, scripts[0]) as first:
        first.entered([0, 1], 0)
        with start(3, scripts[1], name=first.name) as second:
            _assert_refused(second, first)
            first.order(1, 0, "raise")
            first.entered([0, 1], 1, world_size=2)
            _return(first, [0, 1], 1)


@pytest.mark.parametrize("store", ["redis", "files", "default"])
@pytest.mark.parametrize("end", ["kill", "interrupt", "abort"])
def test_a_run_that_has_ended_badly_is_followed_by_the_next(
    start, valkey: Valkey, tmp_path: Path, store: str, end: str
) -> None:
    """The next run takes the name at once, also with another world size."""
    scripts = _scripts(tmp_path, _stores(tmp_path, valkey)[store])
    with start(2, scripts[0]) as first:
        first.entered([0, 1], 0)
        match end:
            case "kill":
                first.kill([0, 1])
            case "interrupt":
                first.signal(0, signal.SIGINT)
                first.signal(1, signal.SIGINT)
            case "abort":
                _all_give_up(first, [0, 1], 0)
        for rank in (0, 1):
            first.ended(rank)
        with start(3, scripts[1], name=first.name) as second:
            second.entered([0, 1, 2], 0, world_size=3)
            _return(second, [0, 1, 2])


def test_a_run_that_died_before_it_was_complete_is_followed_by_the_next(
    start, valkey: Valkey, tmp_path: Path
) -> None:
    """A new rank does not take a place that is still free in a dead run."""
    scripts = _scripts(tmp_path, ("RedisStore", {"url": valkey.url}))
    with start(1, scripts[0], variables={"WORLD_SIZE": "2"}) as first:
        first.expect("begin", 0)
        valkey.until_key(first.name, "joined")
        first.kill([0])
        with start(2, scripts[1], name=first.name) as second:
            second.entered([0, 1], 0, world_size=2)
            _return(second, [0, 1])


def test_ranks_that_have_all_given_up_may_call_again(start) -> None:
    """The same processes make another call, which begins with all ranks that are alive."""
    with start(3, calls=2, stubborn=(0, 1)) as group:
        group.entered([0, 1, 2], 0, call=0)
        group.order(2, 0, "kill")
        group.entered([0, 1], 1, call=0)
        _all_give_up(group, [0, 1], 1)
        for rank in (0, 1):
            assert group.expect("raised", rank).kind == "RestartAbort"
        entries = group.entered([0, 1], 0, call=1, world_size=2)
        assert [report.facts["rank"] for report in entries] == [0, 1]
        group.order_all([0, 1], 0, "return")
        assert [group.expect("returned", rank).value for rank in (0, 1)] == ["value of 0", "value of 1"]


def test_a_rank_that_left_is_refused_where_the_others_have_completed(start) -> None:
    """A rank that gave up in a call that the others completed gets an error in its next call; the others do not wait
    for it."""
    with start(3, calls=2, stubborn=(1,)) as group:
        group.entered([0, 1, 2], 0, call=0)
        group.order(1, 0, "raise abort")
        group.entered([0, 2], 1, call=0, world_size=2)
        group.order_all([0, 2], 1, "return")
        refused = group.expect("raised", 1, call=1)
        assert (refused.kind, "earlier call" in refused.text) == ("RestartError", True)
        group.entered([0, 2], 0, call=1, world_size=2)
        group.order_all([0, 2], 0, "return")
