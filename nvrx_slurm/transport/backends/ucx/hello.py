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


class HelloDoor:
    """Hears one (a `Door`). `hello`: the peer's, once it has passed. UCX believes whatever an address says: it gets
    none that the token does not prove."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._head = b""
        self.wants, self.is_passed = _HEAD.size, False
        self.hello: Hello

    def take(self, frame: bytes) -> bytes:
        """A refusal, where the token does not prove it. Raises PeerReset for no hello, PeerRefused for a refusal."""
        if not self._head:
            self._head, self.wants = frame, _size_in(frame)
            return b""
        self.wants = 0
        _, proof, number, turn, _ = _HEAD.unpack(self._head)
        self.hello = Hello(number, turn, frame)
        self.is_passed = hmac.compare_digest(proof, _proof(self._token, *self.hello))
        return b"" if self.is_passed else REFUSAL


def hear(link: Link, token: bytes, deadline: float) -> Hello:
    """The server's. Raises PeerReset where it is none, PeerRefused where either does not take the other one's
    token."""
    door = HelloDoor(token)
    while door.wants:
        frame = bytearray(door.wants)
        link.receive_into(memoryview(frame), deadline)
        door.take(bytes(frame))
    if not door.is_passed:
        raise PeerRefused(OTHER_TOKEN)
    return door.hello


def _size_in(head: bytes) -> int:
    """Of the address that follows."""
    magic, _, _, _, size = _HEAD.unpack(head)
    if head == REFUSAL:
        raise PeerRefused(REASONS[Status.REFUSED])
    if magic != _MAGIC or not 0 < size <= MOST_ADDRESS_BYTES:
        raise PeerReset("it speaks another protocol, or another version of this one")
    return int(size)


def _proof(token: bytes, number: int, turn: int, address: bytes) -> bytes:
    return hmac.digest(token, _SAID.pack(number, turn) + address, "sha256")
