"""What two ends tell each other over a socket, before UCX hears of either."""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from nvrx_slurm.transport.backends.port import Link
from nvrx_slurm.transport.errors import PeerRefused, PeerReset
from nvrx_slurm.transport.handshake import OTHER_TOKEN, REASONS
from nvrx_slurm.transport.wire import Status

MOST_ADDRESS_BYTES = 8 << 10
"""Of a worker: a hundred for each transport and device that it has."""

_MAGIC = b"nvrxucx2"
_HEAD = struct.Struct("<8s32sQIH")
_SAID = struct.Struct("<QI")

REFUSAL = _HEAD.pack(_MAGIC, b"", 0, 0, 0)
"""Instead of a hello: the other one's was not proven by the token."""


class Hello(NamedTuple):
    """`number`: by which the other end is to name this one; `turn`: of the server's endpoint among those for this
    client; `address`: of the worker, as UCX packs it."""

    number: int
    turn: int
    address: bytes

    def pack(self, token: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, _proof(token, *self), self.number, self.turn, len(self.address)) + self.address


def hear(link: Link, token: bytes, deadline: float) -> Hello:
    """The peer's. Raises PeerReset where it is none, PeerRefused where either does not take the other one's token:
    UCX believes whatever an address says."""
    head = bytearray(_HEAD.size)
    link.receive_into(memoryview(head), deadline)
    magic, proof, number, turn, size = _HEAD.unpack(head)
    if head == REFUSAL:
        raise PeerRefused(REASONS[Status.REFUSED])
    if magic != _MAGIC or not 0 < size <= MOST_ADDRESS_BYTES:
        raise PeerReset("it speaks another protocol, or another version of this one")
    address = bytearray(size)
    link.receive_into(memoryview(address), deadline)
    hello = Hello(number, turn, bytes(address))
    if not hmac.compare_digest(proof, _proof(token, *hello)):
        raise PeerRefused(OTHER_TOKEN)
    return hello


def heard(link: Link, token: bytes, deadline: float) -> Hello:
    """The same, for a server, which says so where it refuses."""
    try:
        return hear(link, token, deadline)
    except PeerRefused:
        link.send(REFUSAL, None, deadline)
        raise


def _proof(token: bytes, number: int, turn: int, address: bytes) -> bytes:
    return hmac.digest(token, _SAID.pack(number, turn) + address, "sha256")
