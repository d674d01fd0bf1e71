"""The store that the simulated ranks share: the in-memory one of the contract tests, behind links with faults.

A request travels to the server, is executed there even if its process has died meanwhile, and its reply travels
back. Each of the two can be lost; the client then asks again, as the clients of the real stores do, so that an
operation may be executed twice. Without an answer for its patience it raises StoreError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TypeVar

from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection, Store
from nvrx_slurm.lab.simulation.inprocess.memory_store import MemoryConnection, MemoryStore
from nvrx_slurm.lab.simulation.inprocess.shape import GroupFault
from nvrx_slurm.lab.simulation.threads import ThreadScheduler, Ticket, VirtualProcess

T = TypeVar("T")

# After this time without a reply a request is sent again.
AGAIN_S = 0.2

LATENCIES_S = (0.0002, 0.002)
# So many of the messages take longer, up to this: they overtake each other.
SLOW_SHARE, SLOW_S = 0.02, 0.3


class StoreServer:
    """The server, and the links of all hosts to it. `on_append` is called after each entry that a log has taken."""

    def __init__(self, scheduler: ThreadScheduler, chance: Random, on_append: Callable[[int, bytes], object]) -> None:
        self.scheduler, self.chance, self.on_append = scheduler, chance, on_append
        self.memory = MemoryStore()
        self.faults: Counter[str] = Counter()  # how many last: of a kind; by host: that keep it from the server
        self.waiting: dict[int, list[Ticket]] = {}  # call → who waits for its log

    def is_reachable(self, host: str) -> bool:
        return not self.faults[GroupFault.STORE_DOWN] and not self.faults[host]

    def latency_s(self) -> float:
        if self.chance.random() < SLOW_SHARE:
            return self.chance.uniform(0.0, SLOW_S)
        return self.chance.uniform(*LATENCIES_S)

    def loses(self) -> bool:
        return self.faults[GroupFault.LOSSY] > 0 and self.chance.random() < 0.3

    def wake_readers(self, call: int) -> None:
        """A log has grown: every read that waits for it answers."""
        for ticket in self.waiting.pop(call, ()):
            self.scheduler.call_later(self.latency_s(), partial(self.scheduler.wake, ticket))

    def drop_readers(self) -> None:
        """Connections have broken, or come back: what waits asks again."""
        for call in list(self.waiting):
            self.wake_readers(call)


class SimulatedConnection(Connection):
    """One thread's access, from a process of a history."""

    def __init__(
        self, server: StoreServer, process: VirtualProcess, group: str, call: int, patience_s: float
    ) -> None:
        self._server, self._process, self._call = server, process, call
        self._memory: MemoryConnection = server.memory.connect(group, call)
        self._patience_s = patience_s
        self._is_cancelled = False
        self._ticket: Ticket | None = None

    def append(self, entry: bytes, after: int) -> bool:
        def execute() -> bool:
            before = len(self._memory.read(0, 0.0))
            won = self._memory.append(entry, after)
            # An entry that is sent again wins as well, and is no other entry.
            if won and before == after:
                self._server.on_append(self._call, entry)
                self._server.wake_readers(self._call)
            return won

        return self._exchange(execute)

    def read(self, after: int, wait_s: float) -> list[bytes]:
        scheduler = self._server.scheduler
        until = scheduler.now_s + wait_s
        while True:
            entries = self._exchange(lambda: self._memory.read(after, 0.0))
            if entries or scheduler.now_s >= until:
                return entries
            # An entry may have come since the reply was sent: the request to wait finds it, as the real stores' do.
            if len(self._memory.read(0, 0.0)) > after:
                continue
            self._ticket = scheduler.ticket()
            self._server.waiting.setdefault(self._call, []).append(self._ticket)
            scheduler.park(until)
            self._ticket = None
            self._check()

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        return self._exchange(lambda: self._memory.arrive(barrier, member, payload))

    def claim(self, barrier: str, member: int, payload: bytes) -> bytes:
        return self._exchange(lambda: self._memory.claim(barrier, member, payload))

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        return self._exchange(lambda: self._memory.arrivals(barrier))

    def arrival(self, barrier: str, member: int) -> bytes | None:
        return self._exchange(lambda: self._memory.arrival(barrier, member))

    def beat(self, member: int, watched: int | None) -> int:
        return self._exchange(lambda: self._memory.beat(member, watched))

    def clear(self) -> None:
        """The keys stay: the history is checked by them."""
        self._exchange(lambda: None)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._ticket is not None:
            self._server.scheduler.wake(self._ticket)

    def close(self) -> None:
        """It holds nothing."""

    def _check(self) -> None:
        if self._is_cancelled:
            raise Cancelled

    def _exchange(self, execute: Callable[[], T]) -> T:
        scheduler = self._server.scheduler
        began = scheduler.now_s
        while True:
            self._check()
            replies = self._send(execute, scheduler.ticket())
            scheduler.park(scheduler.now_s + AGAIN_S + SLOW_S)
            self._ticket = None
            self._check()
            if replies:
                if isinstance(reply := replies[0], StoreError):
                    raise reply
                return reply
            if scheduler.now_s - began >= self._patience_s:
                raise StoreError(f"the store has not answered for {self._patience_s:g} s")

    def _send(self, execute: Callable[[], T], ticket: Ticket) -> list[T | StoreError]:
        """One request, whose reply wakes that wait. Returns the list that the reply comes into."""
        server, call_later, host = self._server, self._server.scheduler.call_later, self._process.host
        replies: list[T | StoreError] = []

        def at_server() -> None:
            if not server.is_reachable(host) or server.loses():
                return
            try:
                reply: T | StoreError = execute()
            except StoreError as error:
                reply = error
            if not server.loses():
                call_later(server.latency_s(), partial(at_client, reply))

        def at_client(reply: T | StoreError) -> None:
            if server.is_reachable(host):
                replies.append(reply)
                server.scheduler.wake(ticket)

        self._ticket = ticket
        call_later(server.latency_s(), at_server)
        return replies


class SimulatedGroupStore(Store):
    """The store as the product's options name it."""

    server: StoreServer
    patience_s: float = math.inf

    def connect(self, group: str, call: int) -> SimulatedConnection:
        return SimulatedConnection(self.server, self.server.scheduler.process, group, call, self.patience_s)
