"""The broker between its controller and its sources."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from nvrx_slurm.attribution.broker import CLOSED, MOST_AT_WORK, MOST_KEPT, SourceBroker
from nvrx_slurm.attribution.notify import DecidedFailure
from nvrx_slurm.attribution.sources.guard import GuardedSource
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict, VerdictRecord
from nvrx_slurm.util.clock import SystemClock
from tests.unit.attribution.sources.scripted import Scripted, hangs, inquiry_of, key_of, said

SOON_S = 60.0


@dataclass
class Reports:
    """What a broker has answered, and which decisions it has reported."""

    answers: list[tuple[FailureKey, Attribution]] = field(default_factory=list)
    decisions: list[DecidedFailure] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    stalled: asyncio.Event | None = None
    closed: bool = False

    async def answered(self, key: FailureKey, attribution: Attribution) -> None:
        if self.stalled is not None:
            await self.stalled.wait()
        self.answers.append((key, attribution))
        self.news.set()

    async def decided(self, decided: DecidedFailure) -> None:
        self.decisions.append(decided)
        self.news.set()

    async def close(self, timeout_s: float) -> None:
        self.closed = True

    async def until(self, count: int, of: list[object]) -> None:
        """Wait until `of` has so many entries."""
        async with asyncio.timeout(SOON_S):
            while len(of) < count:
                self.news.clear()
                await self.news.wait()


def broker_of(reported: Reports, *sources: Scripted, timeout_s: float = SOON_S) -> SourceBroker:
    guards = [GuardedSource(source, clock=SystemClock()) for source in sources]
    return SourceBroker(guards, lambda: reported, timeout_s=timeout_s, answered=reported.answered)


def judged(key: FailureKey) -> VerdictRecord:
    return VerdictRecord(key=key, verdict=Verdict.STOP, acted=True)


async def when_settled(inquiry: Inquiry, settled: asyncio.Event) -> Attribution:
    await settled.wait()
    return said()


async def test_each_source_answers_once() -> None:
    """Each source gives one answer to an ask, under the key of that ask."""
    reported = Reports()
    broker = broker_of(reported, Scripted(name="a"), Scripted(name="b"))
    broker.ask(inquiry_of(), settled=True)
    await reported.until(2, reported.answers)
    assert sorted((key, answer.source) for key, answer in reported.answers) == [(key_of(), "a"), (key_of(), "b")]
    await broker.close()


async def test_a_source_gets_one_request_for_a_key() -> None:
    """Asked twice during its work and once after it, a source works once; each ask gets the answer."""
    reported, source = Reports(), Scripted(when_settled)
    broker = broker_of(reported, source)
    broker.ask(inquiry_of(), settled=False)
    broker.ask(inquiry_of(), settled=True)
    await reported.until(2, reported.answers)
    broker.ask(inquiry_of(), settled=True)
    await reported.until(3, reported.answers)
    assert len(source.asked) == 1
    assert len({answer for _, answer in reported.answers}) == 1
    await broker.close()


async def test_a_slow_source_delays_no_other() -> None:
    """A quick source's answer arrives while another source still works, and keys do not wait for each other."""
    reported = Reports()
    broker = broker_of(reported, Scripted(name="quick"), Scripted(when_settled, name="slow"))
    broker.ask(inquiry_of(0), settled=False)
    broker.ask(inquiry_of(1), settled=False)
    await reported.until(2, reported.answers)
    assert [answer.source for _, answer in reported.answers] == ["quick", "quick"]
    broker.settled(key_of(1))
    await reported.until(3, reported.answers)
    assert reported.answers[2][0] == key_of(1)
    await broker.close()


async def test_a_stale_settled_is_nothing() -> None:
    """`settled` changes nothing for a key that was never asked about, or that has all its answers."""
    reported = Reports()
    broker = broker_of(reported, Scripted())
    broker.settled(key_of(9))
    broker.ask(inquiry_of(), settled=True)
    await reported.until(1, reported.answers)
    broker.settled(key_of())
    await broker.close()
    assert len(reported.answers) == 1


async def test_a_decision_is_reported_with_all_answers() -> None:
    """A decision is reported once every source has answered, even if the decision itself did not wait."""
    reported = Reports()
    broker = broker_of(reported, Scripted(name="quick"), Scripted(when_settled, name="slow"))
    broker.ask(inquiry_of(), settled=False)
    broker.judged(judged(key_of()))
    await reported.until(1, reported.answers)
    assert not reported.decisions
    broker.settled(key_of())
    await reported.until(1, reported.decisions)
    assert [answer.source for answer in reported.decisions[0].attributions] == ["quick", "slow"]
    assert reported.decisions[0].inquiry == inquiry_of()
    await broker.close()
    assert reported.closed


async def test_a_decision_about_a_failure_of_another_broker_is_reported() -> None:
    """If the broker before this one had asked, the decision is still reported, without answers."""
    reported = Reports()
    broker = broker_of(reported, Scripted())
    broker.judged(judged(key_of()))
    await reported.until(1, reported.decisions)
    assert reported.decisions[0].attributions == ()
    await broker.close()


async def test_closing_answers_what_is_open() -> None:
    """A source that has not answered gets an answer too: that the controller went away."""
    reported, source = Reports(), Scripted(hangs)
    broker = broker_of(reported, source)
    broker.ask(inquiry_of(), settled=True)
    broker.judged(judged(key_of()))
    await asyncio.wait_for(broker.close(), SOON_S)
    assert [answer.problem for _, answer in reported.answers] == [CLOSED]
    assert [decided.attributions for decided in reported.decisions] == [()]
    assert source.closed


async def test_old_failures_are_forgotten() -> None:
    """Memory is bounded: of past failures only the newest are known."""
    reported, source = Reports(), Scripted()
    broker = broker_of(reported, source)
    for cycle in range(MOST_KEPT * 2):
        broker.ask(inquiry_of(cycle), settled=True)
        await reported.until(cycle + 1, reported.answers)
    broker.ask(inquiry_of(MOST_KEPT * 2 - 1), settled=True)
    assert len(source.asked) == MOST_KEPT * 2
    broker.ask(inquiry_of(0), settled=True)
    await reported.until(MOST_KEPT * 2 + 2, reported.answers)
    assert len(source.asked) == MOST_KEPT * 2 + 1
    await broker.close()


async def test_a_controller_that_does_not_read_is_not_read_either() -> None:
    """While answers pile up the broker reads no further line; it goes on when the controller reads answers again."""
    reported = Reports(stalled=asyncio.Event())
    broker = broker_of(reported, Scripted())
    for _ in range(MOST_AT_WORK):
        broker.ask(inquiry_of(), settled=True)
    room = asyncio.create_task(broker.room())
    await asyncio.wait({room}, timeout=0.01)
    assert not room.done()
    assert reported.stalled is not None
    reported.stalled.set()
    await asyncio.wait_for(room, SOON_S)
    await broker.close()
    assert len(reported.answers) == MOST_AT_WORK
