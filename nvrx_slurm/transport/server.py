"""`PayloadServer`: a ring's payloads, for readers on other nodes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport import arguments, protocol
from nvrx_slurm.transport.backends import SCHEMES, by_scheme
from nvrx_slurm.transport.environment import default_host, node_name, token_or_own
from nvrx_slurm.transport.errors import PayloadCorrupt, PayloadTimeout, RingError, TransportError
from nvrx_slurm.transport.protocol import AdmissionCheck, PeerLink, TokenHandshake
from nvrx_slurm.transport.ref import MOST_PORTS, PayloadRef
from nvrx_slurm.transport.slots import Refusal
from nvrx_slurm.util.admission import PROOF_S
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.transport.ring import Claim, SharedRing


CLOSE_S = 0.9
TURN_AWAY_S = 1.0
MOST_LINKS = 1024
LAST_PORT = 65535
LONGEST_TEXT = 255
LONGEST_HOST = 240
"""What a ref takes as a node, and as a port, which is the host with a scheme before it and a number behind."""

_servers: weakref.WeakSet[PayloadServer] = weakref.WeakSet()


class PayloadServer:
    """Serves a ring on ports of this node, in threads of this process, from its construction to `close`.

    `transport`: "tcp" (the default) or "ucxx", or both; readers on this node read the ring itself in any case.
    `ports`: how many listeners each has, so that a reader can go round a sick one; or the numbers of the ports.
    `host`: by which name or address other nodes reach this one (default: its host name; 127.0.0.1 in a job that runs
    on one host). `token`: what readers must know too (default: the job's, under our agent); by default a server
    outside of a job makes one, `server.token`.

    Raises UsageError for arguments that cannot be, PeerRefused where a transport is not there, RingError where it
    cannot listen.
    """

    def __init__(
        self,
        ring: SharedRing,
        *,
        transport: str | Sequence[str] = "tcp",
        ports: int | Sequence[int] = 2,
        host: str | None = None,
        node: str | None = None,
        token: bytes | None = None,
        most_links: int = MOST_LINKS,
        limits: ServerLimits | None = None,
    ) -> None:
        schemes, numbers = _schemes(transport), _numbers(ports)
        if not 1 <= len(schemes) * len(numbers) <= MOST_PORTS:
            raise UsageError(f"PayloadServer: transport and ports must make 1 to {MOST_PORTS} listeners")
        self.ring, self.token = _open(ring), token_or_own(token)
        self.node = arguments.text("node", node_name() if node is None else node, LONGEST_TEXT)
        host = arguments.text("host", host or default_host(), LONGEST_HOST)
        self._limits = ServerLimits() if limits is None else arguments.instance("limits", limits, ServerLimits)
        self._most_links = arguments.whole("most_links", most_links, 1)
        self._rings = {ring.name: ring}
        self._guard = threading.Lock()
        self._changed = threading.Condition(self._guard)
        self._links: set[PeerLink] = set()
        self._is_closed = False
        self._pid = os.getpid()
        self._listeners = []
        entry = AdmissionCheck(
            lambda: TokenHandshake(self.token, self._limits.eviction_s, self._status), self._limits.hello_s
        )
        with contextlib.ExitStack() as undo:
            for scheme in schemes:
                backend = by_scheme(scheme, self.token)
                for number in numbers:
                    listener = backend.listen(host, number, self._serve, entry)
                    undo.callback(listener.close)
                    self._listeners.append(listener)
            undo.pop_all()
        self.ports = tuple(listener.address for listener in self._listeners)
        _servers.add(self)

    def write(self, obj: object, *, timeout_s: float = 0.0) -> PayloadRef:
        """Write into the ring; a ref that readers on other nodes can use. Raises as `refer` and `ring.write`."""
        self._check()
        return self.refer(self.ring.write(obj, timeout_s=timeout_s))

    def refer(self, ref: PayloadRef) -> PayloadRef:
        """A ref of the ring, with this server's ports. Raises RingError once the server is closed."""
        self._check()
        if arguments.payload_ref(ref).ring != self.ring.name:
            raise UsageError(f"{ref} is not of ring {self.ring.name}, which this server serves")
        return msgspec.structs.replace(ref, node=self.node, ports=self.ports)

    def drain(self, timeout_s: float) -> int:
        """Wait until all payloads were read; how many are left when the time is over."""
        return self.ring.drain(timeout_s)

    def close(self) -> None:
        """Within a second: no new readers, and those that read now fail with PeerReset. The ring stays as it is."""
        with self._guard:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
        until = time.monotonic() + CLOSE_S
        for listener in self._listeners:
            listener.close()
        with self._changed:
            for link in self._links:
                link.cut()
            self._changed.wait_for(lambda: not self._links, until - time.monotonic())

    def __enter__(self) -> PayloadServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._is_closed:
            raise RingError(f"the server of ring {self.ring.name} is closed: use ring.write for readers on this node")

    def _serve(self, link: PeerLink) -> None:
        status = self._admit(link)
        if status is not protocol.ResponseStatus.OK:
            with contextlib.suppress(TransportError):
                _turn_away(link, status, time.monotonic() + TURN_AWAY_S)
            return
        try:
            serve(link, self._rings, self._limits)
        finally:
            with self._changed:
                self._links.discard(link)
                self._changed.notify_all()

    def _status(self) -> protocol.ResponseStatus:
        if self._is_closed:
            return protocol.ResponseStatus.CLOSING
        return protocol.ResponseStatus.FULL if len(self._links) >= self._most_links else protocol.ResponseStatus.OK

    def _admit(self, link: PeerLink) -> protocol.ResponseStatus:
        """It was asked at the hello, too; others may have proven themselves since."""
        with self._guard:
            if (status := self._status()) is protocol.ResponseStatus.OK:
                self._links.add(link)
        return status

    def _drop(self) -> None:
        """In a forked child: the ports and the readers are the parent's."""
        for listener in self._listeners:
            listener.drop()
        for link in self._links:
            link.drop()
        self._links = set()
        self._guard = threading.Lock()  # a thread of the parent may hold the old one
        self._changed = threading.Condition(self._guard)


def _open(ring: SharedRing) -> SharedRing:
    """Raises RingError for one that is closed, now and not at each reader's request."""
    from nvrx_slurm.transport.ring import SharedRing

    assert arguments.instance("ring", ring, SharedRing).memory is not None
    return ring


def _schemes(transport: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(transport, str | list | tuple):
        raise UsageError(f"transport must be one of {', '.join(SCHEMES)}, or a sequence of them, not {transport!r}")
    return (transport,) if isinstance(transport, str) else tuple(transport)


def _numbers(ports: int | Sequence[int]) -> tuple[int, ...]:
    """Those of the ports, 0 for any."""
    if isinstance(ports, Sequence) and not isinstance(ports, str | bytes):
        return tuple(arguments.whole("each of ports", port, 0, LAST_PORT) for port in ports)
    return (0,) * arguments.whole("ports (how many, or the numbers of them)", ports, 1, MOST_PORTS)


def _turn_away(link: PeerLink, status: protocol.ResponseStatus, until: float) -> None:
    """Say why, and let the client go first: closed over its unread request, the connection would be reset, and the
    reason lost."""
    link.send(protocol.Response(status).pack(), None, until)
    link.receive_into(memoryview(bytearray(protocol.REQUEST_BYTES)), until)
    link.receive_into(memoryview(bytearray(1)), until)


def _after_fork() -> None:
    for server in list(_servers):
        server._drop()


os.register_at_fork(after_in_child=_after_fork)


LEASE_MARGIN_S = 1.0
"""A slot's lease is longer by this than the bound on sending it: a server never sends what is not its any more."""

_STATUS = {
    Refusal.BUSY: protocol.ResponseStatus.BUSY,
    Refusal.STALE: protocol.ResponseStatus.STALE,
    Refusal.CONSUMED: protocol.ResponseStatus.STALE,
    Refusal.NOT_READY: protocol.ResponseStatus.STALE,
}

_log = get_logger("transport")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`hello_s`: for a peer to prove itself; `read_s`: the longest that one read may keep its slot, even where its
    reader asks for more; `eviction_s`: a link idle for so long is closed, and clients are told so at the hello."""

    hello_s: float = PROOF_S
    read_s: float = 120.0
    eviction_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be."""
        for name in ("hello_s", "read_s", "eviction_s"):
            arguments.seconds(f"ServerLimits: {name}", getattr(self, name), least=0.001)


class Offer(NamedTuple):
    """The answer to a request, and the claim that its payload needs until it is acknowledged."""

    answer: protocol.Response
    claim: Claim | None = None


def offer(
    rings: Mapping[str, SharedRing], request: protocol.PayloadRequest, *, keep_s: float, with_checksum: bool = True
) -> Offer:
    """Claim what is asked for. `keep_s`: for how long at most its reader has it."""
    ring = rings.get(request.ring)
    if ring is None:
        return Offer(protocol.Response(protocol.ResponseStatus.UNKNOWN_RING))
    if request.call is protocol.RequestKind.SETTLE:
        return Offer(protocol.Response(_settled(ring, request)))
    if request.slot >= ring.slots:
        return Offer(protocol.Response(protocol.ResponseStatus.STALE))
    claim = ring.claim(request.slot, request.generation, lease_s=keep_s + LEASE_MARGIN_S)
    if isinstance(claim, Refusal):
        return Offer(protocol.Response(_STATUS[claim]))
    checksum = claim.checksum
    if checksum is None:
        checksum = xxhash.xxh3_64_intdigest(claim.payload) if with_checksum else 0
        if with_checksum and not claim.is_ours():  # it took too long: that may be another payload's
            return Offer(protocol.Response(protocol.ResponseStatus.BUSY))
    return Offer(protocol.Response(protocol.ResponseStatus.OK, claim.size, checksum, claim.generation), claim)


def _settled(ring: SharedRing, request: protocol.PayloadRequest) -> protocol.ResponseStatus:
    """BUSY where a reader has the slot: it may be the very read whose Ack was lost, if it has not ended here yet."""
    claim = ring.claim(request.slot, request.generation)
    if isinstance(claim, Refusal):
        return _STATUS[claim]
    return protocol.ResponseStatus.OK if claim.finish(consumed=True) else protocol.ResponseStatus.STALE


def serve(link: PeerLink, rings: Mapping[str, SharedRing], limits: ServerLimits) -> None:
    """A peer that has proven itself, until it goes, is idle for too long, or sends what is no request. Raises nothing
    that a peer can cause."""
    try:
        while (request := _next_request(link, limits)) is not None:
            _answer(link, rings, request, limits)
    except PayloadCorrupt as error:
        _log.warning("a peer was cut off: %s", error)
        _refuse(link, protocol.ResponseStatus.BAD_REQUEST)
    except TransportError as error:
        _log.debug("a reader's link ended: %s", error)


def _next_request(link: PeerLink, limits: ServerLimits) -> protocol.PayloadRequest | None:
    frame = bytearray(protocol.REQUEST_BYTES)
    try:
        link.receive_into(memoryview(frame), time.monotonic() + limits.eviction_s)
    except PayloadTimeout:
        return None
    return protocol.PayloadRequest.unpack(frame)


def _answer(
    link: PeerLink, rings: Mapping[str, SharedRing], request: protocol.PayloadRequest, limits: ServerLimits
) -> None:
    keep_s = min(request.budget_ms / 1000, limits.read_s)
    answer, claim = offer(rings, request, keep_s=keep_s)
    until = time.monotonic() + (keep_s if claim else limits.hello_s)
    if claim is None:
        link.send(answer.pack(), None, until)
        return
    taken = False
    try:
        link.send(answer.pack(), claim.payload if claim.size else None, until)
        taken = _was_taken(link, claim, until)
    finally:
        claim.finish(consumed=taken)


def _was_taken(link: PeerLink, claim: Claim, until: float) -> bool:
    frame = bytearray(protocol.ACK_BYTES)
    link.receive_into(memoryview(frame), until)
    ack = protocol.Ack.unpack(frame)
    if (ack.slot, ack.generation) != (claim.slot, claim.generation):
        raise PayloadCorrupt(f"an ack for slot {ack.slot}@{ack.generation} came for {claim.slot}@{claim.generation}")
    return ack.verdict is protocol.AckVerdict.TAKEN


def _refuse(link: PeerLink, status: protocol.ResponseStatus) -> None:
    with contextlib.suppress(TransportError):  # it is gone, then
        link.send(protocol.Response(status).pack(), None, time.monotonic() + LEASE_MARGIN_S)
