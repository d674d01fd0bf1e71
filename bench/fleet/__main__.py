"""`python -m bench.fleet FOLDER FIRST COUNT [connected]`: nodes n<FIRST> … of the job in FOLDER.

They do what their input says, and `connected` ones connect to the controller too, once they have joined:

    in    begin     every node joins
          fail      a worker of the first node dies
    out   ready     all are connected to the store
          <cycle> <began> <ended>    all have read their assignment of the cycle; monotonic seconds, `began` is when
                                     `begin` or `fail` was obeyed here (0: it was not)
"""

from __future__ import annotations

import random
import select
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count as count_from
from pathlib import Path

from bench.fleet.connection import SimulatedConnection
from bench.fleet.node import Link, SimulatedNode
from nvrx_slurm.agent.heartbeat import FIRST_RETRY_S, SPREAD_S_PER_NODE
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import ControllerUp, unpack_order
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.job_key import JobKey


class SimulatedFleet:
    """All nodes of this process, in one epoll loop: a loop with more to it would measure itself."""

    def __init__(self, folder: JobFolder, first: int, count: int, *, connected: bool) -> None:
        store, plan = folder.read_store(), folder.read_plan()
        assert store is not None, f"{folder.path} has no store.json"
        self._store = store
        self._clock = SystemClock()
        self._interval_s = plan.fault_tolerance.heartbeat.interval
        self._links: dict[int, Link | SimulatedConnection] = {}
        self._reconnects: dict[int, Callable[[], None]] = {}  # how to open each liveness connection again
        self._poller = select.epoll()
        self._began = 0.0
        self._assigned = Counter[int]()
        self._keys, self._key = Keys(store.job), JobKey(store.token)
        keys, keep_beats = self._keys, 2 * plan.total_nodes + 16
        self._nodes = [
            SimulatedNode(
                f"n{index}",
                keys,
                self._key,
                self._connect_to_store,
                keep_beats=keep_beats,
                on_assigned=self._has_assignment,
                on_joined=self._connect_later if connected else lambda node, packed: None,
            )
            for index in range(first, first + count)
        ]
        self._spread_s = plan.total_nodes * SPREAD_S_PER_NODE
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # a heap: when, a tie-breaker, what
        self._count = count_from(0)

    def run(self) -> None:
        """Serve until the input ends."""
        self._poller.register(sys.stdin.fileno(), select.EPOLLIN)
        print("ready", flush=True)
        while True:
            wait_s = max(0.0, self._later[0][0] - self._clock.monotonic()) if self._later else -1
            for descriptor, _ in self._poller.poll(wait_s):
                if descriptor != sys.stdin.fileno():
                    self._serve(descriptor)
                elif not self._obey(sys.stdin.readline()):
                    return
            now = self._clock.monotonic()
            while self._later and self._later[0][0] <= now:
                heappop(self._later)[2]()

    def _serve(self, descriptor: int) -> None:
        try:
            self._links[descriptor].readable()
        except ConnectionError:
            if descriptor not in self._reconnects:
                raise
            self._poller.unregister(descriptor)  # dropped for another, since this process was slow to answer
            del self._links[descriptor]
            self._do_later(random.uniform(FIRST_RETRY_S / 2, FIRST_RETRY_S), self._reconnects.pop(descriptor))

    def _obey(self, line: str) -> bool:
        self._began = self._clock.monotonic()
        if line == "begin\n":
            for node in self._nodes:
                node.begin()
                self._do_later(self._interval_s, partial(self._beat, node))
        elif line == "fail\n":
            self._nodes[0].fail()
        return bool(line)

    def _beat(self, node: SimulatedNode) -> None:
        node.send_heartbeat()
        self._do_later(self._interval_s, partial(self._beat, node))

    def _connect_later(self, node: SimulatedNode, packed: bytes) -> None:
        self._do_later(random.uniform(0.0, self._spread_s), partial(self._connect_to_controller, node, packed))

    def _do_later(self, delay_s: float, work: Callable[[], None]) -> None:
        heappush(self._later, (self._clock.monotonic() + delay_s, next(self._count), work))

    def _has_assignment(self, cycle: int) -> None:
        self._assigned[cycle] += 1
        if self._assigned[cycle] == len(self._nodes):
            print(cycle, self._began, self._clock.monotonic(), flush=True)
            self._began = 0.0

    def _connect_to_store(self) -> Link:
        link = Link(self._store)
        self._add(link)
        return link

    def _connect_to_controller(self, node: SimulatedNode, packed: bytes) -> None:
        up = unpack_order(self._key.verify(self._keys.controller, packed))
        assert isinstance(up, ControllerUp), "the join came before the controller"
        address, token = (up.host, up.port), self._store.token
        connection = SimulatedConnection(address, token=token, node=node.name, incarnation=node.incarnation)
        self._reconnects[connection.socket.fileno()] = partial(self._connect_to_controller, node, packed)
        self._add(connection)

    def _add(self, link: Link | SimulatedConnection) -> None:
        self._links[link.socket.fileno()] = link
        self._poller.register(link.socket, select.EPOLLIN)


if __name__ == "__main__":
    path, first, count, *rest = sys.argv[1:]
    SimulatedFleet(JobFolder(Path(path)), int(first), int(count), connected="connected" in rest).run()
