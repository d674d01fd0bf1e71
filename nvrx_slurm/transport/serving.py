"""The server's side of a link that was admitted: one request after the other.

The function that claims a slot for a reader ends that claim, once: with the reader's Ack the slot is
free, and with anything else (a reset, a deadline, a BAD) its payload is ready again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from nvrx_slurm.transport import arguments, protocol
from nvrx_slurm.transport.errors import PayloadCorrupt, PayloadTimeout, TransportError
from nvrx_slurm.transport.protocol import PeerLink
from nvrx_slurm.transport.slots import Refusal
from nvrx_slurm.util.admission import PROOF_S
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.transport.ring import Claim, SharedRing

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
