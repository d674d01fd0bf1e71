"""A job in the user's own allocation: the notice ahead of the time limit, and nodes that are given up."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from nvrx_slurm.batch.allocation import GIVEN_UP_WITHIN_S, AllocationKeeper
from nvrx_slurm.cluster.slurm_nodes import SlurmNode
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.lab.simulation.loop import VirtualClock, VirtualLoop


class Held:
    """An allocation of three nodes. `silent`: nodes whose slurmd does not answer; `ends_at`: its time limit."""

    def __init__(self, *, ends_at: float | None = None, slurmd_timeout_s: float | None = 300.0) -> None:
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop)
        self.began = self.clock.monotonic()
        self.ends_at, self.timeout_s = ends_at, slurmd_timeout_s
        self.held = ["n1", "n2", "n3"]
        self.silent: set[str] = set()
        self.unanswered = 0  # this many of the next queries to slurmctld get no answer

    @property
    def passed_s(self) -> float:
        return self.clock.monotonic() - self.began

    def play(self, story: Callable[[AllocationKeeper], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            await story(AllocationKeeper("7", self, FaultToleranceSpec(), self.clock))

        try:
            self.loop.run(main())
        finally:
            self.loop.close()

    def is_busy(self) -> bool:
        self.unanswered -= 1
        return self.unanswered >= 0

    async def time_left_s(self) -> float | None:
        return None if self.ends_at is None or self.is_busy() else self.ends_at - self.passed_s

    async def slurmd_timeout_s(self) -> float | None:
        return self.timeout_s

    async def nodes(self, names: Sequence[str]) -> dict[str, SlurmNode]:
        return {} if self.is_busy() else {name: SlurmNode(name, "MIXED") for name in names}

    async def answers(self, node: SlurmNode) -> bool:
        return node.name not in self.silent

    async def allocated(self) -> tuple[str, ...] | None:
        return None if self.is_busy() else tuple(self.held)

    async def shrink_to(self, nodes: Sequence[str]) -> None:
        self.held = list(nodes)


@pytest.mark.parametrize(("limit_s", "at_least_s"), [(3600.0, 3500.0), (60.0, 30.0)])
def test_notice_comes_once_and_leaves_time_for_the_teardown(limit_s: float, at_least_s: float) -> None:
    """The end takes at most half of the time that the limit left at the start."""
    slurm = Held(ends_at=limit_s)
    noticed: list[float] = []
    slurm.play(lambda keeper: keeper.watch_time_limit(lambda: noticed.append(slurm.passed_s)))
    assert len(noticed) == 1
    assert at_least_s <= noticed[0] <= limit_s - 10.0


def test_notice_follows_a_limit_that_was_moved() -> None:
    """`scontrol update TimeLimit=` during the job counts."""
    slurm = Held(ends_at=3600.0)
    noticed: list[float] = []

    async def moved(keeper: AllocationKeeper) -> None:
        slurm.loop.call_later(100.0, lambda: setattr(slurm, "ends_at", 7200.0))
        await keeper.watch_time_limit(lambda: noticed.append(slurm.passed_s))

    slurm.play(moved)
    assert len(noticed) == 1
    assert noticed[0] > 3600.0


def test_notice_comes_also_where_slurm_does_not_answer_again() -> None:
    """slurmctld may not answer at that moment, and ends the job nevertheless."""
    slurm = Held(ends_at=3600.0)
    noticed: list[float] = []

    async def unanswered(keeper: AllocationKeeper) -> None:
        slurm.loop.call_later(100.0, lambda: setattr(slurm, "ends_at", None))
        await keeper.watch_time_limit(lambda: noticed.append(slurm.passed_s))

    slurm.play(unanswered)
    assert len(noticed) == 1
    assert noticed[0] < 3600.0


def test_notice_comes_also_where_slurm_does_not_answer_at_first() -> None:
    """One unanswered question at the start does not cost the job its notice."""
    slurm = Held(ends_at=3600.0)
    slurm.unanswered = 3
    noticed: list[float] = []
    slurm.play(lambda keeper: keeper.watch_time_limit(lambda: noticed.append(slurm.passed_s)))
    assert len(noticed) == 1
    assert 3400.0 <= noticed[0] <= 3590.0


@pytest.mark.parametrize("at_first_s", [math.inf, 3600.0])
def test_an_allocation_without_a_limit_gets_no_notice(at_first_s: float) -> None:
    """Nor does one whose limit an administrator has lifted."""
    slurm = Held(ends_at=at_first_s)
    noticed: list[float] = []

    async def lifted(keeper: AllocationKeeper) -> None:
        slurm.loop.call_later(100.0, lambda: setattr(slurm, "ends_at", math.inf))
        await keeper.watch_time_limit(lambda: noticed.append(slurm.passed_s))

    slurm.play(lifted)
    assert not noticed


@pytest.mark.parametrize(
    ("timeout_s", "within_s"), [(300.0, GIVEN_UP_WITHIN_S), (10.0, 5.0), (None, GIVEN_UP_WITHIN_S)]
)
def test_a_silent_node_is_given_up_before_slurm_gives_up_the_job(timeout_s: float | None, within_s: float) -> None:
    """Slurm ends the whole job SlurmdTimeout after the node's last answer."""
    slurm = Held(slurmd_timeout_s=timeout_s)
    slurm.silent.add("n2")
    slurm.play(lambda keeper: keeper.node_lost("n2"))
    assert slurm.held == ["n1", "n3"]
    assert within_s <= slurm.passed_s <= within_s + 2.0


def test_a_silent_node_is_given_up_also_where_slurmctld_answers_late() -> None:
    """It is late with the address of slurmd, and with the nodes of the allocation."""
    slurm = Held()
    slurm.silent.add("n2")
    slurm.unanswered = 3

    async def busy_again(keeper: AllocationKeeper) -> None:
        slurm.loop.call_later(GIVEN_UP_WITHIN_S / 2, lambda: setattr(slurm, "unanswered", 3))
        await keeper.node_lost("n2")

    slurm.play(busy_again)
    assert slurm.held == ["n1", "n3"]


def test_a_node_that_slurm_says_nothing_of_is_kept() -> None:
    """Without an answer nothing shows that the node's slurmd is gone."""
    slurm = Held()
    slurm.unanswered = 1000
    slurm.play(lambda keeper: keeper.node_lost("n2"))
    assert slurm.held == ["n1", "n2", "n3"]


def test_a_node_whose_slurmd_answers_again_is_kept() -> None:
    """Only the agent was killed, or slurmd was restarted with it."""
    slurm = Held()
    slurm.silent.add("n2")

    async def restarted(keeper: AllocationKeeper) -> None:
        slurm.loop.call_later(10.0, lambda: slurm.silent.clear())
        await keeper.node_lost("n2")

    slurm.play(restarted)
    assert slurm.held == ["n1", "n2", "n3"]


def test_the_last_node_is_never_given_up() -> None:
    """A job needs at least one node."""
    slurm = Held()
    slurm.held, slurm.silent = ["n2"], {"n2"}
    slurm.play(lambda keeper: keeper.node_lost("n2"))
    assert slurm.held == ["n2"]
