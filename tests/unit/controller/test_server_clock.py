"""The journal's clock: the clock of the store, without its jumps."""

from __future__ import annotations

import pytest

from nvrx_slurm.controller.controller import ServerClock


class Hand:
    """A monotonic clock that the test moves."""

    def __init__(self):
        self.at = 100.0

    def monotonic(self):
        return self.at

    def wall(self):
        raise AssertionError("the journal's clock is the store's, not this host's")

    def sleep(self, seconds):
        raise AssertionError("nothing sleeps here")


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def clock(hand):
    clock = ServerClock(hand)
    clock.set(5000.0)
    return clock


def test_time_goes_on_between_answers(clock, hand):
    """After the store's last answer, the controller's own monotonic clock counts."""
    hand.at += 7.0
    assert clock.now() == 5007.0
    assert clock.until(5010.0) == 3.0


def test_small_corrections_are_followed(clock, hand):
    """If the store's clock is slewed, the journal's clock follows it, however far in total."""
    for _ in range(20):
        hand.at += 10.0
        clock.set(clock.now() + 0.5)
    assert clock.now() == pytest.approx(5000.0 + 20 * 10.5)


def test_time_never_runs_backwards(clock):
    """After a correction downwards time stands still until the difference is made up."""
    assert clock.now() == 5000.0
    clock.set(4999.5)
    assert clock.now() == 5000.0


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 2.0, -2.0])
def test_jumps_are_not_followed_and_logged_once(clock, hand, caplog, jump_s):
    """If the store's clock is set, a deadline still comes when it would have come, and so do later ones."""
    for _ in range(3):
        hand.at += 10.0
        clock.set(5000.0 + (hand.at - 100.0) + jump_s)
    assert clock.now() == 5030.0
    assert clock.until(5040.0) == 10.0
    assert len(caplog.records) == 1


@pytest.mark.parametrize("took_s", [8.0, 0.75])
def test_answer_that_is_old_when_it_arrives_sets_no_clock(clock, hand, caplog, took_s):
    """The controller was frozen meanwhile, for long or for less than a correction of the clock may be: a fact from
    that time counts from its arrival, and a decision that is made now is dated now."""
    hand.at += took_s
    clock.set(5000.0, took_s=took_s)
    assert clock.stamp(5000.5, since=100.0) == 5000.5
    assert clock.now() == 5000.0 + took_s
    assert not caplog.records


def test_clock_that_is_set_back_while_an_answer_takes_long_is_noticed(clock, hand):
    """The clock is set back by more than the answer took."""
    hand.at += 8.0
    clock.set(4900.0, took_s=8.0)
    assert clock.now() == 5008.0
    assert clock.stamp(4901.0) == 5008.0


def test_moments_of_the_store_are_known_after_a_jump(clock, hand):
    """A time that the store stamped after its jump is dated as if there had been no jump."""
    hand.at += 10.0
    clock.set(8610.0)
    assert clock.stamp(8608.0) == 5008.0


def test_moment_is_no_earlier_than_the_look_that_did_not_find_it(clock, hand):
    """The store's clock was set back, its ids stand still, and the controller does not know it yet: what has arrived
    since its last look is not dated before that look."""
    hand.at += 60.0
    assert clock.stamp(5000.0, since=hand.at - 2.0) == 5058.0
    assert clock.stamp(5059.0, since=hand.at - 2.0) == 5059.0


def test_next_controller_on_this_host_goes_on_by_its_clock(hand):
    """The store's clock was set forward between two controllers: for the second one only the real time has passed."""
    clock = ServerClock(hand)
    clock.set(9000.0)
    clock.go_on(5000.0, clock_s=hand.at - 3.0)
    clock.start_after(5001.0)
    assert clock.now() == 5003.0
    clock.set(9000.0)
    assert clock.now() == 5003.0


def test_new_controller_goes_on_where_the_journal_ends(hand):
    """If the store's clock was set back before a controller began, time goes on from the journal's last entry, and
    does not stand still for an hour."""
    clock = ServerClock(hand)
    clock.set(5000.0)
    clock.start_after(8600.0)
    hand.at += 10.0
    clock.set(5010.0)
    assert clock.now() == 8610.0
    assert clock.until(8620.0) == 10.0
