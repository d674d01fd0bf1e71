"""What processes use of the network: connections, listeners, datagrams, and calls to a service of another host.

A socket belongs to a host, not to a process. The code that sees its last holder die closes it
(`process.on_death(end.close)`); a listener, and what it has accepted, close with their process.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from nvrx_slurm.lab.simulation.network import Link, SimulatedNetwork
from nvrx_slurm.lab.simulation.process import Held, SimulatedProcess
from nvrx_slurm.lab.simulation.valkey_client import StoreRequest
from nvrx_slurm.util.tasks import settle

T = TypeVar("T")


class Sockets:
    """Every host's sockets."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self._listeners: dict[tuple[str, int], BoundSocket[ConnectionEnd]] = {}
        self._mailboxes: dict[tuple[str, int], BoundSocket[bytes]] = {}
        self._impatient: list[ConnectionEnd] = []
        network.when_cut = self._watch_silence

    def listen(
        self, host: str, process: SimulatedProcess, protocol: Callable[[], asyncio.Protocol]
    ) -> BoundSocket[ConnectionEnd]:
        """Accept connections for a process, as `loop.create_server` does; the kernel does so while it is frozen.
        After `close` no more are; those that were go on."""

        def accept(end: ConnectionEnd) -> None:
            process.on_death(end.close)
            process.call_later(0.0, lambda: Transport(end, process, protocol()))

        listener = self._bind(self._listeners, host, accept)
        process.on_death(listener.close)
        return listener

    def ports(self, host: str) -> list[int]:
        """On which a process of the host accepts connections; the newest comes last."""
        return [port for name, port in self._listeners if name == host]

    async def connect(self, source: str, host: str, port: int, *, timeout_s: float | None = None) -> ConnectionEnd:
        """A connection from `source`. Raises ConnectionRefusedError where nothing listens; waits while a link is cut.

        `timeout_s`: after so long without a sign of the other host its kernel gives the connection up
        (TCP_USER_TIMEOUT); None: never.
        """
        network = self.network
        there, back = network.link(source, host), network.link(host, source)
        future: asyncio.Future[ConnectionEnd] = network.loop.create_future()

        def accept() -> None:
            if (listener := self._listeners.get((host, port))) is None:
                reply(ConnectionRefusedError("Connection refused"))
                return
            near, far = ConnectionEnd(network, there), ConnectionEnd(network, back)
            near.peer, far.peer = far, near
            listener.arrives(far)
            reply(near)

        def reply(result: ConnectionEnd | OSError) -> None:
            network.send(back, land, result)

        def land(result: ConnectionEnd | OSError) -> None:
            # The caller has stopped waiting, and no other code would close the connection.
            if future.done() and isinstance(result, ConnectionEnd):
                result.close()
            settle(future, result)

        network.send(there, accept)
        end = await future
        if timeout_s is not None:
            end.timeout_s = timeout_s
            # Those that have ended go here: agents connect again and again.
            self._impatient = [each for each in self._impatient if not (each.closed or each.is_over)]
            self._impatient.append(end)
        return end

    def bind(self, host: str, arrives: Callable[[bytes], object]) -> BoundSocket[bytes]:
        """Take datagrams until closed: the kernel calls `arrives` with each, while a process is frozen too."""
        return self._bind(self._mailboxes, host, arrives)

    def dial(self, source: str, host: str, port: int) -> DialledSocket:
        """A datagram socket that was connect(2)ed to a port."""
        return DialledSocket(self.network, source, host, lambda: self._mailboxes.get((host, port)))

    def _bind(
        self, among: dict[tuple[str, int], BoundSocket[T]], host: str, arrives: Callable[[T], object]
    ) -> BoundSocket[T]:
        at = host, self.network.new_port()
        among[at] = bound = BoundSocket(*at, arrives, lambda: among.pop(at, None))
        return bound

    def _watch_silence(self) -> None:
        for end in self._impatient:
            end.watch_silence()


RESET = "Connection reset by peer"


class ConnectionEnd:
    """One end of a connection: bytes in order, and how it ends. `woken` is called, as the kernel, when there is
    something to take."""

    def __init__(self, network: SimulatedNetwork, link: Link) -> None:
        self.timeout_s: float | None = None
        self.peer: ConnectionEnd | None = None
        self.closed = False  # here
        self.is_over = False  # the other end was closed, or the connection broke
        self.over_by: OSError | None = None
        self.woken: Callable[[], object] = self._wake
        self._network, self._link = network, link
        self._arrives_at = 0.0
        self._unread: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    # ---- for its process

    def send(self, data: bytes) -> None:
        """Raises OSError once the connection is known to be broken."""
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.over_by is not None:
            # One exception is raised at each call: its traceback would grow by the frames of each.
            raise self.over_by.with_traceback(None)
        self._transmit(partial(ConnectionEnd._take, data=data))

    async def receive(self) -> bytes:
        """The bytes that have arrived; b"" after the other end was closed in good order. Raises OSError if not."""
        while not self._unread and not self.is_over:
            self._waiter = self._network.loop.create_future()
            await self._waiter
        return self.take()

    def take(self) -> bytes:
        """The same without waiting: b"" stands for the end, or for no bytes yet."""
        if not self._unread and self.over_by is not None:
            raise self.over_by.with_traceback(None)
        data = b"".join(self._unread)
        self._unread.clear()
        return data

    def silence_s(self) -> float:
        """Seconds since the other host's kernel last answered. Raises OSError when the connection is no more."""
        if self.closed or self.over_by is not None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return self._network.silence_s(self._link.source, self._link.target)

    # ---- for its kernel

    def close(self) -> None:
        """The other end gets an end of file, or a reset where something was left unread here."""
        if self.closed:
            return
        self.closed = True
        if self.over_by is None:
            self._transmit(partial(ConnectionEnd._end, over_by=ConnectionResetError(RESET) if self._unread else None))

    def reset(self) -> None:
        """A device in between, such as a firewall, breaks the connection: both ends notice."""
        for end in (self, self.peer):
            assert end is not None
            end._end(ConnectionResetError(RESET))

    def watch_silence(self) -> None:
        """A link was cut, and it may have been this one's: look again when the time is up."""
        assert self.timeout_s is not None
        if self._network.silence_s(self._link.source, self._link.target) == 0.0:
            self._network.loop.call_outside(self.timeout_s, self._give_up, self._network.loop.now_s)

    def _give_up(self, since_s: float) -> None:
        loop, silence_s = self._network.loop, self._network.silence_s(self._link.source, self._link.target)
        if silence_s and loop.now_s - silence_s <= since_s:  # else another cut, which has a timer of its own
            self._end(TimeoutError("Connection timed out"))

    def _transmit(self, event: Callable[[ConnectionEnd], object]) -> None:
        loop, peer = self._network.loop, self.peer

        def go(delay_s: float) -> None:
            # Not before what was sent earlier: TCP keeps the order, whatever each packet takes.
            self._arrives_at = max(self._arrives_at, loop.now_s + delay_s)
            loop.call_at(self._arrives_at, event, peer, context=Context())

        self._network.carry(self._link, go)

    def _take(self, data: bytes) -> None:
        if self.closed:
            self._transmit(partial(ConnectionEnd._end, over_by=ConnectionResetError(RESET)))
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


class HandshakeStream:
    """One end of a connection, read a few bytes at a time: what `liveness.introduce` asks for."""

    def __init__(self, end: ConnectionEnd) -> None:
        self.end = end
        self._unread = b""

    async def receive(self, most: int) -> bytes:
        if not self._unread:
            self._unread = await self.end.receive()
        data, self._unread = self._unread[:most], self._unread[most:]
        return data

    async def send(self, data: bytes) -> None:
        self.end.send(data)


class Transport(asyncio.Transport):
    """An accepted connection, for a protocol that asyncio's own loops would serve as well."""

    def __init__(self, end: ConnectionEnd, process: SimulatedProcess, protocol: asyncio.Protocol) -> None:
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


class BoundSocket(NamedTuple, Generic[T]):
    """A port: its kernel calls `arrives` with each datagram or connection. After `close` it refuses them."""

    host: str
    port: int
    arrives: Callable[[T], object]
    close: Callable[[], object]


class DialledSocket:
    """A datagram socket that was connect(2)ed: it gets an error when the other kernel refuses."""

    def __init__(
        self, network: SimulatedNetwork, source: str, target: str, mailbox: Callable[[], BoundSocket[bytes] | None]
    ) -> None:
        self._network, self._mailbox = network, mailbox
        self._there, self._back = network.link(source, target), network.link(target, source)
        self._refused = asyncio.Event()

    def send(self, data: bytes) -> None:
        """It may be lost. Raises ConnectionRefusedError if an earlier one was refused since."""
        self._raise_refused()
        self._fly(self._there, partial(self._arrive, data))

    async def receive(self) -> None:
        """Nothing ever comes; raises ConnectionRefusedError once one was refused."""
        await self._refused.wait()
        self._raise_refused()

    def _raise_refused(self) -> None:
        if self._refused.is_set():
            self._refused.clear()
            raise ConnectionRefusedError("Connection refused")

    def _arrive(self, data: bytes) -> None:
        if (mailbox := self._mailbox()) is None:
            self._fly(self._back, self._refused.set)  # ICMP: port unreachable
        else:
            mailbox.arrives(data)

    def _fly(self, link: Link, arrive: Callable[[], object]) -> None:
        network = self._network
        if not network.is_lost(link):
            network.loop.call_outside(network.delay_s(link), arrive)


class SimulatedFenceSocket(Held):
    """A node's fence socket: where its fence key arrives. Held by the agent until the supervisor has it."""

    def __init__(self, sockets: Sockets, host: str, key: bytes, agent: SimulatedProcess) -> None:
        self._mailbox = sockets.bind(host, self._arrives)
        super().__init__(self._mailbox.close)
        self.key = key
        self.armed_by: SimulatedProcess | None = None
        self._agent = agent
        self.held_by(agent)

    def getsockname(self) -> tuple[str, int]:
        return self._mailbox.host, self._mailbox.port

    def filenos(self) -> list[int]:
        return [self._mailbox.port]

    def close(self) -> None:
        self.release(self._agent)

    def _arrives(self, message: bytes) -> None:
        """A datagram: the filter lets only the key through. It kills while all processes are frozen, too."""
        if message == self.key and self.armed_by is not None:
            self.armed_by.kill()


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
        self._there, self._back = self._network.link(source, service.host), self._network.link(service.host, source)

    def call(self, request: StoreRequest) -> asyncio.Future[Any]:
        """The answer, or OSError where the connection is refused or breaks; on a cut link nothing, until it heals."""
        network, there = self._network, self._there
        call = Call(self._service, request, self._back)
        if there.breaks and network.chance.random() < there.breaks:
            # Half of these are carried out and lose their reply, half never arrive.
            call.is_broken = True
            if network.chance.random() < 0.5:
                call.answer(None)
                return call.future
        network.carry(there, call.leave)
        return call.future


class Call:
    """One request on its way there, and the reply on its way back. `is_broken`: no reply comes through."""

    __slots__ = ("_back", "_network", "_process", "_request", "_service", "future", "is_broken")

    def __init__(self, service: Service, request: StoreRequest, back: Link) -> None:
        self._service, self._request, self._back = service, request, back
        self._process, self._network = service.process, service.network
        self.future: asyncio.Future[Any] = asyncio.Future(loop=service.network.loop)
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
        self._network.send(self._back, settle, self.future, ConnectionResetError(RESET) if self.is_broken else reply)
