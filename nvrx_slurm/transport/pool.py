"""Connections that a client keeps: bounded for each port, used by one read at a time, and replaced before they go
bad.

Under the lock it only decides; connecting, greeting and closing come after.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from nvrx_slurm.transport.backends.port import Backend, Link
from nvrx_slurm.transport.errors import PayloadTimeout, PeerReset
from nvrx_slurm.transport.handshake import greet
from nvrx_slurm.transport.ref import PayloadRef

YOUNGER = 0.75
"""A connection is not used again after this share of the time in which its server would evict it."""

MOST_DOUBTS = 256

Watch = Callable[[Link | None], object]


class AllInUse(PayloadTimeout):
    """Other reads had all connections to the port: that is no fault of it."""


class Doubt(NamedTuple):
    """A payload that was taken, and whose Ack may have been lost."""

    ring: str
    slot: int
    generation: int


class Connection:
    """A link that has greeted its server. `is_reused`: it was idle before this use; `is_broken`: it is not to be used
    again; `doubt`: what was taken over it, and is not known to have been heard."""

    def __init__(self, address: str, link: Link, proof: bytes | None, keep_s: float) -> None:
        self.address, self.link = address, link
        self.is_reused = self.is_broken = self.has_heard = False
        self.doubt: Doubt | None = None
        self._proof, self._keep_s = proof, keep_s
        self._used_at = 0.0

    def prove(self, deadline: float) -> None:
        """Before the first request: the server's challenge is still to be answered."""
        if self._proof is not None:
            self.link.send(self._proof, None, deadline)
            self._proof = None

    def was_heard(self) -> None:
        """The server has answered, so that it has read all that was sent before."""
        self.has_heard, self.doubt = True, None

    def has_taken(self, ref: PayloadRef) -> None:
        """An Ack is being sent."""
        self.doubt = Doubt(ref.ring, ref.slot, ref.generation)

    def rest(self, now: float) -> None:
        """It is idle from now on."""
        self._used_at = now
        self.is_reused, self.has_heard = True, False

    def is_young(self, now: float) -> bool:
        return now - self._used_at < self._keep_s


class Pool:
    """The connections of one client. `per_port`: how many there are at most to one address, idle ones included."""

    def __init__(self, backends: Mapping[str, Backend], token: bytes, *, per_port: int, keep_s: float) -> None:
        self._backends, self._token = backends, token
        self._per_port, self._keep_s = per_port, keep_s
        self._changed = threading.Condition()
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._count: defaultdict[str, int] = defaultdict(int)
        self._busy: set[Link] = set()  # those that are still greeting, too
        self._doubts: deque[Doubt] = deque(maxlen=MOST_DOUBTS)
        self._is_closed = False

    @contextlib.contextmanager
    def connection(self, address: str, deadline: float, watch: Watch) -> Iterator[Connection]:
        """One to `address`, for one read. Whoever leaves with an exception has broken it. `watch` gets its link while
        it is used, from before the greeting on, and None at the end. Raises what links raise."""
        connection = self._take(address, deadline, watch)
        try:
            yield connection
        except BaseException:
            connection.is_broken = True
            raise
        finally:
            watch(None)
            self._give_back(connection)

    def discard_idle(self, address: str) -> None:
        """One of them was dead: do not try the others."""
        with self._changed:
            idle = self._idle.pop(address, [])
            self._count[address] -= len(idle)
            for connection in idle:
                self._remember(connection)
            self._changed.notify_all()
        self._end(idle)

    def doubts(self, ring: str) -> list[Doubt]:
        """Take those about that ring: to be settled before anything else is asked of its server."""
        if not self._doubts:
            return []
        with self._changed:
            found = [doubt for doubt in self._doubts if doubt.ring == ring]
            for doubt in found:
                self._doubts.remove(doubt)
        return found

    def doubt_again(self, doubts: Iterable[Doubt]) -> None:
        """They could not be settled."""
        with self._changed:
            self._doubts.extend(doubts)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def cut(self) -> None:
        """Whoever reads fails at once; nothing is taken from the pool any more."""
        with self._changed:
            self._is_closed = True
            busy = list(self._busy)
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
            self._changed.notify_all()
        for link in busy:
            link.cut()
        self._end(idle)

    def drop(self) -> None:
        """In a forked child: the parent's connections are not ours."""
        for link in (*self._busy, *(each.link for kept in self._idle.values() for each in kept)):
            link.drop()
        self._changed = threading.Condition()
        self._idle.clear()
        self._count.clear()
        self._busy.clear()
        self._doubts.clear()

    def _take(self, address: str, deadline: float, watch: Watch) -> Connection:
        old: list[Connection] = []
        try:
            connection = self._reserve(address, deadline, old)
        finally:
            self._end(old)
        if connection is None:
            return self._connect(address, deadline, watch)
        watch(connection.link)
        return connection

    def _reserve(self, address: str, deadline: float, old: list[Connection]) -> Connection | None:
        """An idle one, or None and a place for a new one. `old` gets those that are good for nothing any more."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise PeerReset("the client was closed")
                if (connection := self._youngest(address, old)) is not None:
                    self._busy.add(connection.link)
                    return connection
                if self._count[address] < self._per_port:
                    self._count[address] += 1
                    return None
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise AllInUse(f"all {self._per_port} connections to this port were in use")

    def _youngest(self, address: str, old: list[Connection]) -> Connection | None:
        idle = self._idle[address]
        while idle:
            connection = idle.pop()
            if connection.is_young(time.monotonic()) and not connection.link.is_stale():
                return connection
            self._count[address] -= 1
            self._remember(connection)
            old.append(connection)
        return None

    def _connect(self, address: str, deadline: float, watch: Watch) -> Connection:
        """In the place that is reserved; it is free again if that fails."""
        link: Link | None = None
        try:
            backend = self._backends[address.partition("://")[0]]
            link = backend.connect(address, deadline)
            self._use(link)
            watch(link)
            return self._greeted(address, link, deadline)
        except BaseException:
            watch(None)
            with self._changed:
                self._busy.discard(link)
                self._count[address] -= 1
                self._changed.notify()
            if link is not None:
                link.close()
            raise

    def _use(self, link: Link) -> None:
        with self._changed:
            self._busy.add(link)
            is_closed = self._is_closed
        if is_closed:
            link.cut()

    def _greeted(self, address: str, link: Link, deadline: float) -> Connection:
        if not link.needs_checksum:  # memory of this node: the kernel has seen to it who may
            return Connection(address, link, None, self._keep_s)
        welcome = greet(link, self._token, deadline)
        return Connection(address, link, welcome.proof, min(self._keep_s, welcome.eviction_s * YOUNGER))

    def _give_back(self, connection: Connection) -> None:
        with self._changed:
            self._busy.discard(connection.link)
            keep = not connection.is_broken and not self._is_closed
            if keep:
                connection.rest(time.monotonic())
                self._idle[connection.address].append(connection)
            else:
                self._count[connection.address] -= 1
                self._remember(connection)
            self._changed.notify()
        if not keep:
            connection.link.close()

    def _remember(self, connection: Connection) -> None:
        if connection.doubt is not None:
            self._doubts.append(connection.doubt)

    def _end(self, connections: list[Connection]) -> None:
        for connection in connections:
            connection.link.close()
