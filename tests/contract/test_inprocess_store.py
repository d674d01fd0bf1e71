"""What the ranks of a group can rely on, for each kind of store."""

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
    """Of two entries for one place the log keeps the first. The append of the second one returns False."""
    other = shared.connect()
    assert connection.append(b"one", 0)
    assert not other.append(b"two", 0)
    assert other.append(b"two", 1)
    assert not connection.append(b"three", 0)
    assert connection.read(0, 0.0) == other.read(0, 0.0) == [b"one", b"two"]


def test_an_entry_that_is_appended_again_is_the_same_one(connection: Connection) -> None:
    """A writer that repeats an append, since the answer was lost, has its entry in the log once, even if others have
    appended meanwhile."""
    assert connection.append(b"one", 0)
    assert connection.append(b"one", 0)
    assert connection.append(b"two", 1)
    assert connection.append(b"one", 0)
    assert connection.read(0, 0.0) == [b"one", b"two"]


def test_an_entry_beyond_the_end_shows_that_the_log_was_lost(shared: Shared) -> None:
    """An append after an entry that does not exist is an error, in an empty log and in one that is too short."""
    with pytest.raises(StoreError, match="lost"):
        shared.connect(call=1).append(b"five", 5)
    assert shared.connect(call=1).read(0, 0.0) == []
    assert shared.connect().append(b"one", 0)
    with pytest.raises(StoreError, match="lost"):
        shared.connect().append(b"five", 5)


def test_all_who_append_at_once_agree(shared: Shared) -> None:
    """Each place has one winner, nothing is lost, and all ranks read the same log."""
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
    """A read returns all entries after a place. Entries may have any bytes and any length."""
    entries = [bytes(range(256)), b"x" * 100_000, b"\0", b"{}\n"]
    for place, entry in enumerate(entries):
        assert connection.append(entry, place)
    assert [connection.read(after, 0.0) for after in range(5)] == [entries[after:] for after in range(5)]


def test_a_new_entry_ends_the_wait_for_it(shared: Shared, connection: Connection) -> None:
    """The waiting reader gets the entry long before its timeout."""
    reader = shared.connect()
    waiting = in_thread(lambda: reader.read(0, LONG_S), "reader")
    assert connection.append(b"news", 0)
    assert waiting.result(DEADLINE_S) == [b"news"]


def test_a_wait_for_an_entry_that_does_not_come_is_bounded(connection: Connection) -> None:
    """After the timeout a read returns nothing."""
    assert connection.read(0, 0.01) == []
    assert connection.append(b"one", 0)
    assert connection.read(1, 0.01) == []


def test_a_barrier_counts_each_member_once(shared: Shared, connection: Connection) -> None:
    """A member that arrives again replaces its payload and is not counted again."""
    assert connection.arrive("ready:0", 3, b"three") == 1
    assert shared.connect().arrive("ready:0", 1) == 2
    assert connection.arrive("ready:0", 3, b"\0\xff") == 2
    assert connection.arrivals("ready:0") == {3: b"\0\xff", 1: b""}
    assert connection.arrival("ready:0", 3) == b"\0\xff"
    assert connection.arrival("ready:0", 2) is None


def test_of_two_that_claim_a_place_both_get_the_first(shared: Shared, connection: Connection) -> None:
    """The first claim of a place wins, and every claimant gets that claim's payload."""
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


def test_barriers_are_independent(connection: Connection) -> None:
    """Arrivals at one barrier do not count at another. A barrier without arrivals is empty."""
    assert connection.arrivals("ready:1") == {}
    assert connection.arrive("ready:1", 0) == connection.arrive("start:1", 0) == 1
    assert connection.arrivals("ready:10") == {}


def test_one_of_those_who_arrive_at_once_sees_all(shared: Shared) -> None:
    """Of members that arrive at the same time, at least one sees all of them: it closes the barrier."""
    connections = [shared.connect() for _ in range(MEMBERS)]
    with ThreadPoolExecutor(MEMBERS) as ranks:
        counts = list(ranks.map(lambda member: connections[member].arrive("start:0", member), range(MEMBERS)))
    assert max(counts) == MEMBERS
    assert set(connections[0].arrivals("start:0")) == set(range(MEMBERS))


def test_signs_of_life_are_counted(connection: Connection) -> None:
    """A member counts its own heartbeats, and reads the count of the member that it watches."""
    assert connection.beat(0, 1) == 0
    assert connection.beat(0, None) == 0
    assert connection.beat(1, 0) == 2
    assert connection.beat(0, 0) == 3
    assert connection.beat(12, 1) == 1


def test_calls_and_groups_share_nothing(shared: Shared, connection: Connection) -> None:
    """Calls and groups are separate, also where their names have special characters or are long."""
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
    """Clearing a call removes its data for every connection to it, and for no other call."""
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


def test_a_reader_of_a_lost_log_gets_an_error(shared: Shared, connection: Connection) -> None:
    """So does a reader that is waiting for the next entry, which will never come."""
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
    """Two ranks may each find that they are the last one."""
    connection.append(b"one", 0)
    connection.clear()
    shared.connect().clear()


def test_a_cancelled_reader_stops_waiting(shared: Shared) -> None:
    """A cancelled connection stops waiting at once and refuses every further operation. Other connections go on."""
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
    """Cancelling wakes a reader that is already waiting; the connection may then be closed twice."""
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
