"""`PayloadRef`: where one payload is, as producers publish it and consumers ask for it."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from nvrx_slurm.transport.errors import TransportError

MOST_PORTS = 64
LONGEST_NAME = 64
LONGEST_SCHEMA = 64 << 10
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_RING = re.compile(r"nvrx-ring-[0-9a-z-]{1,54}")

_Name = Annotated[str, msgspec.Meta(max_length=255)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One payload: the ring and the slot that it lies in, and the generation that it was written as.

    A slot gets a new generation with each write: a ref never gives another payload's bytes. `ports`: where the node's
    server listens, such as `tcp://n3:40123`; none where the payload can only be read on its own node. `size` in
    bytes. `checksum`: XXH3 (64 bits) of these bytes, "" where the producer has not made one. `schema` says how they
    become an object again (`payloads`); "" is raw bytes.
    """

    node: _Name
    ring: _Name
    slot: Annotated[int, msgspec.Meta(ge=0, le=_U32)]
    generation: _Word
    size: _Word
    checksum: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    schema: Annotated[str, msgspec.Meta(max_length=LONGEST_SCHEMA)] = ""
    ports: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MOST_PORTS)] = ()

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> PayloadRef:
        """Raises TransportError where it is none; an unknown field passes, so that two versions can meet."""
        try:
            ref = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:  # the last one: neither bytes nor str
            raise TransportError(f"this is no payload reference: {error}") from None
        if not is_ring_name(ref.ring):
            raise TransportError(f"this is no payload reference: {ref.ring!r} is no name of a ring")
        return ref

    def __str__(self) -> str:
        return f"{self.ring}[{self.slot}]@{self.generation} of {self.node or 'this node'} ({self.size} bytes)"


def is_ring_name(name: str) -> bool:
    """Names become paths and messages: nothing else is let through."""
    return _RING.fullmatch(name) is not None


def checksum_text(checksum: int | None) -> str:
    """As a ref has it: 16 hexadecimal digits, or "" for none."""
    return "" if checksum is None else f"{checksum:016x}"


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(PayloadRef)
