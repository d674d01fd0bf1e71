"""What goes over a link: frames of fixed size, and between them payloads whose size was told before. Pure.

    client                          server
      Hello (version, nonce) ────────▶
      ◀──────────────────────────────  Challenge (status, nonce, proof, idle eviction)
      Proof, and the first Request ──▶
      Request (READ slot, gen.) ─────▶        claims the slot
      ◀──────────────────────────────  Answer (status, size, checksum), then the payload
      Ack (TAKEN | KEPT | BAD) ──────▶        the slot is freed now, or ready again
      Request … ─────────────────────▶        … and its Answer says that the Ack was heard

Numbers are little-endian. A frame that cannot be is PayloadCorrupt; nothing is allocated for what a peer merely says.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, TypeVar

from nvrx_slurm.transport.errors import PayloadCorrupt

MAGIC = b"nvrxpay\n"
VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
RING_BYTES = 64

_HELLO = struct.Struct("<8sHxx32s")
_CHALLENGE = struct.Struct("<8sHBxI32s32s")
_REQUEST = struct.Struct("<4sBxxxIIQ64s")
_ANSWER = struct.Struct("<4sBxxxQQQ")
_ACK = struct.Struct("<4sBxxxIQ")

HELLO_BYTES, CHALLENGE_BYTES = _HELLO.size, _CHALLENGE.size
REQUEST_BYTES, ANSWER_BYTES, ACK_BYTES = _REQUEST.size, _ANSWER.size, _ACK.size

_REQUEST_MARK, _ANSWER_MARK, _ACK_MARK = b"RQ\r\n", b"AN\r\n", b"AK\r\n"
_MOST_MS = (1 << 32) - 1

C = TypeVar("C", bound=IntEnum)


class Call(IntEnum):
    """What a request is for."""

    READ = 1
    SETTLE = 2  # an Ack of ours may have been lost: the slot was TAKEN, if it still is of that generation


class Status(IntEnum):
    """How a request, or a hello, was taken."""

    OK = 0
    BUSY = 1  # somebody else reads the slot: ask again
    STALE = 2  # nobody can have this payload any more
    UNKNOWN_RING = 3  # this server does not serve that ring
    REFUSED = 4  # wrong proof
    VERSION = 5  # another version of the protocol
    FULL = 6  # as many connections as it takes
    CLOSING = 7  # it shuts down
    BAD_REQUEST = 8  # no request of this protocol


class Verdict(IntEnum):
    """What a reader says of a payload."""

    TAKEN = 1  # it has it: the slot is free
    KEPT = 2  # it has it, and leaves it for others
    BAD = 3  # what came was not it: the slot is ready again


_MEMBERS: dict[type[IntEnum], dict[int, IntEnum]] = {
    kind: {member.value: member for member in kind} for kind in (Call, Status, Verdict)
}


class Hello(NamedTuple):
    """The client begins."""

    version: int
    nonce: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(MAGIC, self.version, self.nonce)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Hello:
        magic, version, nonce = _HELLO.unpack(frame)
        if magic != MAGIC:
            raise PayloadCorrupt("this is no hello of this protocol")
        return cls(version, nonce)


class Challenge(NamedTuple):
    """The server's side of the hello. `eviction_ms`: a link idle for so long is closed."""

    version: int
    status: Status
    eviction_ms: int
    nonce: bytes
    proof: bytes

    def pack(self) -> bytes:
        eviction_ms = min(self.eviction_ms, _MOST_MS)
        return _CHALLENGE.pack(MAGIC, self.version, self.status, eviction_ms, self.nonce, self.proof)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Challenge:
        magic, version, status, eviction_ms, nonce, proof = _CHALLENGE.unpack(frame)
        if magic != MAGIC:
            raise PayloadCorrupt("no server of payloads is listening there")
        return cls(version, _member(Status, status), eviction_ms, nonce, proof)


class Request(NamedTuple):
    """For one payload. `budget_ms`: so long will the client wait for it."""

    call: Call
    slot: int
    budget_ms: int
    generation: int
    ring: str

    def pack(self) -> bytes:
        budget_ms = max(0, min(self.budget_ms, _MOST_MS))
        return _REQUEST.pack(
            _REQUEST_MARK, self.call, self.slot, budget_ms, self.generation, self.ring.encode("ascii")
        )

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Request:
        mark, call, slot, budget_ms, generation, ring = _REQUEST.unpack(frame)
        if mark != _REQUEST_MARK:
            raise PayloadCorrupt("this is no request of this protocol")
        return cls(_member(Call, call), slot, budget_ms, generation, ring.rstrip(b"\0").decode("ascii", "replace"))


class Answer(NamedTuple):
    """Before the payload, if `status` is OK and `size` is not 0. `generation`: of the slot as asked."""

    status: Status
    size: int = 0
    checksum: int = 0
    generation: int = 0

    def pack(self) -> bytes:
        return _ANSWER.pack(_ANSWER_MARK, self.status, self.size, self.checksum, self.generation)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Answer:
        mark, status, size, checksum, generation = _ANSWER.unpack(frame)
        if mark != _ANSWER_MARK:
            raise PayloadCorrupt("the peer's answer is none of this protocol")
        return cls(_member(Status, status), size, checksum, generation)


class Ack(NamedTuple):
    """After the payload."""

    verdict: Verdict
    slot: int
    generation: int

    def pack(self) -> bytes:
        return _ACK.pack(_ACK_MARK, self.verdict, self.slot, self.generation)

    @classmethod
    def unpack(cls, frame: bytes | bytearray) -> Ack:
        mark, verdict, slot, generation = _ACK.unpack(frame)
        if mark != _ACK_MARK:
            raise PayloadCorrupt("this is no ack of this protocol")
        return cls(_member(Verdict, verdict), slot, generation)


def _member(kind: type[C], number: int) -> C:
    member = _MEMBERS[kind].get(number)
    if member is None:
        raise PayloadCorrupt(f"the peer says {kind.__name__.lower()} {number}, which is none")
    return member  # type: ignore[return-value]  # it is one of `kind`
