"""Who is silent: never too early, never for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.liveness import Liveness


def test_silent_node_is_named_after_the_timeout():
    """A node that is not heard for the timeout, while others are, is silent."""
    liveness = Liveness(timeout_s=10.0, grace_until=0.0)
    liveness.watch("a", 0.0)
    liveness.watch("b", 0.0)
    liveness.heard("b", 9.0)
    assert liveness.silent(9.9) == []
    assert liveness.silent(10.0) == ["a"]


def test_silence_of_the_whole_fleet_is_nobodys_death():
    """When nobody is heard the fault lies with who listens."""
    liveness = Liveness(timeout_s=10.0, grace_until=0.0)
    for node in ("a", "b"):
        liveness.watch(node, 0.0)
    assert liveness.silent(1000.0) == []


def test_new_controller_waits_one_full_timeout():
    """Before the startup guard has passed nobody is silent."""
    liveness = Liveness(timeout_s=10.0, grace_until=50.0)
    liveness.watch("a", 0.0)
    liveness.watch("b", 45.0)
    assert liveness.silent(49.0) == []
    assert liveness.silent(50.0) == ["a"]


def test_beats_of_strangers_and_of_the_dead_change_nothing():
    """A beat that comes after the reap does not raise the dead."""
    liveness = Liveness(timeout_s=10.0, grace_until=0.0)
    liveness.watch("a", 0.0)
    liveness.drop("a")
    liveness.heard("a", 1.0)
    liveness.heard("stranger", 1.0)
    assert liveness.next_deadline() is None


EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["watch", "heard", "drop"]), st.floats(0, 5)))


@given(EVENTS, st.floats(0, 100))
def test_whoever_was_heard_within_the_timeout_is_never_silent(events, wait):
    """On arbitrary timings: only the watched are named, and only after a full timeout without a sign."""
    liveness, now, last = Liveness(timeout_s=10.0, grace_until=0.0), 0.0, {}
    for node, what, pause in events:
        now += pause
        if what == "drop":
            liveness.drop(node)
            last.pop(node, None)
        elif what == "watch" or node in last:
            getattr(liveness, what)(node, now)
            last[node] = now
    now += wait
    for node in liveness.silent(now):
        assert now - last[node] >= 10.0
    if any(now - at < 10.0 for at in last.values()):
        assert set(liveness.silent(now)) == {node for node, at in last.items() if now - at >= 10.0}
