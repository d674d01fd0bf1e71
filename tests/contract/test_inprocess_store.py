"""What the ranks of a group may rely on, whichever store they share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection
from nvrx_slurm.util.threads import in_thread
from tests.contract.inprocess_stores import DEADLINE_S, KINDS, Shared

LONG_S = 600.0
MEMBERS = 8


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.torch if kind == "tcp" else ()) for kind in KINDS])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    """Each kind of store, with its server."""
    with KINDS[request.param](tmp_path) as store:
        shared = Shared(store)
        yield shared
        shared.close()


@pytest.fixture
def connection(shared: Shared) -> Connection:
    return shared.connect()


def test_a_place_of_the_log_is_taken_once(shared: Shared, connection: Connection) -> None:
    """Of two entries for one place the first one is in the log; the second one's writer is told."""
    other = shared.connect()
    assert connection.append(b"one", 0)
    assert not other.append(b"two", 0)
    assert other.append(b"two", 1)
    assert not connection.append(b"three", 0)
    assert connection.read(0, 0.0) == other.read(0, 0.0) == [b"one", b"two"]


def test_an_entry_that_is_appended_again_is_the_same_one(connection: Connection) -> None:
    """Its answer was lost: it is in the log once, and its writer has won, also when others came after it."""
    assert connection.append(b"one", 0)
    assert connection.append(b"one", 0)
    assert connection.append(b"two", 1)
    assert connection.append(b"one", 0)
    assert connection.read(0, 0.0) == [b"one", b"two"]


def test_an_entry_beyond_the_end_tells_of_a_log_that_was_lost(shared: Shared) -> None:
    """Nobody writes after what is not there: not into an empty log, nor into one that ends before."""
    with pytest.raises(StoreError, match="lost"):
        shared.connect(call=1).append(b"five", 5)
    assert shared.connect(call=1).read(0, 0.0) == []
    assert shared.connect().append(b"one", 0)
    with pytest.raises(StoreError, match="lost"):
        shared.connect().append(b"five", 5)


def test_all_who_append_at_once_agree(shared: Shared) -> None:
    """Every place has one winner, nothing is lost, and all read the same log."""
    start = threading.Barrier(MEMBERS)

    def win(member: int) -> list[bytes]:
        connection, seen = shared.connect(), list[bytes]()
        start.wait(DEADLINE_S)
        while not connection.append(b"entry of %d" % member, len(seen)):
            seen += connection.read(len(seen), 0.0)
        return seen

    with ThreadPoolExecutor(MEMBERS) as ranks:
        seen = list(ranks.map(win, range(MEMBERS)))
    log = shared.connect().read(0, 0.0)
    assert sorted(log) == sorted(b"entry of %d" % member for member in range(MEMBERS))
    assert sorted(seen, key=len) == [log[:length] for length in range(MEMBERS)]


def test_a_reader_goes_on_where_it_stopped(connection: Connection) -> None:
    """And what an entry holds is nobody's business: bytes of any kind and length."""
    entries = [bytes(range(256)), b"x" * 100_000, b"\0", b"{}\n"]
    for place, entry in enumerate(entries):
        assert connection.append(entry, place)
    assert [connection.read(after, 0.0) for after in range(5)] == [entries[after:] for after in range(5)]


def test_who_waits_for_an_entry_has_it_as_it_comes(shared: Shared, connection: Connection) -> None:
    """The wait ends by the entry, and not by its bound."""
    reader = shared.connect()
    waiting = in_thread(lambda: reader.read(0, LONG_S), "reader")
    assert connection.append(b"news", 0)
    assert waiting.result(DEADLINE_S) == [b"news"]


def test_a_wait_for_an_entry_that_does_not_come_is_bounded(connection: Connection) -> None:
    """It returns nothing."""
    assert connection.read(0, 0.01) == []
    assert connection.append(b"one", 0)
    assert connection.read(1, 0.01) == []


def test_a_gate_counts_each_member_once(shared: Shared, connection: Connection) -> None:
    """Who arrives again has a new payload, and is counted no more."""
    assert connection.arrive("ready:0", 3, b"three") == 1
    assert shared.connect().arrive("ready:0", 1) == 2
    assert connection.arrive("ready:0", 3, b"\0\xff") == 2
    assert connection.arrivals("ready:0") == {3: b"\0\xff", 1: b""}
    assert connection.arrival("ready:0", 3) == b"\0\xff"
    assert connection.arrival("ready:0", 2) is None


def test_of_two_that_claim_a_place_both_get_the_first(shared: Shared, connection: Connection) -> None:
    """A claim is one step: no later one replaces it, and each claimant learns whose it is."""
    start = threading.Barrier(MEMBERS)

    def claim(number: int) -> bytes:
        own = shared.connect()
        start.wait(DEADLINE_S)
        return own.claim("runs", 3, b"process %d" % number)

    with ThreadPoolExecutor(MEMBERS) as ranks:
        seen = set(ranks.map(claim, range(MEMBERS)))
    assert len(seen) == 1
    assert connection.claim("runs", 3, b"late") == connection.arrival("runs", 3) == seen.pop()
    assert connection.claim("runs", 4, b"another place") == b"another place"
    assert connection.arrive("runs", 5) == 3


def test_gates_know_nothing_of_each_other(connection: Connection) -> None:
    """Nor does a barrier exist before somebody has arrived at it."""
    assert connection.arrivals("ready:1") == {}
    assert connection.arrive("ready:1", 0) == connection.arrive("start:1", 0) == 1
    assert connection.arrivals("ready:10") == {}


def test_one_of_those_who_arrive_at_once_sees_all(shared: Shared) -> None:
    """So there is always somebody to close the barrier."""
    connections = [shared.connect() for _ in range(MEMBERS)]
    with ThreadPoolExecutor(MEMBERS) as ranks:
        counts = list(ranks.map(lambda member: connections[member].arrive("start:0", member), range(MEMBERS)))
    assert max(counts) == MEMBERS
    assert set(connections[0].arrivals("start:0")) == set(range(MEMBERS))


def test_signs_of_life_are_counted(connection: Connection) -> None:
    """A member counts its own, and sees those of the one that it watches."""
    assert connection.beat(0, 1) == 0
    assert connection.beat(0, None) == 0
    assert connection.beat(1, 0) == 2
    assert connection.beat(0, 0) == 3
    assert connection.beat(12, 1) == 1


def test_calls_and_groups_share_nothing(shared: Shared, connection: Connection) -> None:
    """Whatever their names are."""
    others = [
        shared.connect(call=1),
        shared.connect("group:0"),
        shared.connect("a/b ü*{x}"),
        shared.connect("g" * 300),
    ]
    for number, other in enumerate(others):
        assert other.append(b"%d" % number, 0)
        assert other.arrive("ready:0", number) == 1
        assert other.beat(0, 0) == 1
    assert connection.read(0, 0.0) == []
    assert [other.read(0, 0.0) for other in others] == [[b"%d" % number] for number in range(4)]


def test_what_is_cleared_is_gone(shared: Shared, connection: Connection) -> None:
    """For every connection to the call, and for no other call."""
    other_call = shared.connect(call=1)
    assert other_call.append(b"kept", 0)
    for place in range(3):
        connection.append(b"%d" % place, place)
        connection.arrive(f"ready:{place}", place)
        connection.beat(place, None)
    shared.connect().clear()
    assert connection.read(0, 0.0) == []
    assert all(connection.arrivals(f"ready:{place}") == {} for place in range(3))
    assert connection.beat(1, 0) == 0
    assert connection.append(b"anew", 0)
    assert other_call.read(0, 0.0) == [b"kept"]


def test_a_reader_of_a_log_that_is_lost_is_told(shared: Shared, connection: Connection) -> None:
    """Also while it waits for the next entry, which will never come."""
    reader = shared.connect()
    for place in range(2):
        assert connection.append(b"%d" % place, place)
    waiting = in_thread(lambda: reader.read(2, LONG_S), "reader")
    connection.clear()
    with pytest.raises(StoreError, match="lost"):
        waiting.result(DEADLINE_S)
    with pytest.raises(StoreError, match="lost"):
        connection.read(2, 0.0)


def test_clearing_twice_does_no_harm(shared: Shared, connection: Connection) -> None:
    """Two may find that they are the last."""
    connection.append(b"one", 0)
    connection.clear()
    shared.connect().clear()


def test_a_cancelled_reader_stops_waiting(shared: Shared) -> None:
    """At once and for good: so does every operation after it. Others are not touched."""
    reader, other = shared.connect(), shared.connect()
    waiting = in_thread(lambda: reader.read(0, LONG_S), "reader")
    reader.cancel()
    with pytest.raises(Cancelled):
        waiting.result(DEADLINE_S)
    for operation in (lambda: reader.read(0, 0.0), lambda: reader.append(b"one", 0), lambda: reader.arrive("g", 0)):
        with pytest.raises(Cancelled):
            operation()
    assert other.append(b"one", 0)


def test_a_reader_that_waits_already_is_woken(shared: Shared, connection: Connection) -> None:
    """Nothing of it is left when it is closed twice."""
    reader = shared.connect()
    waits = threading.Event()

    def read() -> list[bytes]:
        first = reader.read(0, LONG_S)
        waits.set()
        return first + reader.read(1, LONG_S)

    waiting = in_thread(read, "reader")
    connection.append(b"one", 0)
    assert waits.wait(DEADLINE_S)
    reader.cancel()
    with pytest.raises(Cancelled):
        waiting.result(DEADLINE_S)
    reader.close()
