"""Both ends of the liveness connection on the simulated network: the product's own protocol, handshake and server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nvrx_slurm.journal.records import ControllerUp
from nvrx_slurm.lab.simulation.process import Held, SimulatedProcess
from nvrx_slurm.lab.simulation.sockets import End, Listener, Sockets
from nvrx_slurm.liveness import connection as liveness

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode

READ_BYTES = 256


class AgentConnection(Held):
    """The agent's end. The supervisor holds it too; it closes when both have let go of it or have died."""

    def __init__(self, end: End, agent: SimulatedProcess) -> None:
        super().__init__(end.close)
        self.end, self._agent = end, agent
        self._unread = b""
        self.session: liveness.Session | None = None  # once both ends have proven themselves
        self.held_by(agent)

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        self.release(self._agent)

    def say(self, word: bytes) -> None:
        assert self.session is not None
        self.end.send(self.session.put(word))

    async def hear(self) -> bytes:
        assert self.session is not None
        while data := await self.receive(READ_BYTES):
            if words := self.session.take(data):
                return words
        return b""

    def silence_s(self) -> float:
        return self.end.silence_s()

    async def receive(self, most: int) -> bytes:
        if not self._unread:
            self._unread = await self.end.receive()
        data, self._unread = self._unread[:most], self._unread[most:]
        return data

    async def send(self, data: bytes) -> None:
        self.end.send(data)


async def connect(
    node: SimulatedNode, agent: SimulatedProcess, controller: ControllerUp, incarnation: str
) -> AgentConnection:
    """As `liveness.connect` does it."""
    run = node.run
    timeout_s = run.plan.fault_tolerance.heartbeat.timeout
    async with asyncio.timeout(liveness.HANDSHAKE_S):
        end = await run.sockets.connect(node.name, run.HOST, controller.port, timeout_s=max(1.0, timeout_s))
        line = AgentConnection(end, agent)
        try:
            line.session = await liveness.introduce(
                line, token=run.address.token, node=node.name, incarnation=incarnation, port=controller.port
            )
        except BaseException:
            line.close()
            raise
    node.line = line
    return line


class ControllerConnections:
    """The controller's end of every agent's liveness connection."""

    def __init__(
        self, server: liveness.LivenessServer, sockets: Sockets, host: str, controller: SimulatedProcess
    ) -> None:
        self._server, self._sockets, self._host, self._controller = server, sockets, host, controller
        self._listener: Listener | None = None

    async def start(self, bind: str) -> int:
        self._listener = self._sockets.listen(self._host, self._controller, self._server.protocol)
        self._server.port = self._listener.port
        return self._listener.port

    def fence(self, node: str, incarnation: str) -> None:
        self._server.fence(node, incarnation)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._server.close()
