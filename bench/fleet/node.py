"""One simulated node: answers orders as `nvrx_slurm.agent` does, with workers that start and stop at once."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import hiredis

from bench.fleet import wire
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.journal.records import (
    FromAgent,
    Heartbeat,
    NodeJoined,
    NodeReady,
    RendezvousClosed,
    RendezvousOpened,
    WorkerFailed,
    WorkersStarted,
    pack,
    unpack_assignment,
    unpack_order,
)
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.sealing import open_order, order_place, seal_heartbeat
from nvrx_slurm.util.ids import new_incarnation
from nvrx_slurm.util.job_key import JobKey

PORT = 29500
Send = Callable[[bytes], None]


class Link:
    """One connection to the store: commands go out, replies reach `on_reply` in order."""

    def __init__(self, store: StoreAddress) -> None:
        where = urlsplit(store.url)
        self.socket = socket.create_connection((where.hostname or "", where.port or 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = hiredis.Reader()
        self._ask(wire.command("AUTH", store.password or ""))
        self._ask(wire.command("SCRIPT", "LOAD", wire.JOIN_SCRIPT))
        self.socket.setblocking(False)
        self.send: Send = self.socket.sendall
        self.on_reply: Callable[[Any], None]

    def _ask(self, command: bytes) -> None:
        """Send a command and wait for its reply, before anything else uses the connection."""
        self.socket.sendall(command)
        while (reply := self._replies.gets()) is False:
            self._replies.feed(self.socket.recv(4096))
        if isinstance(reply, Exception):
            raise reply

    def readable(self) -> None:
        """Take what has arrived."""
        data = self.socket.recv(65536)
        assert data, "the store closed a connection"
        self._replies.feed(data)
        while (reply := self._replies.gets()) is not False:
            self.on_reply(reply)


class SimulatedNode:
    """Two connections, as an agent has: one for its blocking read of orders, one for all else.

    `on_assigned` is called when the node has read its own assignment of a cycle, `on_joined` when it has joined, with
    what the store says of the controller.
    """

    def __init__(
        self,
        name: str,
        keys: Keys,
        key: JobKey,
        connect: Callable[[], Link],
        *,
        keep_beats: int,
        on_assigned: Callable[[int], None],
        on_joined: Callable[[SimulatedNode, bytes], None],
    ) -> None:
        self.name, self._keys, self._key, self._keep_beats = name, keys, key, keep_beats
        self._beats = self._passed = 0
        self._on_assigned, self._on_joined = on_assigned, on_joined
        self.orders, self.commands = connect(), connect()
        self.orders.on_reply, self.commands.on_reply = self._on_orders, self._on_reply
        self.incarnation, self._seq = new_incarnation(), 0
        self._last = b"0-0"
        self._due: deque[int | None] = deque()  # replies on the way: a cycle's assignment, or an id (None)
        self._joined = False
        self._cycle = -1

    def begin(self) -> None:
        """Join, and send the first heartbeat."""
        joined = self._fact(NodeJoined, addr="127.0.0.1", port=PORT, pid=1)
        self.orders.send(wire.join(self._keys, joined.incarnation, self._key.sign(self._keys.inbox, pack(joined))))
        self.send_heartbeat()

    def send_heartbeat(self) -> None:
        heartbeat = Heartbeat(node=self.name, incarnation=self.incarnation, cycle=max(self._cycle, 0))
        self._beats += 1
        sealed = seal_heartbeat(self._key, self._keys.beats, heartbeat, self._beats)
        self._send(wire.beat(self._keys, self.incarnation, sealed, self._keep_beats))

    def fail(self) -> None:
        """One of its workers dies."""
        self._post(WorkerFailed, replica="main-0", cycle=self._cycle, rank=0, signal=9)

    def _on_orders(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            raise reply
        if not self._joined:
            self._joined, self._last = True, reply[0]
            self._on_joined(self, reply[2])
        else:
            for identity, fields in reply[0][1] if reply else ():
                self._last = identity
                self._obey(fields[1])
        self.orders.send(wire.orders(self._keys, self._last))

    def _obey(self, sealed: bytes) -> None:
        place = order_place(self._keys.orders, 0)
        self._passed, packed = open_order(self._key, place, sealed, self._passed)
        order = unpack_order(packed)
        if isinstance(order, RendezvousOpened) and 0 <= self._cycle < order.cycle:
            ready = {"replica": order.replica, "cycle": order.cycle, "port": PORT, "teardown_s": 0.001}
            self._post(NodeReady, **ready)
        elif isinstance(order, RendezvousClosed):
            self._due.append(order.cycle)
            self.commands.send(wire.assignment(self._keys, order.replica, order.cycle, self.name))

    def _on_reply(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            raise reply
        cycle = self._due.popleft()
        if cycle is None:
            return
        place = f"{self._keys.rendezvous('main-0', 0, cycle)} {self.name}"
        self._cycle, mine = cycle, unpack_assignment(self._key.verify(place, reply))
        self._on_assigned(cycle)
        pids = {mine.first_rank + local: 1000 + local for local in range(mine.workers)}
        self._post(WorkersStarted, replica="main-0", cycle=self._cycle, pids=pids, spawn_s=0.001)

    def _post(self, kind: type[FromAgent], **fields: Any) -> None:
        self._send(wire.post(self._keys, self._key.sign(self._keys.inbox, pack(self._fact(kind, **fields)))))

    def _send(self, data: bytes) -> None:
        """Send what is answered by an id, which is dropped."""
        self._due.append(None)
        self.commands.send(data)

    def _fact(self, kind: type[FromAgent], **fields: Any) -> FromAgent:
        self._seq += 1
        return kind(node=self.name, incarnation=self.incarnation, seq=self._seq, **fields)
