"""The circuit of one source, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.sources.guard import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, CircuitBreaker, pause_s

NOW = 100.0
OPEN = CircuitBreaker(failures=3, pauses=1, retry_at=NOW + 5.0)
HALF_OPEN = CircuitBreaker(failures=3, pauses=1, retry_at=NOW)
TRYING = CircuitBreaker(failures=3, pauses=1, retry_at=NOW, trying=True)
CLOSED = CircuitBreaker()
SHAKEN = CircuitBreaker(failures=2)


def fail(breaker: CircuitBreaker) -> CircuitBreaker:
    return breaker.failed(NOW, chance=0.0)


TRANSITIONS = [
    ("one failure changes little", CLOSED, fail, CircuitBreaker(failures=1)),
    ("the third in a row opens it", SHAKEN, fail, OPEN),
    ("an answer between them resets the count", SHAKEN, CircuitBreaker.succeeded, CLOSED),
    ("being asked means nothing while it is closed", SHAKEN, CircuitBreaker.asked, SHAKEN),
    ("an ask called off means nothing", SHAKEN, CircuitBreaker.given_up, SHAKEN),
    ("a late failure of an ask of before does not prolong the pause", OPEN, fail, OPEN),
    ("a late answer of an ask of before closes it: it works", OPEN, CircuitBreaker.succeeded, CLOSED),
    ("half-open, the first ask is the one try", HALF_OPEN, CircuitBreaker.asked, TRYING),
    ("the try fails: a pause twice as long", TRYING, fail, CircuitBreaker(failures=4, pauses=2, retry_at=NOW + 10.0)),
    ("the try succeeds", TRYING, CircuitBreaker.succeeded, CLOSED),
    ("the try is called off: another may be made", TRYING, CircuitBreaker.given_up, HALF_OPEN),
]


@pytest.mark.parametrize(
    ("before", "event", "after"), [row[1:] for row in TRANSITIONS], ids=[row[0] for row in TRANSITIONS]
)
def test_transitions(before, event, after) -> None:
    """Each event leads to the state that the diagram shows."""
    assert event(before) == after


@pytest.mark.parametrize(
    ("breaker", "admits"), [(CLOSED, True), (SHAKEN, True), (OPEN, False), (HALF_OPEN, True), (TRYING, False)]
)
def test_who_is_admitted(breaker: CircuitBreaker, admits: bool) -> None:
    """An open circuit admits no ask, a half-open one a single try."""
    assert (breaker.pause_left(NOW) == 0.0) is admits


@given(pauses=st.integers(0, 10_000), chance=st.floats(0.0, 1.0))
def test_pauses_grow_within_their_bounds(pauses: int, chance: float) -> None:
    """A pause is between 5 s and 5 min, and the next one at least as long on average."""
    assert FIRST_PAUSE_S <= pause_s(pauses, chance) <= LONGEST_PAUSE_S
    assert pause_s(pauses + 1, chance) >= pause_s(pauses, chance)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["fail", "succeed", "give up", "ask"]), st.floats(0.0, 400.0)), max_size=60
)


@given(EVENTS)
def test_after_any_events_it_is_tried_again_within_the_longest_pause(events: list[tuple[str, float]]) -> None:
    """No order of events leaves a circuit open for good, and none opens before three failures in a row."""
    breaker, now, row = CircuitBreaker(), 0.0, 0
    for event, passed in events:
        now += passed
        if event == "ask" and breaker.pause_left(now) == 0.0:
            breaker = breaker.asked()
        elif event == "fail":
            breaker, row = breaker.failed(now, chance=0.5), row + 1
        elif event == "succeed":
            breaker, row = breaker.succeeded(), 0
        elif event == "give up":
            breaker = breaker.given_up()
        assert breaker.retry_at is None or row >= FAILURES
        assert breaker.given_up().pause_left(now + LONGEST_PAUSE_S) == 0.0
