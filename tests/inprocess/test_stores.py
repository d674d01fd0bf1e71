"""Each kind of store; a store that is killed, and one that never comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inprocess.scenarios import KILLED, Scenario, fault, play
from tests.inprocess.script import Script
from tests.inprocess.servers import Valkey

SCENARIOS = [
    Scenario("an exception", 2, ("01", "01"), (fault(1, "fn", "raise"),)),
    Scenario("a death", 3, ("012", "02"), (fault(1, "fn", "kill"),), {1: KILLED}),
    Scenario("the death of rank 0", 3, ("012", "12"), (fault(0, "fn", "kill"),), {0: KILLED}),
    Scenario(
        "a death in a restart",
        3,
        ("012", "", "02"),
        (fault(0, "fn", "raise"), fault(1, "rank_assignment", "kill", 1)),
        {1: KILLED},
    ),
]


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server that the test may kill."""
    server = Valkey(tmp_path / "valkey")
    yield server
    server.end()


def _stores(tmp_path: Path) -> dict[str, tuple[str, dict[str, object]]]:
    return {"files": ("FileStore", {"path": str(tmp_path / "store")}), "default": ("RedisStore", {})}


@pytest.mark.parametrize("store", ["files", "default"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.says.replace(" ", "-"))
def test_other_stores_do_as_well(scenario: Scenario, store: str, start, tmp_path: Path) -> None:
    """A scenario has the same course with a folder as its store, and with the store that the ranks start
    themselves."""
    script = scenario.script(str(tmp_path / "group"), _stores(tmp_path)[store])
    with start(scenario.ranks, script) as group:
        play(scenario, group)


@pytest.mark.parametrize("moment", ["before the fault", "after the fault"])
def test_a_store_that_is_killed_and_comes_back_is_waited_for(start, own_valkey: Valkey, moment: str) -> None:
    """A restart continues once the store is running again."""
    with start(3, store=("RedisStore", {"url": own_valkey.url})) as group:
        group.entered([0, 1, 2], 0)
        own_valkey.kill()
        if moment == "after the fault":
            group.order(1, 0, "raise")
            group.until_logged(1, "ScenarioError")
        own_valkey.start()
        group.order(1, 0, "raise")
        group.entered([0, 1, 2], 1)
        group.order_all([0, 1, 2], 1, "return")
        assert [group.expect("returned", rank).value for rank in range(3)] == [f"value of {r}" for r in range(3)]


def test_a_store_that_never_comes_back_ends_the_call(start, own_valkey: Valkey) -> None:
    """After the store's patience, each rank that needs the store raises StoreError."""
    with start(2, store=("RedisStore", {"url": own_valkey.url, "patience": 1.0})) as group:
        group.entered([0, 1], 0)
        own_valkey.kill()
        group.order(0, 0, "raise")
        group.order(1, 0, "return")
        assert [group.expect("raised", rank).kind for rank in (0, 1)] == ["StoreError", "StoreError"]


@pytest.mark.parametrize("loss", ["lost", "killed", "frozen"])
def test_a_store_that_is_gone_ends_the_call_of_all(start, own_valkey: Valkey, loss: str) -> None:
    """Ranks that are in the function, and not waiting for the store, leave with a StoreError: none is killed."""
    with start(3, store=("RedisStore", {"url": own_valkey.url})) as group:
        group.entered([0, 1, 2], 0)
        match loss:
            case "lost":
                own_valkey.lose()
            case "killed":
                own_valkey.kill()
            case "frozen":
                own_valkey.freeze()
        assert [group.expect("raised", rank).kind for rank in range(3)] == ["StoreError"] * 3


def test_a_store_of_files_that_is_removed_ends_the_call_of_all(start, tmp_path: Path) -> None:
    """The folder is created again, but the group's log is lost."""
    with start(2, store=("FileStore", {"path": str(tmp_path / "store")})) as group:
        group.entered([0, 1], 0)
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        assert [group.expect("raised", rank).kind for rank in (0, 1)] == ["StoreError"] * 2


def test_a_store_that_is_down_is_named(start, own_valkey: Valkey) -> None:
    """A call does not begin without its store, and the error names the store's address."""
    own_valkey.kill()
    with start(1, store=("RedisStore", {"url": own_valkey.url, "patience": 0.5})) as group:
        raised = group.expect("raised", 0)
        assert (raised.kind, str(own_valkey.port) in raised.text) == ("StoreError", True)


def test_keys_of_a_run_that_has_completed_are_gone(start, valkey: Valkey, tmp_path: Path) -> None:
    """Another run can use the same name."""
    scripts = [Script(folder=str(tmp_path / name), store=("RedisStore", {"url": valkey.url})) for name in "ab"]
    with start(2, scripts[0]) as first:
        first.entered([0, 1], 0)
        first.order_all([0, 1], 0, "return")
        assert valkey.keys(of=first.name)
        assert [first.ended(rank) for rank in (0, 1)] == [0, 0]
        assert not valkey.keys(of=first.name)
        with start(2, scripts[1], name=first.name) as second:
            second.entered([0, 1], 0)
            second.order_all([0, 1], 0, "return")
