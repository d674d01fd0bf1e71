"""Unusual behaviour of functions and callbacks does not harm the group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inprocess.scenarios import UNFIT, Scenario, fault, play

UNTOLD = [
    Scenario(
        f"{does}: an error that cannot be formatted as it is restarts the group",
        2,
        ("01", "01"),
        (fault(1, "fn", does),),
        kinds=frozenset({"exception"}),
    )
    for does in ("raise undecodable", "raise long", "raise nested")
]

UNEXPECTED = [
    Scenario(
        "a RankShouldRestart that the function itself raises restarts all",
        2,
        ("01", "01"),
        (fault(1, "fn", "raise restart"),),
        kinds=frozenset({"exception"}),
    ),
    Scenario(
        "a rank whose Abort raises a BaseException leaves with it",
        2,
        ("01", "0"),
        (fault(0, "fn", "raise"), fault(1, "abort", "raise abort")),
        {1: "RestartAbort"},
    ),
    Scenario(
        "a SystemExit during a restart takes its rank out",
        2,
        ("01", "0"),
        (fault(1, "fn", "exit when restarted"), fault(0, "fn", "raise")),
        {1: "SystemExit"},
    ),
    Scenario(
        "an unfit rank with a long explanation is out",
        2,
        ("01", "0"),
        (fault(0, "fn", "raise"), fault(1, "recheck", "raise long")),
        {1: UNFIT},
    ),
]


@pytest.mark.parametrize("scenario", [*UNTOLD, *UNEXPECTED], ids=lambda scenario: scenario.says)
def test_the_group_goes_on(scenario: Scenario, start, valkey, tmp_path: Path) -> None:
    """The scenario ends as its name says."""
    script = scenario.script(str(tmp_path / "group"), ("RedisStore", {"url": valkey.url}))
    with start(scenario.ranks, script) as group:
        play(scenario, group)


def test_a_forked_child_is_no_rank(start) -> None:
    """A child that the function forks, and that ends through the wrapped call, does not affect rank and group."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "fork and exit")
        group.expect("done", 1, command="fork and exit")
        group.order_all([0, 1], 0, "return")
        assert [group.expect("returned", rank).restarts for rank in (0, 1)] == [[], []]


def test_a_rank_that_leaves_waits_for_its_abort(start) -> None:
    """A rank that leaves while its Abort is still running has no thread left after the call."""
    with start(2, faults=(fault(1, "abort", "abort at length"),)) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "raise base in abort")
        group.order(0, 0, "raise")
        assert group.expect("raised", 1).kind == "OwnExit"
        assert group.expect("left", 1).more == {}
        group.order(0, 1, "return")


@pytest.mark.parametrize("at", ["fn", "recheck"])
def test_a_rank_that_has_left_is_refused(start, at: str) -> None:
    """A rank that has left its group and calls again gets an error. The next call of the others is without it."""
    with start(2, calls=2, stubborn=(1,), faults=(fault(1, "recheck", "raise"),)) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, "raise base" if at == "fn" else "raise")
        group.order(0, 1, "return")
        assert "has left its group" in group.expect("raised", 1, kind="RestartError").text
        group.expect("fn", 0, call=1, world_size=1)
        group.order(0, 0, "return")
