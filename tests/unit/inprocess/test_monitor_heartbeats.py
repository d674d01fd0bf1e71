"""Which member's heartbeats a monitor watches, and when it may declare that member dead; at given times."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.ledger import GroupLedger, Lost, fold
from nvrx_slurm.inprocess.monitor_heartbeats import SHARE, Ring

TIMEOUT_S, INTERVAL_S = 8.0, 1.0
FOUR = GroupLedger(4)


def without(*members: int) -> GroupLedger:
    gone = (Lost(iteration=0, member=member, interruption=Interruption.TERMINATED) for member in members)
    return fold(FOUR, gone)


def ring(member: int = 0) -> Ring:
    return Ring(member=member, timeout_s=TIMEOUT_S, interval_s=INTERVAL_S)


def watching(member: int, beats: int, *moments: float) -> Ring:
    """A view after answers with this number of heartbeats, at each of these times."""
    view = ring()
    for moment in moments:
        view = view.answered(member, beats, moment)
    return view


def each_second(until_s: int) -> list[float]:
    return [float(second) for second in range(until_s + 1)]


def test_silence_is_judged_after_the_whole_timeout():
    """It is silent no earlier, counted from the first answer that had the last heartbeat."""
    view = watching(1, 5, *each_second(8))
    assert view.silent(7.9) == ()
    assert view.silent(8.0) == (1,)


def test_heartbeat_starts_the_time_again():
    """One more heartbeat restarts the timeout."""
    view = watching(1, 5, *each_second(7)).answered(1, 6, 7.5).answered(1, 6, 8.5)
    assert view.silent(15.0) == ()
    assert view.silent(15.5) == (1,)


@pytest.mark.parametrize("beats", [0, 3])
def test_fewer_heartbeats_are_a_change(beats):
    """If a store lost some or all heartbeats, this does not show that a member is silent."""
    assert watching(1, 5, *each_second(7)).answered(1, beats, 7.5).silent(8.0) == ()


def test_outage_restarts_the_timeout():
    """While the store did not answer, the sibling could not send heartbeats either."""
    view = watching(1, 5, *each_second(7)).out_of_touch().answered(1, 5, 7.5)
    assert view.silent(8.5) == ()
    assert view.answered(1, 5, 8.5).silent(15.4) == ()


def test_late_answer_is_an_outage():
    """Whether the store or this monitor hung, nothing is known about the time between."""
    late = 7.0 + INTERVAL_S + TIMEOUT_S / 4
    assert watching(1, 5, *each_second(7), late + 0.1).silent(late + 0.1) == ()
    assert watching(1, 5, *each_second(7), late).silent(late) == (1,)


def test_only_the_nearest_is_read_once_it_has_sent_a_heartbeat():
    """In the steady state a heartbeat is one operation."""
    assert ring().asked(FOUR) == (1,)
    assert watching(1, 1, 0.0).asked(FOUR) == (1,)
    assert ring(3).asked(FOUR) == (0,)


def test_a_member_without_a_heartbeat_is_skipped():
    """A member without a heartbeat is never judged; the next one with one is watched instead, and the first is read
    now and then."""
    view = ring().answered(1, 0, 0.0)
    assert view.asked(FOUR) == (2,)
    view = view.answered(2, 0, 1.0)
    assert view.asked(FOUR) == (3,)
    view = view.answered(3, 1, 2.0)
    assert view.asked(FOUR) == (3, 1)
    view = view.answered(3, 2, 3.0).answered(1, 0, 3.0)
    assert view.asked(FOUR) == (3, 2)
    view = view.answered(3, 3, 4.0).answered(2, 0, 4.0)
    assert view.asked(FOUR) == (3, 1)
    view = view.answered(3, 4, 5.0).answered(1, 1, 5.0)
    assert view.asked(FOUR) == (1,)


def test_no_member_has_sent_a_heartbeat():
    """All are read in turn, and none is judged."""
    view, asked = ring(), []
    for second in each_second(20):
        [member] = view.asked(FOUR)
        asked.append(member)
        view = view.answered(member, 0, second)
        assert view.silent(second) == ()
    assert asked[:7] == [1, 2, 3, 1, 2, 3, 1]


def test_lost_member_is_followed_by_the_next():
    """A lost member is no longer watched."""
    view = watching(1, 5, 0.0)
    assert view.asked(without(1)) == (2,)
    assert view.answered(2, 9, 1.0).asked(without(1)) == (2,)


def test_last_one_watches_no_member():
    """It watches no member; its own heartbeats continue."""
    view = watching(1, 5, 0.0)
    assert view.asked(without(1, 2, 3)) == (None,)
    assert ring().answered(None, 0, 1.0).asked(GroupLedger(1)) == (None,)


def test_news_of_the_sibling():
    """Only an answer with a further heartbeat counts; one that repeats the last one does not."""
    view = watching(1, 5, 0.0)
    assert not view.answered(1, 5, 1.0).beats_since(0.9)
    assert view.answered(1, 6, 1.0).beats_since(0.9)
    assert not ring().beats_since(0.0)


EIGHT = GroupLedger(8)


def passing(view: Ring, ledger: GroupLedger, alive: dict[int, int], moments: list[float]) -> Ring:
    """At each of these times the members in `alive` have sent one more heartbeat, and the others have not."""
    for moment in moments:
        view = view.follow(ledger)
        for member in view.asked(ledger):
            if member in alive:
                alive[member] += 1
            view = view.answered(member, 0 if member is None else alive.get(member, 5), moment)
    return view


def test_those_behind_a_silent_sibling_are_watched_too():
    """Six members of a lost host are watched at the same time; the next member, which sends heartbeats, ends the
    watch."""
    view = passing(ring(), EIGHT, {7: 1}, each_second(18))
    assert view.silent(8.0) == (1,)
    assert view.silent(18.0) == (1, 2, 3, 4, 5, 6)


def test_a_heartbeat_of_the_sibling_ends_the_watch_behind_it():
    """The sibling then watches them itself."""
    view = passing(ring(), EIGHT, {}, each_second(6))
    assert len(view.asked(EIGHT)) > 1
    assert view.answered(1, 6, 7.0).follow(EIGHT).asked(EIGHT) == (1,)


def test_the_next_one_is_watched_on_when_the_first_is_lost():
    """Its timeout does not start again."""
    view = passing(ring(), EIGHT, {}, each_second(8))
    since = {each.member: each.since for each in view.beyond}
    gone = fold(EIGHT, [Lost(iteration=0, member=1, interruption=Interruption.UNRESPONSIVE)])
    followed = view.follow(gone)
    assert followed.sibling is not None
    assert (followed.sibling.member, followed.sibling.since) == (2, since[2])


def test_a_new_watcher_of_a_lost_host_watches_its_members_together():
    """The monitor that recorded the first of them has ended: its successor need not wait for each of the others in
    turn. A member that sends heartbeats ends the watch at once."""
    gone = fold(EIGHT, [Lost(iteration=0, member=1, interruption=Interruption.UNRESPONSIVE)])
    view = passing(ring(), gone, {6: 1}, each_second(12))
    assert view.silent(12.0) == (2, 3, 4, 5)
    assert passing(ring(), gone, {2: 1}, each_second(3)).follow(gone).asked(gone) == (2,)


def test_a_member_without_a_heartbeat_behind_a_silent_sibling_is_not_judged():
    """No monitor judges it, at any position in the ring."""
    view = ring().answered(1, 5, 0.0)
    for moment in each_second(30):
        view = view.follow(FOUR)
        for member in view.asked(FOUR):
            view = view.answered(member, 0 if member == 2 else 5, moment)
    assert view.silent(100.0) == (1, 3)


# ---- any delay and loss of the store and the network


@dataclass(frozen=True)
class Try:
    """One exchange with the store: the time since the one before, the delays to the server and back, and whether it
    is answered."""

    gap_s: float
    there_s: float
    back_s: float
    answered: bool


def tries(at_least: int, at_most: int) -> st.SearchStrategy[list[Try]]:
    """Nine of ten are as usual, one each second; the others are late, hang, or are not answered."""
    fine = st.just(Try(1.0, 0.0, 0.0, True))
    delays = st.floats(0.0, TIMEOUT_S)
    any_other = st.builds(Try, st.floats(0.0, TIMEOUT_S / 4), delays, delays, st.booleans())
    return st.lists(st.one_of(*[fine] * 9, any_other), min_size=at_least, max_size=at_most)


def lived(beats: list[Try]) -> tuple[float, list[float]]:
    """A member that sends its first heartbeat at 0: when its lease ends, and when the store has each of its
    heartbeats."""
    now, ends_at, had = 0.0, SHARE * TIMEOUT_S, [0.0]
    for beat in beats:
        now += beat.gap_s
        if now >= ends_at:
            break
        had.append(now + beat.there_s)
        answered_at = now + beat.there_s + beat.back_s
        if beat.answered and answered_at < ends_at:
            ends_at = max(ends_at, now + SHARE * TIMEOUT_S)
        now = min(answered_at, ends_at)
    return ends_at, had


@given(beats=tries(0, 5), asks=tries(12, 24))
def test_no_living_member_is_judged(beats: list[Try], asks: list[Try]):
    """With any delays and losses, of both members' heartbeats: if it is declared dead, its lease has ended."""
    ends_at, had = lived(beats)
    view, now = ring(), 0.0
    for ask in asks:
        now += ask.gap_s
        asked_at, served_at = now, now + ask.there_s
        now = served_at + ask.back_s
        if not ask.answered:
            view = view.out_of_touch()
            continue
        view = view.answered(1, sum(moment <= served_at for moment in had), now)
        assert view.silent(asked_at) == () or asked_at >= ends_at
