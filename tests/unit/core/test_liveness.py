"""Which nodes are dead: none is found dead too early or too late, and none because the listener itself receives
nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.liveness import Liveness

TIMEOUT_S, STARTUP_S, SUSPECT_S, STALL_S, FLEET_GRACE_S = 10.0, 30.0, 3.0, 5.0, 600.0


def listener(grace_until: float = 0.0) -> Liveness:
    return Liveness(
        timeout_s=TIMEOUT_S,
        startup_s=STARTUP_S,
        suspect_s=SUSPECT_S,
        stall_s=STALL_S,
        fleet_grace_s=FLEET_GRACE_S,
        grace_until=grace_until,
    )


def beating(*nodes: str, at: float = 0.0, grace_until: float = 0.0) -> Liveness:
    """Nodes that have registered and sent one heartbeat."""
    liveness = listener(grace_until)
    for node in nodes:
        liveness.watch(node, at)
        liveness.heard(node, at)
    return liveness


def test_silent_node_is_dead_after_the_timeout():
    """A node that sends no heartbeat for the timeout, while others do, is dead."""
    liveness = beating("a", "b")
    liveness.heard("b", 4.5)
    liveness.heard("b", 9.0)
    assert liveness.dead(9.9) == {}
    assert liveness.dead(10.0) == {"a": 10.0}


def test_first_sign_may_take_longer():
    """From its registration to its first heartbeat a node has the startup timeout."""
    liveness = beating("b")
    liveness.watch("a", 0.0)
    for now in range(1, 30):
        liveness.heard("b", now)
        assert liveness.dead(now) == {}
    assert liveness.dead(30.0) == {"a": 30.0}


def test_silence_of_the_whole_fleet_is_no_death():
    """If no node's heartbeats arrive, the fault lies with the listener; but not for ever."""
    liveness = beating("a", "b")
    assert liveness.dead(FLEET_GRACE_S - 1.0) == {}
    assert liveness.dead(FLEET_GRACE_S) == {"a": FLEET_GRACE_S, "b": FLEET_GRACE_S}


def test_first_to_be_late_is_not_dead_where_all_fell_silent_at_once():
    """Last heartbeats are up to an interval apart: the earliest one's timeout passes while others still have time
    left."""
    liveness = beating("a", "b")
    liveness.heard("b", 4.0)
    assert liveness.dead(10.0) == {}
    liveness.heard("b", 11.0)
    liveness.heard("a", 11.0)
    assert liveness.dead(20.0) == {}


def test_after_a_silence_of_all_no_live_node_is_dead():
    """When the store is back, the first heartbeat does not make the other nodes late; a node that stays silent is
    dead."""
    liveness = beating("a", "b", "c")
    assert liveness.dead(8.0) == {}
    liveness.heard("b", 9.0)
    assert liveness.dead(11.0) == {}
    liveness.heard("c", 13.0)
    assert liveness.dead(17.9) == {}
    assert liveness.dead(18.0) == {"a": 18.0}


def test_registration_that_is_read_late_makes_no_other_node_late():
    """A controller that was frozen reads the registration of a node first, and then the heartbeats of all."""
    liveness = beating("a", "b")
    liveness.heard("b", 4.0)
    liveness.watch("c", 20.0)
    assert liveness.dead(20.0) == {}
    liveness.heard("a", 24.0)
    liveness.heard("a", 28.0)
    assert liveness.dead(29.9) == {}
    assert liveness.dead(30.0) == {"b": 26.0}


def test_long_silence_of_all_earns_no_more_than_a_timeout():
    """However long the store was away, a dead node is found one timeout after its return."""
    liveness = beating("a", "b")
    liveness.heard("b", 300.0)
    for now in (303.0, 306.0, 309.0):
        assert liveness.dead(now) == {}
        liveness.heard("b", now)
    assert liveness.dead(310.0) == {"a": 310.0}


def test_new_controller_listens_for_one_full_timeout():
    """No node is dead before the startup guard has passed."""
    liveness = beating("a", "b", grace_until=50.0)
    for now in range(4, 50, 4):
        liveness.heard("b", now)
    assert liveness.dead(49.0) == {}
    assert liveness.dead(50.0) == {"a": 50.0}


def test_signs_of_strangers_and_of_the_dead_change_nothing():
    """A heartbeat that arrives after its node was declared dead does not bring the node back."""
    liveness = beating("a")
    liveness.drop("a")
    liveness.heard("a", 1.0)
    liveness.heard("stranger", 1.0)
    assert liveness.dead(1e9) == {}


def test_heartbeat_from_before_the_registration_is_not_of_this_agent():
    """A heartbeat of the earlier agent does not show that the new agent lives."""
    liveness = beating("b")
    liveness.watch("a", 5.0)
    liveness.heard("a", 4.0)
    for now in range(8, 35, 4):
        liveness.heard("b", now)
        assert liveness.dead(now) == {}
    assert liveness.dead(5.0 + STARTUP_S) == {"a": STARTUP_S}


def test_suspected_node_that_sends_heartbeats_is_not_reaped():
    """The connection closed and heartbeats arrive: the connection was broken on the way."""
    liveness = beating("a", "b")
    liveness.suspect("a", 1.0)
    liveness.heard("a", 2.0)
    for now in (5.0, 9.0):  # another node's heartbeats arrive, so the listener works
        liveness.heard("b", now)
    assert liveness.dead(9.0) == {}


def test_suspected_node_that_is_silent_is_reaped_early():
    """A closed connection and missing heartbeats are two signs."""
    liveness = beating("a", "b")
    liveness.suspect("a", 1.0)
    liveness.heard("b", 3.5)
    assert liveness.dead(3.9) == {}
    assert liveness.dead(4.0) == {"a": 4.0}


def test_node_with_a_heartbeat_since_its_connection_closed_is_not_suspected():
    """The controller may be frozen between the close and its conclusion."""
    liveness = beating("a", "b")
    liveness.heard("a", 4.0)
    liveness.suspect("a", 1.0)
    for now in (5.0, 9.0, 13.0):
        liveness.heard("b", now)
        assert liveness.dead(now) == {}
    assert liveness.dead(14.0) == {"a": 10.0}


KINDS = st.sampled_from(["watch", "heard", "late", "again", "drop", "suspect", "suspect late"])
EVENTS = st.lists(st.tuples(st.sampled_from("abc"), KINDS, st.floats(0, 30)), max_size=60)


class Model:
    """The rule without optimisations: every node's deadline is checked each time."""

    def __init__(self) -> None:
        self.registered, self.signs, self.suspected, self.newest, self.grace_until = {}, {}, {}, 0.0, 0.0

    def tell(self, what: str, node: str, now: float, at: float) -> None:
        if what == "drop":
            for known in (self.registered, self.signs, self.suspected):
                known.pop(node, None)
        elif what == "watch":
            self.tell("drop", node, now, at)
            if self.registered and now - self.newest > STALL_S:
                self.grace_until = max(self.grace_until, now + min(now - self.newest, TIMEOUT_S))
            self.registered[node], self.newest = now, max(self.newest, now)
        elif what == "suspect" and node in self.registered and at >= self.signs.get(node, 0.0):
            self.suspected[node] = at
        elif what == "heard" and at >= self.registered.get(node, now + 1.0) and at > self.signs.get(node, -1.0):
            if at - self.newest > STALL_S:
                self.grace_until = max(self.grace_until, at + min(at - self.newest, TIMEOUT_S))
            self.signs[node], self.newest = at, max(self.newest, at)
            if at > self.suspected.get(node, at):
                del self.suspected[node]

    def dead(self, now: float) -> set[str]:
        late = {node for node in self.registered if self._deadline(node) <= now}
        deaf = STALL_S < now - self.newest < FLEET_GRACE_S
        return set() if deaf or now < self.grace_until else late

    def _deadline(self, node: str) -> float:
        if node in self.suspected:
            return self.suspected[node] + SUSPECT_S
        return self.signs[node] + TIMEOUT_S if node in self.signs else self.registered[node] + STARTUP_S


@given(EVENTS)
def test_the_rule_holds_on_arbitrary_timings(events):
    """Late, repeated and out-of-order heartbeats, deaths, returns, closed connections: no node is found dead too
    early or forgotten."""
    liveness, model, now = listener(), Model(), 0.0
    for node, what, pause in events:
        now += pause
        at = {"again": model.signs.get(node, 0.0)}.get(what, max(0.0, now - 2.0) if "late" in what else now)
        kind = {"late": "heard", "again": "heard", "suspect late": "suspect"}.get(what, what)
        model.tell(kind, node, now, at)
        if kind == "heard":
            liveness.heard(node, at)
        elif kind == "drop":
            liveness.drop(node)
        else:
            getattr(liveness, kind)(node, at)
        expected = model.dead(now)
        assert set(liveness.dead(now)) == expected
        for name in expected:
            model.tell("drop", name, now, now)


def test_time_in_which_the_whole_job_stood_still_is_no_silence():
    """Nodes are resumed seconds apart, and a suspension longer than any bound costs no node its ranks."""
    liveness = beating("a", "b")
    liveness.stood_still(5000.0, 5001.0)
    for now in (5004.0, 5008.0, 5010.5):
        liveness.heard("b", now)
        assert liveness.dead(now) == {}
    assert liveness.dead(5011.0) == {"a": 11.0}


# when heartbeats of others arrive, while a is silent from 0 on → when a is dead
SILENCES = [
    ("a gap of the stall's length is none", {"b": (2.0, 7.0, 9.0)}, 10.0),
    ("a longer one counts for no node", {"b": (4.0, 10.0, 14.0)}, 16.0),
    ("by no more than a timeout", {"b": (4.0, 50.0, 54.0, 58.0)}, 60.0),
]


@pytest.mark.parametrize(("heard", "dead_at"), [each[1:] for each in SILENCES], ids=[each[0] for each in SILENCES])
def test_gaps_without_any_heartbeat(heard: dict[str, tuple[float, ...]], dead_at: float) -> None:
    liveness = beating("a", "b")
    for node, times in heard.items():
        for at in times:
            liveness.heard(node, at)
    assert liveness.dead(dead_at - 0.1) == {}
    assert liveness.dead(dead_at) == {"a": dead_at}


def test_a_stall_is_half_a_timeout_at_most() -> None:
    """Otherwise a listener that receives nothing would find all nodes dead before it knew of its fault."""
    liveness = Liveness(
        timeout_s=TIMEOUT_S,
        startup_s=STARTUP_S,
        suspect_s=SUSPECT_S,
        stall_s=2 * TIMEOUT_S,
        fleet_grace_s=FLEET_GRACE_S,
        grace_until=0.0,
    )
    for node in ("a", "b"):
        liveness.watch(node, 0.0)
        liveness.heard(node, 0.0)
    assert liveness.dead(TIMEOUT_S) == {}


def test_a_dead_node_is_named_once() -> None:
    liveness = beating("a", "b")
    for now in (4.0, 8.0):
        liveness.heard("b", now)
    assert liveness.dead(10.0) == {"a": 10.0}
    for now in (12.0, 16.0, 20.0):
        liveness.heard("b", now)
        assert liveness.dead(now) == {}


def test_a_node_that_registers_again_has_the_startup_timeout() -> None:
    """The silence of the former agent does not count for the new one."""
    liveness = beating("a", "b")
    liveness.watch("a", 8.0)
    for now in range(4, 38, 2):
        liveness.heard("b", float(now))
        assert liveness.dead(float(now)) == {}
    assert liveness.dead(8.0 + STARTUP_S) == {"a": STARTUP_S}


def test_a_node_may_be_suspected_before_its_first_sign() -> None:
    liveness = beating("b")
    liveness.watch("a", 0.0)
    liveness.suspect("a", 1.0)
    liveness.heard("b", 3.0)
    assert liveness.dead(3.9) == {}
    assert liveness.dead(4.0) == {"a": 4.0}
