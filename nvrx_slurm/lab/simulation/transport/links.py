"""Links between readers and servers of payloads: latency, stalls, resets, torn and corrupt bytes, silent deaths."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from random import Random

from nvrx_slurm.lab.simulation.threads import ThreadScheduler, Ticket, VirtualProcess, VirtualThread
from nvrx_slurm.lab.simulation.transport.shape import PayloadFault
from nvrx_slurm.transport.errors import PayloadTimeout, PayloadTruncated, PeerReset, TransportError
from nvrx_slurm.transport.protocol import (
    AdmissionCheck,
    Backend,
    PeerLink,
    PortListener,
    Seen,
    host_and_port,
    pass_through,
)

LATENCIES_S = (0.0001, 0.001)
SLOW_SHARE, SLOW_S = 0.02, 0.4
# What arrives at last: the peer has closed the link, or its kernel has reset it.
_END, _RESET = b"", None


class PayloadNetwork:
    """The hosts, the ports on them, and what is wrong between them."""

    def __init__(self, scheduler: ThreadScheduler, chance: Random) -> None:
        self.scheduler, self.chance = scheduler, chance
        self.listeners: dict[str, SimulatedListener] = {}
        self.faults: Counter[str] = Counter()  # how many last: of a kind; by host or address: that cut it off
        self.asked: list[tuple[float, str, str]] = []  # when, which process, which address
        self.ports = iter(range(20_000, 30_000))

    def is_cut(self, *places: str) -> bool:
        return any(self.faults[place] for place in places)

    def latency_s(self) -> float:
        if self.chance.random() < SLOW_SHARE:
            return self.chance.uniform(0.0, SLOW_S)
        return self.chance.uniform(*LATENCIES_S)


class SimulatedLink:
    """One end of a connection. Bytes arrive in order, as messages; what was sent before a death still arrives."""

    needs_checksum = True

    def __init__(self, network: PayloadNetwork, process: VirtualProcess, address: str) -> None:
        self._network, self._scheduler = network, network.scheduler
        self.process, self._address = process, address
        self.peer: SimulatedLink = self
        self._arrived: deque[bytes | None] = deque()
        self._arrives_at = 0.0
        self._ticket: Ticket | None = None
        self._is_cut = self._is_closed = False
        process.on_death(self._owner_died)

    # ---- PeerLink

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        self._scheduler.maybe_switch()
        self._check()
        network = self._network
        if network.faults[PayloadFault.RESETS] and network.chance.random() < 0.2:
            # The connection breaks: before the message, in the middle of it, or behind it.
            match network.chance.randrange(3):
                case 1 if payload is not None:
                    self._deliver(frame)
                    self._deliver(bytes(payload)[: len(payload) // 2])
                case 2:
                    self._deliver(frame)
                    self._deliver(bytes(payload) if payload is not None else None)
            self._arrived.append(_RESET)
            self._deliver_end(_RESET)
            raise PeerReset("the connection broke while sending")
        self._deliver(frame)
        if payload is not None:
            # The peer's kernel takes it a piece at a time: what lies in the ring meanwhile may change.
            half = len(payload) // 2
            first = bytes(payload[:half])
            self._scheduler.sleep(network.latency_s())
            data = first + bytes(payload[half:])
            if network.faults[PayloadFault.CORRUPT] and network.chance.random() < 0.3 and data:
                spot = network.chance.randrange(len(data))
                data = data[:spot] + bytes([data[spot] ^ 1]) + data[spot + 1 :]
            self._check()
            self._deliver(data)

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        self.receive_payload_into(buffer, deadline, None)

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        data = self._receive(deadline)
        if len(data) > len(buffer):
            raise PayloadTruncated("a longer message was sent")
        buffer[: len(data)] = data
        if len(data) < len(buffer):
            raise PayloadTruncated(f"{len(data)} of {len(buffer)} bytes")
        if seen is not None:
            seen(buffer)

    def is_stale(self) -> bool:
        return bool(self._arrived)

    def cut(self) -> None:
        if not self._is_closed:
            self._is_cut = True
            self._deliver_end(_END)
            self._wake()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._deliver_end(_END)

    def drop(self) -> None:
        """Nothing forks here."""

    # ---- how

    def _receive(self, deadline: float) -> bytes:
        scheduler = self._scheduler
        scheduler.maybe_switch()
        while not self._arrived:
            if self._is_cut:
                raise PeerReset("the connection was cut on this side")
            if scheduler.now_s >= deadline:
                raise PayloadTimeout("nothing came from the peer")
            self._ticket = scheduler.ticket()
            scheduler.park(deadline)
            self._ticket = None
        # The end of a connection stays in the queue: each later read meets it, too.
        data = self._arrived[0]
        if data is _RESET or data == _END:
            raise PeerReset("the connection broke" if data is _RESET else "the peer has closed the connection")
        return self._arrived.popleft() or b""

    def _check(self) -> None:
        if self._is_cut or self._is_closed or (self._arrived and self._arrived[-1] is _RESET):
            raise PeerReset("the connection broke")

    def _deliver(self, data: bytes | None) -> None:
        if data:
            self._deliver_end(data)

    def _deliver_end(self, data: bytes | None) -> None:
        """In the order of sending, also where a later message has the shorter latency."""
        peer = self.peer
        peer._arrives_at = max(self._scheduler.now_s + self._network.latency_s(), peer._arrives_at)
        self._scheduler.call_at(peer._arrives_at, partial(self._arrive, data))

    def _arrive(self, data: bytes | None) -> None:
        peer = self.peer
        if self._network.is_cut(self.process.host, peer.process.host, self._address):
            # TCP sends again, and gives up at last.
            self._scheduler.call_later(0.2, partial(self._arrive, data))
            peer._arrives_at = max(peer._arrives_at, self._scheduler.now_s + 0.2)
            return
        peer._arrived.append(data)
        peer._wake()

    def _wake(self) -> None:
        if self._ticket is not None:
            self._scheduler.wake(self._ticket)

    def _owner_died(self) -> None:
        """Its kernel closes the socket; a host without power says nothing."""
        if not self._is_closed and not self._network.is_cut(f"{self.process.host} is off"):
            self._is_closed = True
            self._deliver_end(_RESET)


class SimulatedListener:
    """A port. `close` it, or its process dies: connections are refused then."""

    def __init__(
        self,
        network: PayloadNetwork,
        process: VirtualProcess,
        address: str,
        serve: Callable[[PeerLink], None],
        entry: AdmissionCheck | None,
    ) -> None:
        self.network, self.process, self.address = network, process, address
        self._serve, self._entry = serve, entry

    def accept(self, link: SimulatedLink) -> None:
        thread = VirtualThread(self.network.scheduler, self.process, partial(self._run, link), f"of {self.address}")
        thread.start()

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    def drop(self) -> None:
        """Nothing forks here."""

    def _run(self, link: SimulatedLink) -> None:
        try:
            if self._entry is not None:
                deadline = self.network.scheduler.now_s + self._entry.within_s
                if not pass_through(link, self._entry.handshake(), deadline):
                    return
            self._serve(link)
        except TransportError:
            return
        finally:
            link.close()


class SimulatedBackend(Backend):
    """Ways from the process that uses it to the ports of all others."""

    scheme = "tcp"

    def __init__(self, network: PayloadNetwork) -> None:
        self._network = network

    def connect(self, address: str, deadline: float) -> PeerLink:
        network, scheduler = self._network, self._network.scheduler
        process = scheduler.process
        network.asked.append((scheduler.now_s, process.name, address))
        host = host_and_port(address)[0]
        # A connection that is not there by the deadline comes to nothing.
        scheduler.sleep(min(network.latency_s(), max(0.0, deadline - scheduler.now_s)))
        places = (process.host, host, address, f"{host} is off")
        while (is_late := scheduler.now_s >= deadline) or network.is_cut(*places):
            if is_late:
                raise PayloadTimeout("the port does not answer")
            scheduler.park(min(deadline, scheduler.now_s + 0.2))
        listener = network.listeners.get(address)
        if listener is None or not listener.process.alive:
            raise PeerReset("no process listens there")
        near = SimulatedLink(network, process, address)
        near.peer = far = SimulatedLink(network, listener.process, address)
        far.peer = near
        listener.accept(far)
        return near

    def listen(
        self, host: str, port: int, serve: Callable[[PeerLink], None], entry: AdmissionCheck | None = None
    ) -> PortListener:
        network = self._network
        address = f"tcp://{host}:{port or next(network.ports)}"
        listener = SimulatedListener(network, network.scheduler.process, address, serve, entry)
        network.listeners[address] = listener
        return listener
