"""`python -m bench.fleet.heartbeats FOLDER FIRST COUNT CONNECTIONS`: nodes n<FIRST> … join, and then only send
heartbeats.

Each sends one an interval, evenly spread over it, as long as that of a node that trains: eight workers, each with its
step and an open section. Nodes share the connections; one write carries what is due on each of them.

    in    begin             every node joins, and sends heartbeats from now on
          silence NAME…     these send no more
    out   ready             connected
          <name> <t>        seconds since the epoch of its last heartbeat
"""

from __future__ import annotations

import select
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.fleet import wire
from bench.fleet.node import PORT, Link
from nvrx_slurm.agent.heartbeat import TRIM_EVERY
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Heartbeat, NodeJoined, pack
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.sealing import seal_heartbeat
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.ids import new_incarnation
from nvrx_slurm.util.job_key import JobKey

WORKERS = 8
TICK_S = 0.01


class HeartbeatNode:
    """A node that sends heartbeats."""

    def __init__(self, index: int, keys: Keys, key: JobKey, keep: int) -> None:
        self.name, self.incarnation = f"n{index}", new_incarnation()
        self.silent, self.last_at = False, 0.0
        self._keys, self._key, self._keep = keys, key, keep
        self._beats = 0
        self._ranks = range(WORKERS * (index - 1), WORKERS * index)
        self._step = index % TRIM_EVERY  # not all of them trim at once

    def join(self) -> bytes:
        fact = NodeJoined(node=self.name, incarnation=self.incarnation, seq=1, addr="127.0.0.1", port=PORT)
        return wire.join(self._keys, fact.incarnation, self._key.sign(self._keys.inbox, pack(fact)))

    def heartbeat(self, at: float) -> bytes:
        self.last_at = at
        self._step += 1
        self._beats += 1
        heartbeat = Heartbeat(
            node=self.name,
            incarnation=self.incarnation,
            state="active",
            replica="main-0",
            steps=dict.fromkeys(self._ranks, self._step),
            quiet=dict.fromkeys(self._ranks, 0.25),
            sections=dict.fromkeys(self._ranks, (("train", 0.25),)),
        )
        keep = self._keep if self._step % TRIM_EVERY == 0 else None
        sealed = seal_heartbeat(self._key, self._keys.beats, heartbeat, self._beats)
        return wire.beat(self._keys, self.incarnation, sealed, keep)


class HeartbeatFleet:
    """All nodes of this process, in turn: heartbeat number k is of node k modulo their count."""

    def __init__(self, folder: JobFolder, first: int, count: int, connections: int) -> None:
        address, plan = folder.read_store(), folder.read_plan()
        assert address is not None, f"{folder.path} has no store.json"
        keys, keep = Keys(address.job), 2 * plan.total_nodes + 16
        key = JobKey(address.token)
        self._nodes = [HeartbeatNode(index, keys, key, keep) for index in range(first, first + count)]
        self._links = [Link(address) for _ in range(connections)]
        for link in self._links:
            link.socket.setblocking(True)  # a store that is behind delays all nodes, as it should
            link.on_reply = _raise_error
        self._by_descriptor = {link.socket.fileno(): link for link in self._links}
        self._per_second = count / plan.fault_tolerance.heartbeat.interval
        self._clock = SystemClock()
        self._began: float | None = None
        self._sent = 0

    def run(self) -> None:
        """Serve until the input ends."""
        poller = select.epoll()
        for descriptor in (sys.stdin.fileno(), *self._by_descriptor):
            poller.register(descriptor, select.EPOLLIN)
        print("ready", flush=True)
        next_tick = self._clock.monotonic()
        while True:
            for descriptor, _ in poller.poll(max(0.0, next_tick - self._clock.monotonic())):
                if link := self._by_descriptor.get(descriptor):
                    link.readable()
                elif not self._obey(sys.stdin.readline().split()):
                    return
            if (now := self._clock.monotonic()) >= next_tick:
                next_tick = now + TICK_S
                self._send_due(now)

    def _obey(self, words: list[str]) -> bool:
        if words == ["begin"]:
            for index, node in enumerate(self._nodes):
                self._links[index % len(self._links)].send(node.join())
            self._began = self._clock.monotonic()
        elif words[:1] == ["silence"]:
            for node in self._nodes:
                if node.name in words:
                    node.silent = True
                    print(node.name, node.last_at, flush=True)
        return bool(words)

    def _send_due(self, now: float) -> None:
        """Send what is due."""
        if self._began is None:
            return
        due, wall = int((now - self._began) * self._per_second), self._clock.wall()
        outgoing = defaultdict[int, list[bytes]](list)
        for number in range(self._sent, due):
            index = number % len(self._nodes)
            if not self._nodes[index].silent:
                outgoing[index % len(self._links)].append(self._nodes[index].heartbeat(wall))
        for link, heartbeats in outgoing.items():
            self._links[link].send(b"".join(heartbeats))
        self._sent = due


def _raise_error(reply: Any) -> None:
    """Of the replies to joins and heartbeats only errors matter."""
    if isinstance(reply, Exception):
        raise reply


if __name__ == "__main__":
    path, first, count, connections = sys.argv[1:]
    HeartbeatFleet(JobFolder(Path(path)), int(first), int(count), int(connections)).run()
