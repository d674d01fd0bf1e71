"""Connections, as the kernels of their two hosts have them: bytes in order, and how they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial

from nvrx_slurm.lab.faults.futures import settle
from nvrx_slurm.lab.simulation.network import Network, Way
from nvrx_slurm.lab.simulation.process import Process

RESET = "Connection reset by peer"


class End:
    """One end of a connection: bytes in order, and how it ends. `woken` is called, as the kernel, when there is
    something to take."""

    def __init__(self, network: Network, way: Way) -> None:
        self.timeout_s: float | None = None
        self.peer: End | None = None
        self.closed = False  # here
        self.is_over = False  # the other end was closed, or the connection broke
        self.over_by: OSError | None = None
        self.woken: Callable[[], object] = self._wake
        self._network, self._way = network, way
        self._arrives_at = 0.0  # bytes keep their order
        self._unread: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    # ---- for its process

    def send(self, data: bytes) -> None:
        """Raises OSError once the connection is known to be broken."""
        if self.closed:
            raise OSError("Bad file descriptor")
        if self.over_by is not None:
            raise self.over_by.with_traceback(None)
        self._transmit(partial(End._take, data=data))

    async def receive(self) -> bytes:
        """What has come; b"" when the other end was closed in good order. Raises OSError when it broke."""
        while not self._unread and not self.is_over:
            self._waiter = self._network.loop.create_future()
            await self._waiter
        return self.take()

    def take(self) -> bytes:
        """What has come, without waiting: b"" stands for the end, or for nothing. Raises OSError when it broke."""
        if not self._unread and self.over_by is not None:
            raise self.over_by.with_traceback(None)
        data = b"".join(self._unread)
        self._unread.clear()
        return data

    def silence_s(self) -> float:
        """Seconds since the other host's kernel last answered. Raises OSError when the connection is no more."""
        if self.closed or self.over_by is not None:
            raise OSError("Bad file descriptor")
        return self._network.silence_s(self._way.source, self._way.target)

    # ---- for its kernel

    def close(self) -> None:
        """The other end hears of it: in good order, unless something was left unread here."""
        if self.closed:
            return
        self.closed = True
        if self.over_by is None:
            self._transmit(partial(End._end, over_by=ConnectionResetError(RESET) if self._unread else None))

    def reset(self) -> None:
        """Somebody in between breaks the connection: both ends hear of it."""
        for end in (self, self.peer):
            assert end is not None
            end._end(ConnectionResetError(RESET))

    def watch_silence(self) -> None:
        """A way was cut, and it may have been this one's: look again when the time is up."""
        assert self.timeout_s is not None
        if self._network.silence_s(self._way.source, self._way.target) == 0.0:
            self._network.loop.call_outside(self.timeout_s, self._give_up, self._network.loop.now_s)

    def _give_up(self, since_s: float) -> None:
        loop, silence_s = self._network.loop, self._network.silence_s(self._way.source, self._way.target)
        if silence_s and loop.now_s - silence_s <= since_s:
            self._end(TimeoutError("Connection timed out"))

    def _transmit(self, event: Callable[[End], object]) -> None:
        loop, peer = self._network.loop, self.peer

        def go(delay_s: float) -> None:
            self._arrives_at = max(self._arrives_at, loop.now_s + delay_s)
            loop.call_at(self._arrives_at, event, peer, context=Context())

        self._network.carry(self._way, go)

    def _take(self, data: bytes) -> None:
        if self.closed:
            self._transmit(partial(End._end, over_by=ConnectionResetError(RESET)))
        elif not self.is_over:
            self._unread.append(data)
            self.woken()

    def _end(self, over_by: OSError | None) -> None:
        if not self.closed and self.over_by is None:
            self.is_over, self.over_by = True, over_by
            self.woken()

    def _wake(self) -> None:
        if self._waiter is not None:
            settle(self._waiter, None)


class Listener:
    """A port where connections are accepted. While its process is frozen, its kernel accepts them. After `close` no
    more are; those that were go on."""

    def __init__(
        self, port: int, process: Process, protocol: Callable[[], asyncio.Protocol], closed: Callable[[], object]
    ) -> None:
        self.port, self.close = port, closed
        self._process, self._protocol = process, protocol

    def accept(self, end: End) -> None:
        self._process.on_death(end.close)
        self._process.call_later(0.0, self._serve, end)

    def _serve(self, end: End) -> None:
        Transport(end, self._process, self._protocol())


class Transport(asyncio.Transport):
    """An accepted connection, for a protocol that asyncio's own loops would serve as well."""

    def __init__(self, end: End, process: Process, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._end, self._process, self._protocol = end, process, protocol
        self._lost = False
        end.woken = lambda: process.call_later(0.0, self._read)
        protocol.connection_made(self)
        self._read()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._end.closed and self._end.over_by is None:
            self._end.send(bytes(data))

    def close(self) -> None:
        self._end.close()
        self._process.call_later(0.0, self._lose, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._end.closed

    def _read(self) -> None:
        if self._lost or self._end.closed:
            return
        try:
            data = self._end.take()
        except OSError as error:
            self._lose(error)
            return
        if data:
            self._protocol.data_received(data)
        if self._end.is_over:
            self._lose(self._end.over_by)

    def _lose(self, error: OSError | None) -> None:
        if not self._lost:
            self._lost = True
            self._end.close()
            self._protocol.connection_lost(error)
