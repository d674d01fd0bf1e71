"""`PayloadServer`: a ring's payloads, for readers on other nodes; and `offer`, what a request gets.

The function that claims a slot for a reader ends that claim, once: with the reader's Ack the slot is free, and with
anything else (a reset, a deadline, a BAD) its payload is ready again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport import arguments, protocol
from nvrx_slurm.transport.backends import SCHEMES, by_scheme
from nvrx_slurm.transport.environment import default_host, node_name, token_or_none
from nvrx_slurm.transport.errors import PayloadCorrupt, PayloadTimeout, PeerReset, RingError, TransportError
from nvrx_slurm.transport.protocol import AdmissionCheck, PeerLink, TokenHandshake
from nvrx_slurm.transport.ref import MOST_PORTS, PayloadRef
from nvrx_slurm.transport.ring import Claim, SharedRing
from nvrx_slurm.transport.slots import Refusal
from nvrx_slurm.util.admission import PROOF_S
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import reset_after_fork

TOKEN_BYTES = 32
CLOSE_S = 0.9
TURN_AWAY_S = 1.0
MOST_LINKS = 1024
LAST_PORT = 65535
# What a ref takes as a node, and as a port, which is the host with a scheme before it and a number behind.
LONGEST_TEXT, LONGEST_HOST = 255, 240
# A slot's lease is longer by this than the bound on sending it: a server never sends what is not its any more.
LEASE_MARGIN_S = 1.0

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
    reader asks for more; `eviction_s`: a link idle for so long is closed, and clients learn it at the hello."""

    hello_s: float = PROOF_S
    read_s: float = 120.0
    eviction_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be."""
        for name in ("hello_s", "read_s", "eviction_s"):
            arguments.seconds(f"ServerLimits: {name}", getattr(self, name), least=0.001)


class PayloadServer:
    """Serves a ring on ports of this node, in threads of this process, from its construction to `close`.

    `transport`: "tcp" (the default) or "ucxx", or both; readers on this node read the ring itself in any case.
    `ports`: how many listeners each has, so that a reader can go round a sick one; or the numbers of the ports.
    `host`: by which name or address other nodes reach this one (default: its host name; 127.0.0.1 in a job that runs
    on one host). `token`: what readers must know too (default: the job's, under an agent); by default a server
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
        if not isinstance(transport, str | list | tuple):
            known = ", ".join(SCHEMES)
            raise UsageError(f"transport must be one of {known}, or a sequence of them, not {transport!r}")
        schemes = (transport,) if isinstance(transport, str) else tuple(transport)
        if isinstance(ports, Sequence) and not isinstance(ports, str | bytes):
            numbers = [arguments.whole("each of ports", port, 0, LAST_PORT) for port in ports]
        else:
            # Port 0 is any free one.
            numbers = [0] * arguments.whole("ports (how many, or the numbers of them)", ports, 1, MOST_PORTS)
        if not 1 <= len(schemes) * len(numbers) <= MOST_PORTS:
            raise UsageError(f"PayloadServer: transport and ports must make 1 to {MOST_PORTS} listeners")
        # `memory` raises RingError for a closed ring: now, and not at each reader's request.
        arguments.instance("ring", ring, SharedRing).memory  # noqa: B018  for what it raises
        # Outside of a job a server makes a token of its own.
        self.ring, self.token = ring, token_or_none(token) or secrets.token_bytes(TOKEN_BYTES)
        self.node = arguments.text("node", node_name() if node is None else node, LONGEST_TEXT)
        host = arguments.text("host", host or default_host(), LONGEST_HOST)
        self._limits = ServerLimits() if limits is None else arguments.instance("limits", limits, ServerLimits)
        self._most_links = arguments.whole("most_links", most_links, 1)
        self._rings = {ring.name: ring}
        self._links: set[PeerLink] = set()
        self._changed = threading.Condition()
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
        reset_after_fork(self, PayloadServer._after_fork)

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
        """Stop within a second: no new readers, and those that read now fail with PeerReset. The ring stays."""
        with self._changed:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
        until = time.monotonic() + CLOSE_S
        for listener in self._listeners:
            listener.close()
        # `_is_closed` was set under this lock, and `_serve` adds no link once it is: so none is missed here.
        with self._changed:
            for link in self._links:
                link.cut()
            self._changed.wait_for(lambda: not self._links, until - time.monotonic())

    def __enter__(self) -> PayloadServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._is_closed:
            raise RingError(f"the server of ring {self.ring.name} is closed: use ring.write for readers on this node")

    def _serve(self, link: PeerLink) -> None:
        # The handshake has asked for the status, too; other links may have been admitted since.
        with self._changed:
            if (status := self._status()) is protocol.ResponseStatus.OK:
                self._links.add(link)
        if status is not protocol.ResponseStatus.OK:
            until = time.monotonic() + TURN_AWAY_S
            with contextlib.suppress(TransportError):
                link.send(protocol.Response(status).pack(), None, until)
                # The client closes first: closed over its unread request, the connection would be reset, and the
                # reason lost.
                link.receive_into(memoryview(bytearray(protocol.REQUEST_BYTES)), until)
                link.receive_into(memoryview(bytearray(1)), until)
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

    def _after_fork(self) -> None:
        """In a forked child, leave the ports and the readers to the parent."""
        for listener in self._listeners:
            listener.drop()
        for link in self._links:
            link.drop()
        self._links = set()
        # A thread of the parent may hold the old one.
        self._changed = threading.Condition()


class Offer(NamedTuple):
    """The answer to a request, and the claim that its payload needs until it is acknowledged."""

    answer: protocol.Response
    claim: Claim | None = None


def offer(
    rings: Mapping[str, SharedRing], request: protocol.PayloadRequest, *, keep_s: float, with_checksum: bool = True
) -> Offer:
    """Claim what is asked for, or settle it. `keep_s`: how long the reader may have it at most."""
    ring = rings.get(request.ring)
    if ring is None:
        return Offer(protocol.Response(protocol.ResponseStatus.UNKNOWN_RING))
    is_read = request.call is protocol.RequestKind.READ
    claim = ring.claim(request.slot, request.generation, keep_s + LEASE_MARGIN_S if is_read else None)
    if isinstance(claim, Refusal):
        # BUSY to a SETTLE: it may be the very read whose Ack was lost, which has not ended here yet.
        return Offer(protocol.Response(_STATUS[claim]))
    if not is_read:
        is_settled = claim.finish(consumed=True)
        return Offer(protocol.Response(protocol.ResponseStatus.OK if is_settled else protocol.ResponseStatus.STALE))
    checksum = claim.checksum
    if checksum is None:
        checksum = xxhash.xxh3_64_intdigest(claim.payload) if with_checksum else 0
        # If the checksum took longer than the lease, it may be that of another payload.
        if with_checksum and not claim.is_ours():
            return Offer(protocol.Response(protocol.ResponseStatus.BUSY))
    return Offer(protocol.Response(protocol.ResponseStatus.OK, claim.size, checksum, claim.generation), claim)


def serve(link: PeerLink, rings: Mapping[str, SharedRing], limits: ServerLimits) -> None:
    """Answer the requests of an admitted peer until it closes the link, is idle for too long, or sends something that
    is no request. Raises nothing that a peer can cause."""
    try:
        while True:
            frame = bytearray(protocol.REQUEST_BYTES)
            try:
                link.receive_into(memoryview(frame), time.monotonic() + limits.eviction_s)
            except PayloadTimeout:
                return
            _answer(link, rings, protocol.PayloadRequest.unpack(frame), limits)
    except PayloadCorrupt as error:
        _log.warning("a peer was cut off: %s", error)
        # The peer may have gone.
        with contextlib.suppress(TransportError):
            refusal = protocol.Response(protocol.ResponseStatus.BAD_REQUEST)
            link.send(refusal.pack(), None, time.monotonic() + LEASE_MARGIN_S)
    except TransportError as error:
        _log.debug("a reader's link ended: %s", error)


def _answer(
    link: PeerLink, rings: Mapping[str, SharedRing], request: protocol.PayloadRequest, limits: ServerLimits
) -> None:
    keep_s = min(request.budget_ms / 1000, limits.read_s)
    answer, claim = offer(rings, request, keep_s=keep_s)
    if claim is None:
        link.send(answer.pack(), None, time.monotonic() + limits.hello_s)
        return
    until = time.monotonic() + keep_s
    is_taken = False
    try:
        link.send(answer.pack(), claim.payload if claim.size else None, until)
        frame = bytearray(protocol.ACK_BYTES)
        # A reader that has all of it at the end of its time sends its Ack then: that has a way to come.
        link.receive_into(memoryview(frame), until + LEASE_MARGIN_S / 2)
        ack = protocol.Ack.unpack(frame)
        if (ack.slot, ack.generation) != (claim.slot, claim.generation):
            raise PayloadCorrupt(f"the ack is for {ack.slot}@{ack.generation}, not {claim.slot}@{claim.generation}")
        is_taken = ack.verdict is protocol.AckVerdict.TAKEN
    finally:
        is_ended = claim.finish(consumed=is_taken)
    # Where its lease ended before the Ack was read, as when this process was stopped, it is ready again.
    if is_taken and not is_ended and not rings[request.ring].settle(claim.slot, claim.generation):
        # Or another reader has it by now. Without an answer to its next request this one sends its Ack once more.
        raise PeerReset("its Ack came when another reader had the payload")
