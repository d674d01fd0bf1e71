"""What two ends tell each other over a socket, before UCX hears of either."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from nvrx_slurm.transport.backends.port import Link
from nvrx_slurm.transport.errors import PeerReset

MOST_ADDRESS_BYTES = 8 << 10
"""Of a worker: a hundred for each transport and device that it has."""

_MAGIC = b"nvrxucx2"
_HEAD = struct.Struct("<8s16sQIH")
_SAID = struct.Struct("<QI")


class Hello(NamedTuple):
    """`number`: by which the other end is to name this one; `turn`: of the server's endpoint among those for this
    client; `address`: of the worker, as UCX packs it."""

    number: int
    turn: int
    address: bytes

    def pack(self) -> bytes:
        return _HEAD.pack(_MAGIC, _digest(*self), self.number, self.turn, len(self.address)) + self.address


def hear(link: Link, deadline: float) -> Hello:
    """The peer's. Raises PeerReset where it is none, whole: UCX believes whatever an address says."""
    head = bytearray(_HEAD.size)
    link.receive_into(memoryview(head), deadline)
    magic, digest, number, turn, size = _HEAD.unpack(head)
    if magic != _MAGIC or not 0 < size <= MOST_ADDRESS_BYTES:
        raise PeerReset("it speaks another protocol, or another version of this one")
    address = bytearray(size)
    link.receive_into(memoryview(address), deadline)
    hello = Hello(number, turn, bytes(address))
    if digest != _digest(*hello):
        raise PeerReset("its hello did not arrive as it was sent")
    return hello


def _digest(number: int, turn: int, address: bytes) -> bytes:
    return hashlib.blake2b(_SAID.pack(number, turn) + address, digest_size=16).digest()
