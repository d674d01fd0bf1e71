"""`python -m bench.fleet.connecting PORT FIRST COUNT SPREAD_S [flood]`: agents n<FIRST> … connect to a controller.

Each begins within SPREAD_S, and tries again as a real agent does. The job's token comes first on the input. A `flood`
is COUNT connections that send nothing, and are opened again as soon as they are closed.

    in    <token>
          begin
    out   ready
          <began> <ended> <again>    all are connected; monotonic seconds, and how many attempts failed
"""

from __future__ import annotations

import random
import select
import sys
from heapq import heappop, heappush

from bench.fleet.connection import SimulatedConnection
from nvrx_slurm.agent.heartbeat import FIRST_RETRY_S, LAST_RETRY_S
from nvrx_slurm.journal.folder import LOOPBACK
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.processes import raise_descriptor_limit


class ConnectingFleet:
    """All agents of this process, in one epoll loop."""

    def __init__(self, port: int, token: str, first: int, count: int, spread_s: float, *, flood: bool) -> None:
        self._port, self._token, self._first, self._count = port, token, first, count
        self._spread_s, self._flood = spread_s, flood
        self._clock = SystemClock()
        self._poller = select.epoll()
        self._connections: dict[int, tuple[int, SimulatedConnection]] = {}
        self._pauses = [FIRST_RETRY_S] * count
        self._due: list[tuple[float, int]] = []  # a heap: when which agent connects
        self._connected = self._again = 0

    def run(self) -> None:
        """Serve until the input ends."""
        began = self._clock.monotonic()
        for agent in range(self._count):
            heappush(self._due, (began + random.uniform(0.0, self._spread_s), agent))
        self._poller.register(sys.stdin.fileno(), select.EPOLLIN)
        while True:
            wait_s = max(0.0, self._due[0][0] - self._clock.monotonic()) if self._due else -1
            for descriptor, _ in self._poller.poll(wait_s):
                if descriptor == sys.stdin.fileno():
                    return
                self._serve(descriptor)
            if self._connected == self._count and began:
                print(began, self._clock.monotonic(), self._again, flush=True)
                began = 0.0
            while self._due and self._due[0][0] <= self._clock.monotonic():
                self._connect(heappop(self._due)[1])

    def _connect(self, agent: int) -> None:
        name = f"n{self._first + agent}"
        connection = SimulatedConnection((LOOPBACK, self._port), token=self._token, node=name, incarnation=name)
        self._connections[connection.socket.fileno()] = agent, connection
        self._poller.register(connection.socket, select.EPOLLIN)

    def _serve(self, descriptor: int) -> None:
        agent, connection = self._connections[descriptor]
        try:
            if self._flood:
                if not connection.socket.recv(4096):
                    raise ConnectionResetError
                return
            connection.readable()
            self._connected += connection.session is not None
        except OSError:
            self._poller.unregister(descriptor)
            del self._connections[descriptor]
            connection.socket.close()
            self._again += 1
            pause = 0.0 if self._flood else self._pauses[agent]
            self._pauses[agent] = min(2 * pause, LAST_RETRY_S)
            heappush(self._due, (self._clock.monotonic() + random.uniform(pause / 2, pause), agent))


if __name__ == "__main__":
    raise_descriptor_limit()
    where, first, count, spread, *rest = sys.argv[1:]
    fleet = ConnectingFleet(
        int(where), sys.stdin.readline().strip(), int(first), int(count), float(spread), flood="flood" in rest
    )
    print("ready", flush=True)
    if sys.stdin.readline():
        fleet.run()
