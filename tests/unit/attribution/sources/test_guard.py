"""A guard answers in time, however its source behaves."""

from __future__ import annotations

import asyncio

import pytest

from nvrx_slurm.attribution.sources.base import MOST_LINE, MOST_SECONDARY
from nvrx_slurm.attribution.sources.guard import AT_ONCE, FIRST_PAUSE_S, GuardedSource
from nvrx_slurm.errors import SourceError, UsageError
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Verdict
from tests.still_clock import StillClock
from tests.unit.attribution.sources.scripted import Scripted, answers, clings, hangs, inquiry_of, raises, said


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


def guard_of(source: Scripted, clock: StillClock) -> GuardedSource:
    return GuardedSource(source, clock=clock, chance=lambda: 0.0)


async def ask(guard: GuardedSource, timeout_s: float = 5.0) -> Attribution:
    return await guard.ask(inquiry_of(), settled=asyncio.Event(), timeout_s=timeout_s)


async def test_an_answer_carries_the_sources_own_name(clock) -> None:
    """The answer has the name that the plan gives the source, not the one that the service gives itself."""
    answer = await ask(guard_of(Scripted(name="https://x"), clock))
    assert (answer.source, answer.verdict) == ("https://x", Verdict.STOP)


@pytest.mark.parametrize("error", [SourceError("no luck"), UsageError("no luck"), ValueError("no luck")])
async def test_an_error_is_an_answer_with_a_problem(clock, error) -> None:
    """No exception of a source leaves the guard: the verdict is UNKNOWN, and the message is the problem."""
    answer = await ask(guard_of(Scripted(raises(error)), clock))
    assert answer.verdict is Verdict.UNKNOWN
    assert answer.problem is not None and "no luck" in answer.problem


@pytest.mark.parametrize("behaviour", [hangs, clings])
async def test_no_answer_is_a_timeout(clock, behaviour) -> None:
    """A source that hangs, even one that ignores a cancellation, takes no more than its time."""
    settled = asyncio.Event()
    answer = await guard_of(Scripted(behaviour), clock).ask(inquiry_of(), settled=settled, timeout_s=0.05)
    assert (answer.verdict, answer.problem) == (Verdict.TIMEOUT, "no answer within 0.05 s")
    settled.set()  # so that the source that ignores cancellations ends with the test
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_an_open_circuit_answers_at_once_and_says_for_how_long(clock) -> None:
    """After three failures in a row the source is not asked; the answer has its last problem and the time left."""
    source = Scripted(raises(SourceError("connection refused")))
    guard = guard_of(source, clock)
    for _ in range(3):
        await ask(guard)
    clock.now += 1.0
    answer = await ask(guard)
    assert answer.problem == f"connection refused (circuit open for another {FIRST_PAUSE_S - 1:.0f} s)"
    assert len(source.asked) == 3


async def test_a_source_that_is_back_is_asked_again(clock) -> None:
    """When the pause is over one ask goes through; its answer closes the circuit."""
    source = Scripted(raises(SourceError("connection refused")))
    guard = guard_of(source, clock)
    for _ in range(3):
        await ask(guard)
    source.behaviour = answers
    clock.now += FIRST_PAUSE_S
    assert (await ask(guard)).verdict is Verdict.STOP
    assert (await ask(guard)).verdict is Verdict.STOP
    assert len(source.asked) == 5


async def test_a_half_open_circuit_lets_one_through(clock) -> None:
    """While the one try runs, other asks are answered that the circuit is open."""
    source = Scripted(raises(SourceError("connection refused")))
    guard = guard_of(source, clock)
    for _ in range(3):
        await ask(guard)
    clock.now += FIRST_PAUSE_S
    source.behaviour = hangs
    first, second = await asyncio.gather(ask(guard, 0.05), ask(guard, 0.05))
    assert (first.verdict, second.verdict) == (Verdict.TIMEOUT, Verdict.UNKNOWN)
    assert len(source.asked) == 4


async def test_so_many_at_once_and_no_more(clock) -> None:
    """A source gets a bounded number of inquiries at a time; the others wait."""
    settled = asyncio.Event()

    async def when_settled(*_: object) -> Attribution:
        await settled.wait()
        return said()

    source = Scripted(when_settled)
    guard = guard_of(source, clock)
    asks = [asyncio.create_task(guard.ask(inquiry_of(), settled=settled, timeout_s=5.0)) for _ in range(AT_ONCE * 2)]
    await asyncio.wait(asks, timeout=0.05)
    assert len(source.asked) == AT_ONCE
    settled.set()
    assert {(await each).verdict for each in asks} == {Verdict.STOP}
    assert len(source.asked) == AT_ONCE * 2


async def test_an_answer_is_cut_to_what_the_journal_can_hold(clock) -> None:
    """A megabyte of evidence does not go into the journal."""
    line = Evidence(file="f", line=1, text="x" * 100_000)

    async def floods(*_: object) -> Attribution:
        return said(primary=line, secondary=(line,) * 1000)

    answer = await ask(guard_of(Scripted(floods), clock))
    assert answer.primary is not None and len(answer.primary.text) == MOST_LINE
    assert len(answer.secondary) == MOST_SECONDARY


async def test_an_ask_may_be_cancelled(clock) -> None:
    """Cancelling an ask cancels the work of the source, and counts as no failure."""
    source = Scripted(hangs)
    guard = guard_of(source, clock)
    for _ in range(4):
        task = asyncio.create_task(ask(guard))
        await asyncio.wait({task}, timeout=0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    source.behaviour = answers
    assert (await ask(guard)).verdict is Verdict.STOP


async def test_closing_is_passed_on(clock) -> None:
    """A guard that is closed closes its source."""
    source = Scripted()
    await guard_of(source, clock).close()
    assert source.closed
