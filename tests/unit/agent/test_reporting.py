"""Restarts in process as the controller hears of them: each, until they come too fast for that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.reporting import RESTARTS_AT_ONCE, RESTARTS_EVERY_S, Reporting
from nvrx_slurm.journal.records import Assignment, RestartedInProcess
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.lab.simulation.loop import VirtualLoop

ASSIGNMENT = Assignment(
    group_rank=0,
    first_rank=0,
    workers=1,
    world_size=1,
    group_world_size=1,
    master_addr="h",
    master_port=1,
    role="main",
)


class KeepingPublisher:
    """A publisher that keeps its facts."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

    def publish(self, kind: type[Any], **fields: Any) -> None:
        self.facts.append(kind(node="n1", incarnation="i", seq=1, **fields))


def restart(iteration: int) -> InProcessRestart:
    return InProcessRestart(cause="c", iteration=iteration, world_size=1, active_world_size=1, total_s=0.01)


def told_of(storms: list[float]) -> list[RestartedInProcess]:
    """What is told of one cycle's restarts, given how long after the last one each comes."""
    loop, told = VirtualLoop(), KeepingPublisher()
    reporting = Reporting(told, board=None, watch=None, clock=None, post=None)  # type: ignore[arg-type]
    cycle = Cycle("main-0", 3, ASSIGNMENT, began=0.0)

    async def happen() -> None:
        for iteration, after_s in enumerate(storms, 1):
            await asyncio.sleep(after_s)
            reporting.restarted(cycle, restart(iteration))
        await asyncio.sleep(2 * RESTARTS_EVERY_S)

    loop.run_until_complete(happen())
    loop.close()
    return told.facts


def test_restarts_are_told_one_by_one_at_first() -> None:
    """Each with its iteration, in the cycle that it was in."""
    facts = told_of([0.01] * RESTARTS_AT_ONCE)
    assert [(fact.cycle, fact.restart.iteration, fact.times) for fact in facts] == [
        (3, iteration, 1) for iteration in range(1, RESTARTS_AT_ONCE + 1)
    ]


@pytest.mark.parametrize(("every_s", "count"), [(0.01, 5_000), (RESTARTS_EVERY_S / 4, 100)])
def test_a_function_that_fails_at_once_does_not_fill_the_journal(every_s: float, count: int) -> None:
    """Later ones are told together: every restart is counted once, and the newest of them is the one that is told."""
    facts = told_of([every_s] * count)
    assert sum(fact.times for fact in facts) == count
    assert facts[-1].restart.iteration == count
    assert len(facts) <= RESTARTS_AT_ONCE + count * every_s / RESTARTS_EVERY_S + 2
