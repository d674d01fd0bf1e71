"""The real node: Linux, its processes, sockets and files."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from nvrx_slurm.agent.log_reader import LogReader
from nvrx_slurm.agent.node_health import NodeHealth
from nvrx_slurm.agent.output import Output
from nvrx_slurm.agent.progress import ProgressBoard, StepFiles
from nvrx_slurm.agent.stacks import Stacks
from nvrx_slurm.agent.workers import WorkerEvent, Workers
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.journal.records import ControllerUp
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.liveness import fence
from nvrx_slurm.util.ids import new_incarnation


class HeldPort:
    """A TCP port for the workers' rendezvous. The kernel chooses it for no other socket, neither to bind port 0 nor
    to connect from; one that names it, with SO_REUSEADDR, can bind it while it is held."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Its user is gone, or another port is held."""
        self._socket.close()


READ_BYTES = 256


class ProvenConnection:
    """The agent's end of the liveness connection, proven by both."""

    def __init__(self, connection: socket.socket, session: liveness.Session) -> None:
        self._connection, self._session = connection, session
        self._unsent = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, word: bytes) -> None:
        # To a frozen controller the socket's buffer fills up: words go out whole and in order, and one "alive" waits.
        if word != liveness.ALIVE or not self._unsent:
            self._unsent += self._session.put(word)
        self._unsent = self._unsent[self._connection.send(self._unsent) :]

    async def hear(self) -> bytes:
        loop = asyncio.get_running_loop()
        # A word may arrive in two pieces.
        while data := await loop.sock_recv(self._connection, READ_BYTES):
            if words := self._session.take(data):
                return words
        return b""

    def silence_s(self) -> float:
        return liveness.silence_s(self._connection)

    def close(self) -> None:
        self._connection.close()


class LinuxMachine(msgspec.Struct, frozen=True, kw_only=True):
    """This node. `runtime`: its folder in memory, which workers and agent share, and `lock` what locks it; `token`:
    proves connections."""

    node: str
    token: str
    bounds: FaultToleranceSpec
    runtime: Path
    lock: int
    output: Output
    stacks: Stacks
    health: NodeHealth
    step_files: StepFiles
    log_reader: LogReader

    hold_port = HeldPort
    open_fence_socket = staticmethod(fence.open_fence_socket)
    new_incarnation = staticmethod(new_incarnation)

    @property
    def pid(self) -> int:
        return os.getpid()

    def workers(self, post: Callable[[WorkerEvent], None]) -> Workers:
        return Workers(post, lock=self.lock)

    def board(
        self,
        on_first_step: Callable[[int, int], None],
        on_failing: Callable[[int, int, str, float | None], None],
        on_restart: Callable[[InProcessRestart], None],
    ) -> ProgressBoard:
        return ProgressBoard(self.runtime, on_first_step, on_failing, on_restart)

    async def connect(self, controller: ControllerUp, incarnation: str) -> ProvenConnection:
        connection, session = await liveness.connect(
            controller.host,
            controller.port,
            token=self.token,
            node=self.node,
            incarnation=incarnation,
            interval_s=self.bounds.heartbeat.interval,
            timeout_s=self.bounds.heartbeat.timeout,
        )
        return ProvenConnection(connection, session)

    def random_s(self, most_s: float) -> float:
        return random.uniform(0.0, most_s)

    def on_signal(self, number: signal.Signals, callback: Callable[[str], None]) -> None:
        asyncio.get_running_loop().add_signal_handler(number, callback, number.name)
