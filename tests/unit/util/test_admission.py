"""Unproven connections are bounded, and so are the log lines about them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.util.admission import Admission, RateLimitedLog


def test_oldest_unproven_connection_makes_room():
    """A flood of silent connections displaces its own oldest connections."""
    admission: Admission[int] = Admission(most=3)
    assert [admission.admit(each, float(each)) for each in range(5)] == [None, None, None, 0, 1]
    assert len(admission) == 3


def test_proven_and_closed_connections_are_not_counted():
    """Only connections that have not proven themselves count towards the bound."""
    admission: Admission[int] = Admission(most=2)
    for each in range(100):
        assert admission.admit(each, 0.0) is None
        (admission.proven if each % 2 else admission.gone)(each)
    assert len(admission) == 0


def test_flood_from_one_address_does_not_push_out_other_hosts():
    """The address with the most unproven connections loses its oldest one."""
    admission: Admission[str] = Admission(most=4)
    admission.admit("honest", 0.0, "10.0.0.1")
    for each in range(50):
        assert admission.admit(f"bob {each}", 1.0, "10.0.0.66") != "honest"


def test_connection_has_its_turn_before_it_is_dropped():
    """When all places are taken the server waits until the next connection to drop has had time for a round trip."""
    admission: Admission[int] = Admission(most=2, turn_s=0.5)
    admission.admit(0, 10.0)
    assert admission.wait_s(10.0) == 0.0
    admission.admit(1, 10.25)
    assert admission.wait_s(10.25) == 0.25
    assert admission.wait_s(10.5) == 0.0
    admission.proven(0)
    assert admission.wait_s(10.25) == 0.0


def test_descriptors_that_run_out_cost_a_connection_that_had_its_turn():
    """One unproven connection is dropped for each new one, after it has had its turn."""
    admission: Admission[int] = Admission(turn_s=0.5)
    assert admission.shed(0.0) is None
    admission.admit(0, 0.0)
    admission.admit(1, 0.25)
    assert admission.shed(0.25) is None
    assert admission.shed(0.5) == 0
    assert admission.shed(0.5) is None
    assert len(admission) == 1


def test_proof_that_takes_too_long_is_overdue():
    """Each overdue connection is returned once, and no other."""
    admission: Admission[int] = Admission(within_s=2.0)
    assert admission.overdue_in_s(0.0) is None
    admission.admit(0, 0.0)
    admission.admit(1, 1.0)
    assert admission.overdue_in_s(0.5) == 1.5
    assert admission.overdue(2.0) == [0]
    assert admission.overdue(2.0) == []
    assert len(admission) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "proven", "gone"]), st.integers(0, 40), st.sampled_from(["a", "b", "c"]))
    )
)
def test_bound_always_holds(acts):
    """In any order of connections, proofs and ends, at most as many as the bound are open and unproven."""
    admission: Admission[int] = Admission(most=5)
    unproven: set[int] = set()
    for now, (act, who, source) in enumerate(acts):
        if act == "admit" and who not in unproven:
            dropped = admission.admit(who, float(now), source)
            assert dropped is None or dropped in unproven
            unproven = (unproven - {dropped}) | {who}
        elif act != "admit":
            getattr(admission, act)(who)
            unproven.discard(who)
        assert len(unproven) == len(admission) <= 5


def test_log_says_one_line_a_minute_and_a_count():
    """The first line is logged at once; those of the next minute are counted in the line after it."""
    lines: list[str] = []
    log = RateLimitedLog(lines.append)
    for second in range(120):
        log.say("refused", float(second))
    assert lines == ["refused", "refused (and 59 more like it in the last 60 s)"]
