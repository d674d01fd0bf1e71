"""One simulated node: answers orders as `nvrx_slurm.agent` does, with workers that start and stop at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import hiredis

from bench.fleet import wire
from nvrx_slurm.ids import new_incarnation
from nvrx_slurm.records import (
    Beat,
    FromAgent,
    NodeJoined,
    NodeReady,
    RoundClosed,
    RoundOpened,
    WorkerFailed,
    WorkersStarted,
    pack,
    unpack_assignment,
    unpack_order,
)
from nvrx_slurm.store.keys import Keys

PORT = 29500
Send = Callable[[bytes], None]


class Link:
    """One connection to the store: commands go out, replies reach `heard` in order."""

    def __init__(self, address: tuple[str, int], password: str) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = hiredis.Reader()
        self.socket.sendall(wire.auth(password))
        assert self.socket.recv(64) == b"+OK\r\n", "the store refuses the password"
        self.socket.setblocking(False)
        self.send: Send = self.socket.sendall
        self.heard: Callable[[Any], None]

    def readable(self) -> None:
        """Take what is there."""
        self._replies.feed(self.socket.recv(65536))
        while (reply := self._replies.gets()) is not False:
            self.heard(reply)


class SimulatedNode:
    """Two connections, as an agent has: one for its blocking read of orders, one for all else.

    `assigned` is called when the node has read its own assignment of a cycle.
    """

    def __init__(
        self, name: str, keys: Keys, connect: Callable[[], Link], keep_beats: int, assigned: Callable[[int], None]
    ) -> None:
        self.name, self._keys, self._keep_beats, self._assigned = name, keys, keep_beats, assigned
        self.listening, self.speaking = connect(), connect()
        self.listening.heard, self.speaking.heard = self._on_orders, self._on_reply
        self.incarnation, self._seq = new_incarnation(), 0
        self._last = b"0-0"
        self._asked: list[int] = []  # cycles whose assignment was asked for and is not here yet
        self._skip = 0  # replies on the way that say nothing new
        self._began = False
        self._cycle = -1

    def begin(self) -> None:
        """Join, with the first sign of life beside it."""
        joined = self._fact(NodeJoined, addr="127.0.0.1", port=PORT, pid=1)
        self.listening.send(wire.join(self._keys, pack(joined)))
        self.beat()

    def beat(self) -> None:
        sign = Beat(node=self.name, incarnation=self.incarnation, cycle=max(self._cycle, 0))
        self._say(wire.beat(self._keys, pack(sign), self._keep_beats))

    def fail(self) -> None:
        """One of its workers dies."""
        self._tell(WorkerFailed, replica="main-0", cycle=self._cycle, rank=0, signal=9)

    def _on_orders(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            raise reply
        if not self._began:
            self._began, self._last = True, reply[0]
        else:
            for identity, fields in reply[0][1] if reply else ():
                self._last = identity
                self._obey(fields[1])
        self.listening.send(wire.orders(self._keys, self._last))

    def _obey(self, packed: bytes) -> None:
        order = unpack_order(packed)
        if isinstance(order, RoundOpened) and 0 <= self._cycle < order.cycle:
            ready = {"replica": order.replica, "cycle": order.cycle, "port": PORT, "teardown_s": 0.001}
            self._tell(NodeReady, **ready)
        elif isinstance(order, RoundClosed):
            self._asked.append(order.cycle)
            self.speaking.send(wire.assignment(self._keys, order.replica, order.cycle, self.name))

    def _on_reply(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            raise reply
        if self._skip:
            self._skip -= 1
            return
        self._cycle = self._asked.pop(0)
        mine = unpack_assignment(reply)
        self._assigned(self._cycle)
        pids = {mine.first_rank + local: 1000 + local for local in range(mine.workers)}
        self._tell(WorkersStarted, replica="main-0", cycle=self._cycle, pids=pids, spawn_s=0.001)

    def _tell(self, kind: type[FromAgent], **fields: Any) -> None:
        self._say(wire.tell(self._keys, pack(self._fact(kind, **fields))))

    def _say(self, data: bytes) -> None:
        """Send what is answered by an id that nobody needs. Never while an assignment is on its way."""
        self._skip += 1
        self.speaking.send(data)

    def _fact(self, kind: type[FromAgent], **fields: Any) -> FromAgent:
        self._seq += 1
        return kind(node=self.name, incarnation=self.incarnation, seq=self._seq, **fields)
