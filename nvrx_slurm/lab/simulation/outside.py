"""All that a controller touches beside the store, in a history: what `controller/environment.py` asks for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.cluster.slurm_nodes import SlurmNode
from nvrx_slurm.controller.attribution_broker import Answered
from nvrx_slurm.controller.environment import FIRST_PAUSE_S, NodeCallback, send_fence
from nvrx_slurm.journal.folder import Result
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.lab.simulation.process import Process
from nvrx_slurm.lab.simulation.sources import SimulatedBroker
from nvrx_slurm.lab.simulation.tethers import ControllerTethers
from nvrx_slurm.liveness.connection import LivenessServer
from nvrx_slurm.util.files import JobFiles

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.history import History

SLURM_ANSWERS_S = 0.05


class SimulatedMirror:
    """The journal's copy in the job folder: what it holds outlives every controller."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def start(self, journal: Sequence[Entry]) -> None:
        last = self.last_number()
        self._entries += [entry for entry in journal if entry.n > last]

    def last_number(self) -> int:
        return self._entries[-1].n if self._entries else 0

    def add(self, entries: Sequence[Entry]) -> None:
        self._entries += entries

    def close(self, timeout_s: float) -> None:
        pass


class SimulatedEnvironment:
    """For one controller process."""

    def __init__(self, history: History, process: Process, pid: int) -> None:
        self._history, self._process = history, process
        self.host, self.pid = history.HOST, pid
        self.files = JobFiles(Path("/simulated"))
        self.mirror = SimulatedMirror(history.copy)

    def read_copy(self) -> list[Entry]:
        return list(self._history.copy)

    def write_result(self, result: Result) -> None:
        self._history.result = result

    def liveness_server(self, token: str, alive: NodeCallback, lost: NodeCallback) -> ControllerTethers:
        server = LivenessServer(token, alive, lost)
        return ControllerTethers(server, self._history.sockets, self.host, self._process)

    def attribution_broker(self, answered: Answered) -> SimulatedBroker:
        return SimulatedBroker(self._history, self._process, answered)

    async def is_dead(
        self, addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S
    ) -> bool:
        channel = self._history.sockets.dial(self.host, addr, port)
        return await send_fence(channel, message, within_s, pause_s)

    async def node_state(self, node: str) -> SlurmNode | None:
        await asyncio.sleep(SLURM_ANSWERS_S)
        return SlurmNode(node, "IDLE" if self._history.nodes[node].has_power else "DOWN*")

    def on_signal(self, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
        self._history.loop.add_signal_handler(number, callback, number)
