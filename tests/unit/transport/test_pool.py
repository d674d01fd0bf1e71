"""A client's connections: bounded in number, used by one read at a time, replaced before they break. Over real
sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PayloadTimeout, PeerRefused, PeerReset
from nvrx_slurm.transport.pool import MOST_UNCONFIRMED, AllInUse, Pool, PooledConnection, UnconfirmedAck
from nvrx_slurm.transport.protocol import PeerLink, acknowledge, request
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.server import ServerLimits
from nvrx_slurm.transport.tcp import TcpBackend
from tests.transport.harness import TOKEN, admit_and_serve, soon
from tests.unit.transport.sides import Side, server_of
from tests.waiting import until

RING, OTHER_RING = "nvrx-ring-1-2-3", "nvrx-ring-4-5-6"
REF = PayloadRef(node="n1", ring=RING, slot=3, generation=9, size=0)


class Server:
    """A server without a ring: it answers every request with UNKNOWN_RING."""

    def __init__(self, eviction_s: float = 60.0) -> None:
        self.links: list[PeerLink] = []
        self.now = 0
        self._guard = threading.Lock()
        self._limits = ServerLimits(hello_s=20.0, eviction_s=eviction_s)

    def __call__(self, link: PeerLink) -> None:
        with self._guard:
            self.links.append(link)
            self.now += 1
        try:
            admit_and_serve(link, {}, self._limits)
        finally:
            with self._guard:
                self.now -= 1


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    with server_of(server) as address:
        yield address


@pytest.fixture
def new_pool() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def new(*, per_port: int = 2, keep_s: float = 60.0, token: bytes = TOKEN) -> Pool:
        pools.append(Pool({"tcp": TcpBackend()}, token, per_port=per_port, keep_s=keep_s))
        return pools[-1]

    yield new
    for pool in pools:
        pool.cut()


@contextlib.contextmanager
def taken(pool: Pool, address: str, seconds: float = 20.0) -> Iterator[PooledConnection]:
    """A connection on which the server has answered a request."""
    with pool.connection(address, soon(seconds), lambda link: None) as connection:
        connection.prove(soon())
        answer = request(connection.link, REF, budget_s=1.0, deadline=soon())
        assert answer.status is protocol.ResponseStatus.UNKNOWN_RING
        connection.was_heard()
        yield connection


def test_a_connection_is_used_again(new_pool: Callable[..., Pool], address: str, server: Server) -> None:
    """One read after another uses the same connection, marked as reused."""
    pool = new_pool()
    with taken(pool, address) as first:
        assert not first.is_reused
    with taken(pool, address) as second:
        assert second is first and second.is_reused
    assert len(server.links) == 1


def test_a_connection_is_used_by_one_at_a_time(new_pool: Callable[..., Pool], address: str) -> None:
    """While it is in use, another read gets another connection."""
    pool = new_pool()
    with taken(pool, address) as first, taken(pool, address) as second:
        assert first is not second


def test_there_are_no_more_than_the_bound(new_pool: Callable[..., Pool], address: str) -> None:
    """One more read fails with AllInUse, a PayloadTimeout, at its deadline; a connection that is returned is used at
    once."""
    pool = new_pool()
    with taken(pool, address) as first:
        with taken(pool, address), pytest.raises(AllInUse) as caught, taken(pool, address, 0.05):
            pass
        assert isinstance(caught.value, PayloadTimeout)
        with taken(pool, address) as third:
            assert third is not first


def test_a_waiting_read_gets_the_next_free_connection(new_pool: Callable[..., Pool], address: str) -> None:
    """The waiting read gets it before its deadline."""
    pool = new_pool(per_port=1)
    waiting = threading.Event()

    def take() -> PooledConnection:
        waiting.set()
        with taken(pool, address) as connection:
            return connection

    with taken(pool, address) as first:
        side = Side(take)
        assert waiting.wait(20)
    assert side.result() is first


def test_many_at_once_stay_within_the_bound(new_pool: Callable[..., Pool], address: str) -> None:
    """Sixteen threads share three connections, some of which break: there are never more than three."""
    pool, held, guard, most = new_pool(per_port=3), set[PooledConnection](), threading.Lock(), [0]

    def use(number: int) -> None:
        for step in range(20):
            with taken(pool, address) as connection:
                with guard:
                    held.add(connection)
                    most[0] = max(most[0], len(held), pool.count(address))
                connection.is_broken = (number + step) % 5 == 0
                with guard:
                    held.remove(connection)

    for side in [Side(lambda number=number: use(number)) for number in range(16)]:
        side.result()
    assert most == [3]
    assert pool.count(address) <= 3


def test_a_broken_connection_is_not_kept(new_pool: Callable[..., Pool], address: str) -> None:
    """A read that raises, or that marks the connection as broken, ends it, and its place is free."""
    pool = new_pool(per_port=1)
    with pytest.raises(ZeroDivisionError), taken(pool, address) as first:
        raise ZeroDivisionError
    with taken(pool, address) as second:
        second.is_broken = True
    with taken(pool, address) as third:
        assert len({first, second, third}) == 3
        assert not third.is_reused


def test_a_stale_connection_is_replaced(new_pool: Callable[..., Pool], address: str, server: Server) -> None:
    """A connection that the server has closed while it was idle is not used again."""
    pool = new_pool(per_port=1)
    with taken(pool, address) as first:
        pass
    server.links[0].cut()
    until(first.link.is_stale, "its end has come")
    with taken(pool, address) as second:
        assert second is not first and not second.is_reused


@pytest.mark.parametrize(
    ("keep_s", "eviction_s"),
    [pytest.param(0.1, 60.0, id="the client's own bound"), pytest.param(60.0, 0.2, id="before the server evicts it")],
)
def test_an_old_connection_is_replaced(new_pool: Callable[..., Pool], keep_s: float, eviction_s: float) -> None:
    """A connection that is too old is not used again, though the server has not closed it yet."""
    with server_of(Server(eviction_s)) as address:
        pool = new_pool(keep_s=keep_s)
        with taken(pool, address) as first:
            pass
        rested = soon(0)
        assert first.is_young(rested)
        assert not first.is_young(rested + min(keep_s, eviction_s))
        until(lambda: not first.is_young(soon(0)), "it is old")
        with taken(pool, address) as second:
            assert second is not first


def test_an_old_connection_to_another_address_is_closed(
    new_pool: Callable[..., Pool], address: str, server: Server
) -> None:
    """A producer that was replaced is never read again: the next read from any producer closes the idle connection to
    it."""
    pool = new_pool(keep_s=0.1)
    with taken(pool, address):
        pass

    def is_closed_by_a_read() -> bool:
        with server_of(Server()) as other, taken(pool, other):
            return pool.count(address) == 0

    until(is_closed_by_a_read, "the connection to be closed")
    until(lambda: server.now == 0, "its server to see the end")


@pytest.mark.parametrize("token", [TOKEN, b"x" * 32], ids=["no server", "another token"])
def test_a_place_is_free_again_where_connecting_fails(
    new_pool: Callable[..., Pool], address: str, token: bytes
) -> None:
    """Failed attempts take no places, however many there are."""
    pool = new_pool(per_port=1, token=token)
    target = address if token != TOKEN else "tcp://127.0.0.1:1"
    for _ in range(3):
        with pytest.raises((PeerReset, PeerRefused)), taken(pool, target):
            pass
    assert pool.count(target) == 0 and not pool._busy


# ----------------------------------------------------------------------------------------------------- doubts


def test_a_payload_whose_ack_was_sent_is_in_doubt(new_pool: Callable[..., Pool], address: str) -> None:
    """If the connection ends before another answer, the ack must be settled: once, and by readers of its own ring."""
    pool = new_pool()
    with taken(pool, address) as connection:
        connection.has_taken(REF)
        connection.is_broken = True
    assert pool.unconfirmed_acks(OTHER_RING) == []
    assert pool.unconfirmed_acks(RING) == [UnconfirmedAck(RING, 3, 9)]
    assert pool.unconfirmed_acks(RING) == []


def test_an_ack_before_an_answer_is_not_in_doubt(new_pool: Callable[..., Pool], address: str) -> None:
    """An answer shows that the server has read all that was sent before it."""
    pool = new_pool()
    with taken(pool, address) as connection:
        connection.has_taken(REF)
        connection.was_heard()
        connection.is_broken = True
    assert pool.unconfirmed_acks(RING) == []


@pytest.mark.parametrize("how", ["stale", "discarded"])
def test_an_idle_connection_that_dies_leaves_its_ack_in_doubt(
    new_pool: Callable[..., Pool], address: str, server: Server, how: str
) -> None:
    """Its ack was sent, and it is not known whether the server has read it."""
    pool = new_pool()
    with taken(pool, address) as first:
        first.has_taken(REF)
    if how == "discarded":
        pool.discard_idle(address)
    else:
        server.links[0].cut()
        until(first.link.is_stale, "its end has come")
        with taken(pool, address):
            pass
    assert pool.unconfirmed_acks(RING) == [UnconfirmedAck(RING, 3, 9)]


def test_a_doubt_that_could_not_be_settled_stays(new_pool: Callable[..., Pool]) -> None:
    """The next call returns it again; there are never more of them than the bound."""
    pool = new_pool()
    pool.keep_unconfirmed([UnconfirmedAck(RING, 1, 1)])
    assert pool.unconfirmed_acks(RING) == [UnconfirmedAck(RING, 1, 1)]
    pool.keep_unconfirmed(UnconfirmedAck(RING, slot, 1) for slot in range(MOST_UNCONFIRMED + 10))
    assert len(pool.unconfirmed_acks(RING)) == MOST_UNCONFIRMED


def test_an_ack_that_the_server_never_read(new_pool: Callable[..., Pool], server: Server, address: str) -> None:
    """The connection is cut before the server reads the ack: the pool knows enough to settle it."""
    pool = new_pool()
    with taken(pool, address) as connection:
        server.links[0].cut()
        until(connection.link.is_stale, "its end has come")
        connection.has_taken(REF)
        with contextlib.suppress(PeerReset):
            acknowledge(connection.link, REF, protocol.AckVerdict.TAKEN, soon())
        connection.is_broken = True
    assert pool.unconfirmed_acks(RING) == [UnconfirmedAck(RING, REF.slot, REF.generation)]


# -------------------------------------------------------------------------------------------------- cut and drop


def test_a_cut_ends_reads_and_waits(new_pool: Callable[..., Pool], address: str) -> None:
    """Reads, greetings and waits for a connection all fail with PeerReset at once; later reads fail too."""
    pool = new_pool(per_port=1)
    reads = threading.Event()

    def read() -> None:
        with taken(pool, address) as connection:
            reads.set()
            connection.link.receive_into(memoryview(bytearray(8)), soon())

    def never_greet(link: PeerLink) -> None:
        with contextlib.suppress(PeerReset):
            link.receive_into(memoryview(bytearray(protocol.HELLO_BYTES)), soon())
            link.receive_into(memoryview(bytearray(8)), soon())

    with server_of(never_greet) as silent:
        sides = [Side(read)]
        assert reads.wait(20)
        sides.append(Side(lambda: taken(pool, address).__enter__()))
        sides.append(Side(lambda: taken(pool, silent).__enter__()))
        until(lambda: len(pool._busy) == 2, "one read and one greeting")
        pool.cut()
        for side in sides:
            with pytest.raises(PeerReset):
                side.result()
        with pytest.raises(PeerReset), taken(pool, address):
            pass
    assert not pool._busy and pool.count(address) == 0


def test_the_watcher_sees_the_link_from_the_greeting_on(new_pool: Callable[..., Pool], address: str) -> None:
    """A watcher can cut a read that waits for a greeting; at the end it gets None, as there is nothing to cut."""
    pool = new_pool()
    seen: list[PeerLink | None] = []
    with pool.connection(address, soon(), seen.append) as connection:
        assert seen == [connection.link]
    assert seen[-1] is None


def test_a_watcher_that_cuts_at_once(new_pool: Callable[..., Pool], address: str) -> None:
    """An abort that came before the connection ends it: PeerReset, and its place is free."""
    pool = new_pool(per_port=1)

    def cut(link: PeerLink | None) -> None:
        if link is not None:
            link.cut()

    with pytest.raises(PeerReset), pool.connection(address, soon(), cut):
        raise AssertionError("it was cut before it greeted")
    assert pool.count(address) == 0


def test_a_dropped_pool_is_as_new(new_pool: Callable[..., Pool], address: str) -> None:
    """It uses none of its connections and acks again, and has all places free: a forked child drops its parent's."""
    pool = new_pool(per_port=1)
    with taken(pool, address) as first:
        pass
    pool.keep_unconfirmed([UnconfirmedAck(RING, 1, 1)])
    pool.drop()
    assert pool.unconfirmed_acks(RING) == []
    with taken(pool, address) as second:
        assert second is not first
