"""All that a controller touches beside the store: the nodes, its batch host, the job folder.

`LinuxEnvironment` is the real one; the simulation brings its own, and the controller's code is the same with both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from nvrx_slurm.cluster.slurm_nodes import SlurmNode, node_state
from nvrx_slurm.controller import fencing
from nvrx_slurm.controller.attribution_broker import Answered, AttributionBroker, AttributionBrokerProcess
from nvrx_slurm.controller.fencing import FIRST_PAUSE_S
from nvrx_slurm.controller.mirror import Mirror, read_copy
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.liveness.connection import LivenessServer
from nvrx_slurm.util.files import JobFiles

NodeCallback = Callable[[str, str], None]
"""Called with a node and the incarnation of its agent."""


class LivenessListener(Protocol):
    """What `connection.LivenessServer` promises."""

    async def start(self, bind: str) -> int: ...
    def fence(self, node: str, incarnation: str) -> None: ...
    async def close(self) -> None: ...


class JournalMirror(Protocol):
    """What `mirror.Mirror` promises."""

    def start(self, journal: Sequence[Entry]) -> None: ...
    def last_number(self) -> int: ...
    def add(self, entries: Sequence[Entry]) -> None: ...
    def close(self, timeout_s: float) -> None: ...


class ControllerEnvironment(Protocol):
    """`host` and `pid` are this process's; `files` says where the job's lie; `mirror` is the journal's copy there."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def files(self) -> JobFiles: ...
    @property
    def mirror(self) -> JournalMirror: ...

    def read_copy(self) -> list[Entry]:
        """Every whole entry of the journal's copy."""
        ...

    def write_result(self, result: Result) -> None:
        """Tell the batch host, and whoever asks later, how the job ended."""
        ...

    def liveness_server(self, token: str, alive: NodeCallback, lost: NodeCallback) -> LivenessListener:
        """The controller's end of all liveness connections; it listens once it is started."""
        ...

    def attribution_broker(self, answered: Answered) -> AttributionBroker:
        """Who asks the sources of attribution; it starts when it is needed."""
        ...

    async def is_dead(
        self, addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S
    ) -> bool:
        """What `fencing.is_dead` promises."""
        ...

    async def node_state(self, node: str) -> SlurmNode | None:
        """What Slurm says of a node; None where it does not answer."""
        ...

    def on_signal(self, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
        """Call back, from the event loop, whenever the batch host sends this signal."""
        ...


class LinuxEnvironment:
    """The job folder, sockets and Slurm's programs."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.files: JobFiles = folder
        self.mirror = Mirror(folder.events_path)

    def read_copy(self) -> list[Entry]:
        return read_copy(self._folder.events_path)

    def write_result(self, result: Result) -> None:
        self._folder.write_result(result)

    def liveness_server(self, token: str, alive: NodeCallback, lost: NodeCallback) -> LivenessServer:
        return LivenessServer(token, alive, lost)

    def attribution_broker(self, answered: Answered) -> AttributionBroker:
        return AttributionBrokerProcess(self._folder.node_log("attribution"), answered)

    async def is_dead(
        self, addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S
    ) -> bool:
        return await fencing.is_dead(addr, port, message, within_s, pause_s=pause_s)

    async def node_state(self, node: str) -> SlurmNode | None:
        return await node_state(node)

    def on_signal(self, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
        asyncio.get_running_loop().add_signal_handler(number, callback, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # the batch host starts us with it blocked
