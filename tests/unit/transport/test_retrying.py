"""When a read is tried again, at which port, and when it fails: a plan that gets outcomes, with a clock of
numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.transport.retrying import (
    BUSY_PAUSE_S,
    LONGEST_BUSY_PAUSE_S,
    LONGEST_PAUSE_S,
    AttemptOutcome,
    EndRead,
    Limits,
    Pause,
    PortHealth,
    ReadPlan,
    Try,
    pause_s,
)

STALE, BUSY, MOVED, FAULT = AttemptOutcome.STALE, AttemptOutcome.BUSY, AttemptOutcome.MOVED, AttemptOutcome.FAULT
LIMITS = Limits(answer_s=2.0, bytes_per_s=1e6, calls=3, rounds=3, pause_s=0.05)
A, B, C = "tcp://n1:1", "tcp://n1:2", "ucxx://n1:3"
SECOND_S = 1.0


class Read:
    """One read in virtual time: which attempts it makes at what time, and how it ends."""

    def __init__(
        self,
        outcomes: Iterable[AttemptOutcome],
        *,
        ports: tuple[str, ...] = (A, B),
        size: int = 0,
        deadline: float = 100.0,
        limits: Limits = LIMITS,
        takes_s: float = 0.0,
        health: Mapping[str, PortHealth] | None = None,
    ) -> None:
        self.now = 0.0
        self.tried: list[tuple[float, Try]] = []
        self.pauses: list[float] = []
        plan = ReadPlan([list(ports)], size, deadline, limits)
        self.end = self._run(plan, iter(outcomes), health or {}, takes_s)

    def _run(
        self, plan: ReadPlan, outcomes: Iterator[AttemptOutcome], health: Mapping[str, PortHealth], takes_s: float
    ) -> EndRead | None:
        for turn in count():
            step = plan.next(health, now=self.now, turn=turn)
            if isinstance(step, EndRead):
                return step
            if isinstance(step, Pause):
                assert step.until > self.now, "a pause of no time"
                self.pauses.append(step.until - self.now)
                self.now = step.until
                continue
            assert step.until > self.now, "an attempt of no time"
            self.tried.append((self.now, step))
            if (outcome := next(outcomes, None)) is None:
                return None
            self.now = min(self.now + takes_s, step.until)
            plan.ended(step.port, outcome, now=self.now)
        raise AssertionError

    @property
    def ports(self) -> list[str]:
        return [step.port for _, step in self.tried]


def always(outcome: AttemptOutcome) -> Iterator[AttemptOutcome]:
    while True:
        yield outcome


@pytest.mark.parametrize(
    ("outcomes", "reason", "attempts"),
    [
        pytest.param([STALE], STALE, 1, id="a stale ref leaves all layers at once"),
        pytest.param([FAULT, STALE], STALE, 2, id="also at the second port"),
        pytest.param([FAULT, FAULT, STALE], STALE, 3, id="also in the second call"),
        pytest.param([BUSY, STALE], STALE, 2, id="also after a busy slot"),
        pytest.param([MOVED, STALE], STALE, 2, id="also after a port that another server has by now"),
        pytest.param([FAULT] * 6, FAULT, 6, id="each port once in each of three calls"),
        pytest.param([FAULT, MOVED] * 3, FAULT, 6, id="a sick port may still have it, though others have moved"),
        pytest.param([MOVED, MOVED], STALE, 2, id="another server has every port by now: the ring is gone"),
        pytest.param([FAULT, FAULT, MOVED, MOVED], STALE, 4, id="it has gone meanwhile"),
        pytest.param([BUSY, FAULT, FAULT, *[FAULT] * 4], FAULT, 7, id="busy counts as no call"),
    ],
)
def test_how_a_read_ends(outcomes: list[AttemptOutcome], reason: AttemptOutcome, attempts: int) -> None:
    """It ends with this reason after this many attempts."""
    read = Read(outcomes)
    assert read.end == EndRead(reason)
    assert len(read.tried) == attempts


def test_a_port_that_moved_before_a_busy_one_is_not_counted_twice() -> None:
    """A sick port may still have the payload: the ref is stale only when every port has reported that the ring is
    gone."""
    read = Read([MOVED, BUSY, FAULT, MOVED], ports=(A, B), limits=replace(LIMITS, calls=1))
    assert read.end == EndRead(FAULT)


def test_a_call_asks_each_port_once() -> None:
    """Within the layer `call`, a fault leads to the next port, until each was asked."""
    read = Read([FAULT] * 9, ports=(A, B, C))
    assert [Counter(read.ports[start : start + 3]) for start in (0, 3, 6)] == [Counter([A, B, C])] * 3


def test_fresh_calls_come_after_growing_pauses() -> None:
    """In the layer `slot`, the pause is 0.05 s before the second call, and twice that before the third."""
    assert Read([FAULT] * 6).pauses == [pytest.approx(0.05), pytest.approx(0.1)]


@pytest.mark.parametrize(("failed", "expected_s"), [(1, 0.05), (2, 0.1), (5, 0.8), (6, 1.0), (100, LONGEST_PAUSE_S)])
def test_the_pause_before_a_call_or_a_round(failed: int, expected_s: float) -> None:
    """It doubles, up to a second."""
    assert pause_s(LIMITS, failed) == pytest.approx(expected_s)


def test_a_busy_slot_is_asked_for_until_the_deadline() -> None:
    """Another reader has the slot: this is no fault, the pauses grow, and only the deadline ends the read."""
    read = Read(always(BUSY), deadline=5.0)
    assert read.end == EndRead(None)
    assert read.now == pytest.approx(5.0)
    assert read.pauses[0] == pytest.approx(BUSY_PAUSE_S)
    assert max(read.pauses) == pytest.approx(LONGEST_BUSY_PAUSE_S)
    assert len(read.tried) < 5.0 / LONGEST_BUSY_PAUSE_S + 10


def test_an_attempt_is_bounded_and_has_twice_as_long_in_the_next_call() -> None:
    """A silent port is given up early; a slow server or network gets more time in the next call."""
    read = Read([FAULT] * 6, size=3_000_000)
    assert [step.until - at for at, step in read.tried] == pytest.approx([5.0, 5.0, 10.0, 10.0, 20.0, 20.0])
    small = Read([FAULT] * 3, size=100, ports=(A,))
    assert [step.answer_by - at for at, step in small.tried] == pytest.approx([2.0, 4.0, 8.0])


def test_a_read_may_be_tried_for_hours() -> None:
    """The time of an attempt does not double without a bound."""
    read = Read(always(FAULT), deadline=7200.0, limits=replace(LIMITS, calls=1_000_000))
    assert read.end == EndRead(None)
    assert len(read.tried) > 7200


def test_silent_ports_use_the_deadline_up_and_no_more() -> None:
    """If every attempt takes all its time, the read ends at its deadline."""
    read = Read(always(FAULT), deadline=3.0, takes_s=60.0)
    assert read.end == EndRead(None)
    assert read.now == pytest.approx(3.0)


def test_a_read_whose_time_is_over_asks_no_port() -> None:
    """If its deadline is now, no attempt is made."""
    read = Read([], deadline=0.0)
    assert read.end == EndRead(None) and not read.tried


def test_without_a_port_it_is_over_at_once() -> None:
    """Without a port there is no attempt and no wait."""
    read = Read([], ports=())
    assert read.end == EndRead(FAULT) and not read.pauses


def test_sick_ports_are_asked_where_none_is_healthy() -> None:
    """If all are in quarantine, each call asks the least sick one."""
    sick = {A: PortHealth(3, 1e6), B: PortHealth(1, 1e6)}
    assert Read([FAULT] * 3, health=sick).ports == [B] * 3


@given(
    outcomes=st.lists(st.sampled_from(AttemptOutcome), max_size=200),
    last=st.sampled_from(AttemptOutcome),
    ports=st.sampled_from([(A,), (A, B), (A, B, C)]),
    calls=st.integers(1, 4),
    takes_s=st.sampled_from([0.0, 0.001, 0.3, 7.0]),
    deadline=st.floats(0.001, 20.0),
    size=st.integers(0, 1 << 40),
)
def test_every_read_ends(
    outcomes: list[AttemptOutcome],
    last: AttemptOutcome,
    ports: tuple[str, ...],
    calls: int,
    takes_s: float,
    deadline: float,
    size: int,
) -> None:
    """For any outcomes, even if attempts take no time, it ends by its deadline and makes no more attempts than the
    layers allow."""

    def told() -> Iterator[AttemptOutcome]:
        yield from outcomes
        yield from always(last)

    seen: list[AttemptOutcome] = []

    def remembered() -> Iterator[AttemptOutcome]:
        for outcome in told():
            seen.append(outcome)
            yield outcome

    limits = replace(LIMITS, calls=calls)
    read = Read(remembered(), ports=ports, size=size, limits=limits, takes_s=takes_s, deadline=deadline)
    assert read.end is not None
    assert read.now <= deadline + 1e-9
    assert all(step.until <= deadline for _, step in read.tried)
    busy = seen.count(BUSY)
    assert len(read.tried) <= (busy + calls) * len(ports) + busy
    assert busy <= deadline / LONGEST_BUSY_PAUSE_S + 10
    if read.end.reason is STALE:
        assert seen[-1] is STALE or all(outcome is MOVED for outcome in seen[-len(ports) :])
    elif read.end.reason is None:
        assert read.now >= deadline - 1e-9
    else:
        assert seen.count(FAULT) >= calls
