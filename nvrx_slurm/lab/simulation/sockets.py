"""What processes use of the network: connections, listeners, datagrams, and calls to a service of another host.

A socket belongs to a host, not to a process. The code that sees its last holder die closes it
(`process.on_death(end.close)`); a listener, and what it has accepted, close with their process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from nvrx_slurm.lab.faults.valkey.client import StoreRequest
from nvrx_slurm.lab.simulation.network import SimulatedNetwork, Way
from nvrx_slurm.lab.simulation.process import Dialled, Mailbox, SimulatedProcess
from nvrx_slurm.util.tasks import settle


class Sockets:
    """Every host's sockets."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._mailboxes: dict[tuple[str, int], Mailbox] = {}
        self._impatient: list[End] = []
        network.when_cut(self._watch_silence)

    def listen(self, host: str, process: SimulatedProcess, protocol: Callable[[], asyncio.Protocol]) -> Listener:
        """Accept connections for a process, as `loop.create_server` does."""
        at = host, self.network.new_port()
        self._listeners[at] = listener = Listener(at[1], process, protocol, lambda: self._listeners.pop(at, None))
        process.on_death(listener.close)
        return listener

    async def connect(self, source: str, host: str, port: int, *, timeout_s: float | None = None) -> End:
        """A connection from `source`. Raises ConnectionRefusedError where nothing listens; waits while a way is cut.

        `timeout_s`: after so long without a sign of the other host its kernel gives the connection up
        (TCP_USER_TIMEOUT); None: never.
        """
        network = self.network
        there, back = network.way(source, host), network.way(host, source)
        future: asyncio.Future[End] = network.loop.create_future()

        def arrive(delay_s: float) -> None:
            network.loop.call_outside(delay_s, accept)

        def accept() -> None:
            if (listener := self._listeners.get((host, port))) is None:
                reply(ConnectionRefusedError("Connection refused"))
                return
            near, far = End(network, there), End(network, back)
            near.peer, far.peer = far, near
            listener.accept(far)
            reply(near)

        def reply(result: End | OSError) -> None:
            network.carry(back, lambda delay_s: network.loop.call_outside(delay_s, land, result))

        def land(result: End | OSError) -> None:
            if future.done() and isinstance(result, End):
                result.close()
            settle(future, result)

        network.carry(there, arrive)
        end = await future
        if timeout_s is not None:
            end.timeout_s = timeout_s
            self._impatient = [each for each in self._impatient if not (each.closed or each.is_over)]
            self._impatient.append(end)
        return end

    def bind(self, host: str, delivered: Callable[[bytes], object]) -> Mailbox:
        """Take datagrams until closed: the kernel calls `delivered` with each, while a process is frozen too."""
        at = host, self.network.new_port()
        self._mailboxes[at] = mailbox = Mailbox(*at, delivered, lambda: self._mailboxes.pop(at, None))
        return mailbox

    def dial(self, source: str, host: str, port: int) -> Dialled:
        """A datagram socket that was connect(2)ed to a port."""
        return Dialled(self.network, source, host, lambda: self._mailboxes.get((host, port)))

    def _watch_silence(self) -> None:
        for end in self._impatient:
            end.watch_silence()


RESET = "Connection reset by peer"


class End:
    """One end of a connection: bytes in order, and how it ends. `woken` is called, as the kernel, when there is
    something to take."""

    def __init__(self, network: SimulatedNetwork, way: Way) -> None:
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
        """A device in between, such as a firewall, breaks the connection: both ends notice."""
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
        self,
        port: int,
        process: SimulatedProcess,
        protocol: Callable[[], asyncio.Protocol],
        closed: Callable[[], object],
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

    def __init__(self, end: End, process: SimulatedProcess, protocol: asyncio.Protocol) -> None:
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


class Service:
    """Listens on a host while a process serves it: alive, it answers; frozen, after its thaw; dead, its kernel
    refuses. A call that it has taken and not answered when it dies is reset."""

    def __init__(self, network: SimulatedNetwork, host: str) -> None:
        self.network, self.host = network, host
        self.process: SimulatedProcess | None = None
        self.open: dict[Call, None] = {}  # in the order in which they were taken

    def served_by(self, process: SimulatedProcess) -> None:
        """This process listens from now on, until it dies."""
        self.process = process
        process.on_death(self._reset_all)

    def _reset_all(self) -> None:
        for call in list(self.open):
            call.answer(ConnectionResetError(RESET))


class ServiceLink:
    """The way from one host to a service, and back (a `ServerLink`)."""

    def __init__(self, source: str, service: Service) -> None:
        self._service, self._network = service, service.network
        self._there, self._back = self._network.way(source, service.host), self._network.way(service.host, source)

    def call(self, request: StoreRequest) -> asyncio.Future[Any]:
        """The answer, or OSError where the connection is refused or breaks; on a cut way nothing, until it heals."""
        network, there = self._network, self._there
        call = Call(self._service, request, self._back)
        if there.breaks and network.chance.random() < there.breaks:
            call.is_broken = True
            if network.chance.random() < 0.5:
                call.answer(None)  # before it has arrived
                return call.future
        network.carry(there, call.leave)
        return call.future


class Call:
    """One request on its way there, and the reply on its way back. `is_broken`: no reply comes through."""

    __slots__ = ("_back", "_process", "_reply", "_request", "_service", "future", "is_broken")

    def __init__(self, service: Service, request: StoreRequest, back: Way) -> None:
        self._service, self._request, self._back = service, request, back
        self._process = service.process
        self._reply: Any = None
        self.future: asyncio.Future[Any] = service.network.loop.create_future()
        self.is_broken = False

    def leave(self, delay_s: float) -> None:
        """The request is under way."""
        process = self._process
        if process is None or not process.alive:
            self.answer(ConnectionRefusedError("Connection refused"))
        else:
            self._service.open[self] = None
            process.call_later(delay_s, self._request, self.answer)

    def answer(self, reply: Any) -> None:
        """Send the reply, or the exception that stands for one."""
        self._service.open.pop(self, None)
        self._reply = ConnectionResetError(RESET) if self.is_broken else reply
        self._service.network.carry(self._back, self._return)

    def _return(self, delay_s: float) -> None:
        self._service.network.loop.call_outside(delay_s, settle, self.future, self._reply)
