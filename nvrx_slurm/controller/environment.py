"""All that a controller touches beside the store: the nodes and their fences, its batch host, the job folder.

`LinuxEnvironment` is the real one; the simulation brings its own, and the controller's code is the same with both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from nvrx_slurm.cluster.slurm_job import SlurmJob, signalled_job
from nvrx_slurm.cluster.slurm_nodes import SlurmNode, node_state
from nvrx_slurm.controller.attribution_broker import Answered, AttributionBroker, AttributionBrokerProcess
from nvrx_slurm.controller.mirror import Mirror, read_copy
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.liveness import fence
from nvrx_slurm.liveness.connection import LivenessServer
from nvrx_slurm.util.files import JobFiles

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.1
MOST_DIALS = 8
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Channel(Protocol):
    """A way to a node's fence socket. Both methods raise ConnectionRefusedError once the node's kernel has refused,
    and other OSErrors as they occur."""

    def send(self, data: bytes) -> None: ...
    async def receive(self) -> None: ...


async def is_dead(addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S) -> bool:
    """Send `message` (the key, or `PROBE`) until the node's kernel refuses it: then the supervisor is dead.

    False when that has not happened within `within_s` seconds: it lives, or nothing can be known. `pause_s`: from the
    first message to the second; it doubles up to `LAST_PAUSE_S`.
    """
    channel = _FenceChannel(addr, port)
    try:
        return await send_fence(channel, message, within_s, pause_s)
    finally:
        channel.close()


async def send_fence(channel: Channel, message: bytes, within_s: float, pause_s: float) -> bool:
    """Send `message` again and again: whether it is refused within that time."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + within_s, pause_s
    while True:
        try:
            channel.send(message)
            async with asyncio.timeout(min(pause, max(0.0, deadline - loop.time()))):
                await channel.receive()
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            if loop.time() >= deadline:
                return False
        except OSError:  # no route at this moment
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_S)


class _FenceChannel:
    """A node's fence socket (`fence.py`): the key goes by UDP, and TCP says whether its holder lives."""

    def __init__(self, addr: str, port: int) -> None:
        self._address = (addr, port)
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._refused = asyncio.Event()
        self._dials: dict[asyncio.Task[None], None] = {}  # oldest first
        self._connected = 0

    def send(self, data: bytes) -> None:
        """Send the key, and connect once more unless a connection is up: its end will say the same."""
        self._raise_refused()
        if data != fence.PROBE:
            with contextlib.suppress(BlockingIOError):
                self._datagrams.sendto(data, self._address)
        if not self._connected:
            if len(self._dials) >= MOST_DIALS:  # on a lossy network the kernel itself repeats a SYN after a second
                next(iter(self._dials)).cancel()
            dial = asyncio.get_running_loop().create_task(self._dial())
            self._dials[dial] = None
            dial.add_done_callback(self._dialled)

    async def receive(self) -> None:
        await self._refused.wait()
        self._raise_refused()

    def close(self) -> None:
        for dial in self._dials:
            dial.cancel()
        self._datagrams.close()

    def _raise_refused(self) -> None:
        if self._refused.is_set():
            raise ConnectionRefusedError(f"{self._address[0]}:{self._address[1]} refuses connections")

    async def _dial(self) -> None:
        try:
            # Once more when a connection was up: it ends when its listener does, and the kernel refuses the next one.
            if await self._connect():
                await self._connect()
        except ConnectionRefusedError:
            self._refused.set()

    async def _connect(self) -> bool:
        """Connect, and wait for the end. Whether there was a connection. Raises ConnectionRefusedError."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
            # Close it by RST: the fence socket accepts no connection, and would keep each half-closed one.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            try:
                await loop.sock_connect(connection, self._address)
            except ConnectionRefusedError:
                raise
            except OSError:  # no route at this moment
                return False
            self._connected += 1
            try:
                with contextlib.suppress(OSError):
                    await loop.sock_recv(connection, 1)
            finally:
                self._connected -= 1
            return True

    def _dialled(self, dial: asyncio.Task[None]) -> None:
        self._dials.pop(dial, None)
        if not dial.cancelled():
            dial.exception()


# Called with a node and the incarnation of its agent.
NodeCallback = Callable[[str, str], None]


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
        """Record for the batch host, and for later commands, how the job ended."""
        ...

    def liveness_server(self, token: str, alive: NodeCallback, lost: NodeCallback) -> LivenessListener:
        """The controller's end of all liveness connections; it listens once it is started."""
        ...

    def attribution_broker(self, answered: Answered) -> AttributionBroker:
        """The process that asks the sources of attribution; it starts when it is needed."""
        ...

    async def is_dead(
        self, addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S
    ) -> bool:
        """What `is_dead` above promises."""
        ...

    async def node_state(self, node: str) -> SlurmNode | None:
        """What Slurm says of a node; None where it does not answer."""
        ...

    async def signalled_job(self, job_id: str, generation: int) -> SlurmJob | None:
        """What Slurm says of the job whose processes it has signalled; None where it does not answer."""
        ...

    def on_signal(self, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
        """Call back, from the event loop, whenever the batch host sends this signal."""
        ...

    def report_node(self, node: str, *, is_lost: bool) -> None:
        """Tell the batch host that a node has no agent, or that an agent has joined there."""
        ...


class LinuxEnvironment:
    """The job folder, sockets and Slurm's programs."""

    liveness_server = LivenessServer
    is_dead = staticmethod(is_dead)
    node_state = staticmethod(node_state)
    signalled_job = staticmethod(signalled_job)

    def __init__(self, folder: JobFolder, *, host_descriptor: int | None = None) -> None:
        self._folder, self._host_descriptor = folder, host_descriptor
        # A batch host that stands still, and reads nothing, must not hold up the controller.
        if host_descriptor is not None:
            os.set_blocking(host_descriptor, False)
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.files: JobFiles = folder
        self.mirror = Mirror(folder.events_path)

    def read_copy(self) -> list[Entry]:
        return read_copy(self._folder.events_path)

    def write_result(self, result: Result) -> None:
        self._folder.write_result(result)

    def attribution_broker(self, answered: Answered) -> AttributionBroker:
        return AttributionBrokerProcess(self._folder.node_log("attribution"), answered)

    def on_signal(self, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
        asyncio.get_running_loop().add_signal_handler(number, callback, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # the batch host starts the controller with it blocked

    def report_node(self, node: str, *, is_lost: bool) -> None:
        if self._host_descriptor is not None:
            with contextlib.suppress(OSError):  # a frozen batch host has 64 KiB unread; it starts no agents either
                os.write(self._host_descriptor, f"{'lost' if is_lost else 'joined'} {node}\n".encode())
