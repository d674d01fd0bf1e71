"""Scenarios as data: which rank does what, where and when, and which ranks are in the function after that."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from tests.inprocess.actions import WHEN_RESTARTED
from tests.inprocess.harness import Group, Report
from tests.inprocess.script import Fault, Script

KILLED = -signal.SIGKILL
RETURNED = "returned"
UNFIT = "HealthCheckError"

BEFORE_A_RESTART = ("return", *WHEN_RESTARTED)
"""Actions that a rank must have begun before the fault of another rank restarts it."""


@dataclass(frozen=True)
class Scenario:
    """The course of one call of a group, and its expected result.

    `worlds`: for each iteration, the initial ranks that are in the function, in the order of their new ranks; "" for
    an iteration that not all of them reach. A fault at `fn` is injected once all ranks of that world are in the
    function. In the last world all ranks return. `out`: how the other ranks end, by initial rank: the exit code of a
    process that dies, or the name of the exception that the call raises. `kinds`: the interruptions that rank 0 of
    the last world has recorded.
    """

    says: str
    ranks: int
    worlds: tuple[str, ...]
    faults: tuple[Fault, ...] = ()
    out: dict[int, int | str] = field(default_factory=dict)
    kinds: frozenset[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    arrangement: str = "default"

    def script(self, folder: str, store: tuple[str, dict[str, Any]]) -> Script:
        return Script(
            folder=folder, store=store, faults=self.faults, options=self.options, arrangement=self.arrangement
        )


def fault(rank: int, at: str, does: str, iteration: int = 0) -> Fault:
    return Fault(rank, at, does, iteration)


def play(scenario: Scenario, group: Group) -> None:
    """Run the scenario, and compare it with the ranks' reports."""
    for iteration, world in enumerate(scenario.worlds):
        if world:
            _play_iteration(scenario, group, iteration, [int(rank) for rank in world])
    _check_endings(scenario, group)
    _check_agreement(scenario, group)


def _play_iteration(scenario: Scenario, group: Group, iteration: int, world: list[int]) -> None:
    for report in group.entered(world, iteration):
        expected = {"rank": world.index(report.rank), "world_size": len(world)}
        assert {name: report.facts[name] for name in expected} == expected, report
    faults = [one for one in scenario.faults if (one.at, one.iteration) == ("fn", iteration)]
    if not faults:
        group.order_all(world, iteration, "return")
    _strike(group, iteration, faults)


def _strike(group: Group, iteration: int, faults: list[Fault]) -> None:
    """Order the faults of an iteration. Actions that must precede a restart begin first. The other ranks are stopped,
    ordered, and continued together, so that the fault of one does not restart another before its own order."""
    for one in faults:
        if one.does in BEFORE_A_RESTART:
            group.order(one.rank, iteration, one.does)
            group.expect("doing", one.rank, iteration=iteration, command=one.does)
    strikes = [one for one in faults if one.does not in BEFORE_A_RESTART]
    group.freeze([one.rank for one in strikes])
    for one in strikes:
        group.order(one.rank, iteration, one.does)
    for one in strikes:
        group.signal(one.rank, signal.SIGKILL if one.does == "kill" else signal.SIGCONT)


def _check_endings(scenario: Scenario, group: Group) -> None:
    for rank in range(scenario.ranks):
        code = group.ended(rank)
        ending = scenario.out.get(rank, RETURNED)
        if isinstance(ending, int):
            assert code == ending, f"rank {rank} ended with {code}"
            continue
        assert ending in _ending_of(group, rank), f"rank {rank} ended with {code}"
        if ending == RETURNED:
            active = str(rank) in scenario.worlds[-1]
            assert group.expect(RETURNED, rank).value == (f"value of {rank}" if active else None)
            assert group.expect("left", rank).more == {}


def _ending_of(group: Group, rank: int) -> str:
    ways = [report for report in group.reports if report.rank == rank and report.event in (RETURNED, "raised")]
    return " ".join(report.facts.get("kind", RETURNED) for report in ways)


def _check_agreement(scenario: Scenario, group: Group) -> None:
    """Assert that all ranks in an iteration had the same world and different ranks, and that no killed process was
    alive."""
    entries: dict[int, list[Report]] = {}
    for report in group.all("fn"):
        entries.setdefault(report.iteration, []).append(report)
    for iteration, world in entries.items():
        assert len({report.world_size for report in world}) == 1, world
        ranks = [report.facts["rank"] for report in world]
        assert len(set(ranks)) == len(ranks), world
        members = scenario.worlds[iteration] if iteration < len(scenario.worlds) else ""
        for report in world if members and iteration else ():
            assert not (set(report.alive) & _dead_before(scenario, iteration)), report
    if scenario.kinds is not None:
        (last,) = group.expect(RETURNED, int(scenario.worlds[-1][0])).restarts[-1:]
        assert {kind for _, kind, _ in last["records"]} == scenario.kinds, last
    assert not group.all("thawed")


def _dead_before(scenario: Scenario, iteration: int) -> set[int]:
    """The ranks that had died or were unfit, and were no longer in this world."""
    dead = {rank for rank, ending in scenario.out.items() if isinstance(ending, int) or ending == UNFIT}
    return dead - {int(rank) for rank in scenario.worlds[iteration]}
