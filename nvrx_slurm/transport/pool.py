"""The connections of a client: bounded for each port, used by one read at a time, and replaced before the server
evicts them.

Under the lock the pool only decides. To connect, to shake hands and to close takes time, and comes after.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from nvrx_slurm.transport.errors import PeerReset
from nvrx_slurm.transport.protocol import AllInUse, Backend, PeerLink, greet
from nvrx_slurm.transport.ref import PayloadRef

YOUNGER = 0.75  # a connection is not used again after this share of the time in which its server would evict it
MOST_UNCONFIRMED = 256

# How often idle connections to all addresses are looked at.
LOOK_S = 1.0


class Cuttable(Protocol):
    """What another thread may cut: a link, or the wait for one."""

    def cut(self) -> None: ...


Watch = Callable[[Cuttable | None], object]


class UnconfirmedAck(NamedTuple):
    """A payload that was taken, and whose Ack may have been lost."""

    ring: str
    slot: int
    generation: int


class PooledConnection:
    """A link after its handshake. `is_reused`: it was idle before this use; `is_broken`: it is not to be used
    again; `unconfirmed`: the last Ack over it, while the server has not shown that it arrived; `used_at`: since
    when it is idle."""

    def __init__(self, place: _Place, link: PeerLink, proof: bytes | None, keep_s: float) -> None:
        self.place, self.link = place, link
        self.is_reused = self.is_broken = self.has_heard = False
        self.unconfirmed: UnconfirmedAck | None = None
        self.used_at = 0.0
        self._proof, self._keep_s = proof, keep_s

    def prove(self, deadline: float) -> None:
        """Answer the server's challenge. Call this before the first request."""
        if self._proof is not None:
            self.link.send(self._proof, None, deadline)
            self._proof = None

    def was_heard(self) -> None:
        """The server has answered, so that it has read all that was sent before."""
        self.has_heard, self.unconfirmed = True, None

    def has_taken(self, ref: PayloadRef) -> None:
        """An Ack for this ref is being sent, and may be lost."""
        self.unconfirmed = UnconfirmedAck(ref.ring, ref.slot, ref.generation)

    def is_young(self, now: float) -> bool:
        return now - self.used_at < self._keep_s


class _Place:
    """The right to one connection to `address`, reserved before the connection is made. It ends with the object,
    since a signal handler may raise anywhere."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: str) -> None:
        self.address = address


class _Port:
    """The `places` to one address that are taken, and the `idle` ones among their connections."""

    __slots__ = ("idle", "places", "waiting")

    def __init__(self) -> None:
        self.idle: list[PooledConnection] = []
        self.places: weakref.WeakSet[_Place] = weakref.WeakSet()
        self.waiting: deque[threading.Lock] = deque()

    def wake_next(self) -> None:
        """A place or a connection is free: wake the thread that has waited longest."""
        if self.waiting:
            self.waiting.popleft().release()


class _Waiter:
    """A read that waits for a place."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.is_cut, self._wake = False, wake

    def cut(self) -> None:
        self.is_cut = True
        self._wake()


class Pool:
    """The connections of one client. `per_port`: how many there are at most to one address, idle ones included."""

    def __init__(self, backends: Mapping[str, Backend], token: bytes, *, per_port: int, keep_s: float) -> None:
        self._backends, self._token = backends, token
        self._per_port, self._keep_s = per_port, keep_s
        self._guard = threading.Lock()
        self._ports: defaultdict[str, _Port] = defaultdict(_Port)
        self._busy: weakref.WeakSet[PeerLink] = weakref.WeakSet()  # in a handshake, too
        self._unconfirmed: deque[UnconfirmedAck] = deque(maxlen=MOST_UNCONFIRMED)
        self._looks_at = 0.0
        self.is_closed = False

    @contextmanager
    def connection(self, address: str, deadline: float, watch: Watch) -> Iterator[PooledConnection]:
        """One connection to `address`, for one read. An exception in the block breaks the connection. `watch` gets
        its link while it is used, from before the handshake on, and None at the end. Raises what links raise."""
        connection = self._taken(address, deadline, watch)
        try:
            yield connection
        except BaseException:
            connection.is_broken = True
            raise
        finally:
            watch(None)
            self._give_back(connection)

    def count(self, address: str) -> int:
        """How many connections there are to that address, idle ones included."""
        port = self._ports.get(address)
        return 0 if port is None else len(port.places)

    def discard_idle(self, address: str) -> None:
        """Close the idle connections to that address: one of them was dead, so the others are too."""
        with self._guard:
            port = self._ports.get(address)
            idle = [] if port is None else self._without_idle(port)
        _end(idle)

    def unconfirmed_acks(self, ring: str) -> list[UnconfirmedAck]:
        """Take the Acks about that ring. They must be settled before anything else is asked of its server."""
        if not self._unconfirmed:
            return []
        with self._guard:
            found = [unconfirmed for unconfirmed in self._unconfirmed if unconfirmed.ring == ring]
            for unconfirmed in found:
                self._unconfirmed.remove(unconfirmed)
        return found

    def keep_unconfirmed(self, unconfirmed_acks: Iterable[UnconfirmedAck]) -> None:
        """Keep these Acks for later: they could not be settled."""
        with self._guard:
            self._unconfirmed.extend(unconfirmed_acks)

    def cut(self) -> None:
        """Close the pool: reads that are under way fail at once, and later ones too. One that still connects fails
        after that: no backend can be cut there."""
        with self._guard:
            self.is_closed = True
            busy = list(self._busy)
            idle = [connection for port in self._ports.values() for connection in self._without_idle(port)]
        self._wake_all()
        for link in busy:
            link.cut()
        _end(idle)

    def drop(self) -> None:
        """In a forked child, leave the connections to the parent. A thread of the parent may hold the lock."""
        for link in (*self._busy, *(each.link for port in self._ports.values() for each in port.idle)):
            link.drop()
        self._guard = threading.Lock()
        self._ports.clear()
        self._busy.clear()
        self._unconfirmed.clear()

    def _taken(self, address: str, deadline: float, watch: Watch) -> PooledConnection:
        old: list[PooledConnection] = []
        try:
            with self._guard:
                self._take_out_old(old)
                connection = self._found(address, old)
            if connection is None:
                connection = self._awaited(address, deadline, watch, old)
        finally:
            # Outside of the lock: to close a connection takes time.
            _end(old)
        if isinstance(connection, _Place):
            return self._connect(connection, deadline, watch)
        try:
            watch(connection.link)
        except BaseException:
            connection.is_broken = True
            self._give_back(connection)
            raise
        return connection

    def _give_back(self, connection: PooledConnection) -> None:
        with self._guard:
            self._busy.discard(connection.link)
            port = self._ports[connection.place.address]
            keep = not (connection.is_broken or self.is_closed)
            if keep:
                connection.used_at = time.monotonic()
                connection.is_reused, connection.has_heard = True, False
                port.idle.append(connection)
                port.wake_next()
            else:
                self._remember(connection)
                self._free(connection.place)
        if not keep:
            connection.link.close()

    def _awaited(
        self, address: str, deadline: float, watch: Watch, old: list[PooledConnection]
    ) -> PooledConnection | _Place:
        # Each waiting thread queues a lock that it holds, and blocks on that lock a second time; `_Port.wake_next`
        # releases it. Not a Condition: a signal handler that raises would leave its list of waiters in disorder.
        waiting, turn = _Waiter(self._wake_all), threading.Lock()
        watch(waiting)
        try:
            while True:
                with self._guard:
                    port = self._ports[address]
                    # Its wait was over before it was woken; it looks once more.
                    if turn in port.waiting:
                        port.waiting.remove(turn)
                    if (found := self._found(address, old)) is not None:
                        return found
                    if waiting.is_cut:
                        raise PeerReset("it was cancelled")
                    if time.monotonic() >= deadline:
                        raise AllInUse(f"all {self._per_port} connections to this port were in use")
                    # This does nothing for a thread that was not woken: it still holds the lock.
                    turn.acquire(blocking=False)
                    port.waiting.append(turn)
                turn.acquire(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException:
            with self._guard:
                # A `turn` that is not queued was woken already: that wake-up must go to the next thread, or it would
                # be lost.
                if (queued := self._ports.get(address)) is not None:
                    if turn in queued.waiting:
                        queued.waiting.remove(turn)
                    else:
                        queued.wake_next()
            raise
        finally:
            watch(None)

    def _found(self, address: str, old: list[PooledConnection]) -> PooledConnection | _Place | None:
        """Under the lock, find an idle connection, or a place for a new one. `old` gets those to be closed."""
        if self.is_closed:
            raise PeerReset("the client was closed")
        port = self._ports[address]
        # The one that was used last comes first: it is the youngest.
        while port.idle:
            connection = port.idle.pop()
            if connection.is_young(time.monotonic()) and not connection.link.is_stale():
                self._busy.add(connection.link)
                return connection
            port.places.discard(connection.place)
            self._remember(connection)
            old.append(connection)
        if len(port.places) >= self._per_port:
            return None
        place = _Place(address)
        port.places.add(place)
        return place

    def _take_out_old(self, old: list[PooledConnection]) -> None:
        """Under the lock, now and then: `old` gets what was idle for too long, to any address. A producer that was
        replaced is never asked again."""
        now = time.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + LOOK_S
        for address, port in list(self._ports.items()):
            old += self._without_idle(port, now)
            if not (port.places or port.waiting):
                del self._ports[address]

    def _wake_all(self) -> None:
        with self._guard:
            for port in self._ports.values():
                while port.waiting:
                    port.wake_next()

    def _connect(self, place: _Place, deadline: float, watch: Watch) -> PooledConnection:
        """Make a new connection in a reserved place. The place is free again if that fails."""
        link: PeerLink | None = None
        try:
            backend = self._backends[place.address.partition("://")[0]]
            link = backend.connect(place.address, deadline)
            # Added before `is_closed` is read: `cut`, which sets it, either finds the link here or is seen here.
            with self._guard:
                self._busy.add(link)
                is_closed = self.is_closed
            if is_closed:
                link.cut()
            watch(link)
            # Shared memory needs no handshake: file permissions decide who may read.
            if not link.needs_checksum:
                return PooledConnection(place, link, None, self._keep_s)
            welcome = greet(link, self._token, deadline)
            return PooledConnection(place, link, welcome.proof, min(self._keep_s, welcome.eviction_s * YOUNGER))
        except BaseException:
            watch(None)
            with self._guard:
                if link is not None:
                    self._busy.discard(link)
                self._free(place)
            if link is not None:
                link.close()
            raise

    def _free(self, place: _Place) -> None:
        port = self._ports[place.address]
        port.places.discard(place)
        port.wake_next()
        if not (port.places or port.waiting):
            # The node of an address may be gone for good.
            del self._ports[place.address]

    def _without_idle(self, port: _Port, now: float | None = None) -> list[PooledConnection]:
        """Take the idle connections out; with `now` those alone that are too old then."""
        young = [] if now is None else [each for each in port.idle if each.is_young(now)]
        idle = [each for each in port.idle if each not in young]
        port.idle = young
        for connection in idle:
            port.places.discard(connection.place)
            self._remember(connection)
            port.wake_next()
        return idle

    def _remember(self, connection: PooledConnection) -> None:
        if connection.unconfirmed is not None:
            self._unconfirmed.append(connection.unconfirmed)


def _end(connections: Iterable[PooledConnection]) -> None:
    for connection in connections:
        connection.link.close()
