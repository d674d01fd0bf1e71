"""`PayloadRef`: where one payload is, as producers publish it and consumers ask for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from nvrx_slurm.errors import MalformedRecord, UsageError
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.util.decoding import decode

MOST_PORTS = 64
LONGEST_NAME = 64
LONGEST_SCHEMA = 64 << 10
_U32 = (1 << 32) - 1
_SUM = re.compile("[0-9a-f]{16}")
_RING = re.compile(r"nvrx-ring-[0-9a-z-]{1,54}")

_Name = Annotated[str, msgspec.Meta(max_length=255)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One payload: the ring and the slot that it lies in, and the generation that it was written as.

    A slot gets a new generation with each write: a ref never gives another payload's bytes. `ports`: where the node's
    server listens, such as `tcp://n3:40123`; none where the payload can only be read on its own node. `size` in
    bytes. `checksum`: XXH3 (64 bits) of these bytes, "" where the producer has not made one. `schema` says how they
    become an object again (`codec`); "" is raw bytes.
    """

    node: _Name
    ring: _Name
    slot: Annotated[int, msgspec.Meta(ge=0, le=_U32)]
    generation: _Word
    size: _Word
    checksum: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    schema: Annotated[str, msgspec.Meta(max_length=LONGEST_SCHEMA)] = ""
    ports: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MOST_PORTS)] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for what cannot be, also where it is made by hand."""
        for field, is_sound in _SOUND:
            if not is_sound(found := getattr(self, field)):
                raise UsageError(f"this is no payload reference: its {field} is {found!r:.60}")

    def to_json(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> PayloadRef:
        """Raises TransportError where it is none; an unknown field passes, so that two versions can meet."""
        try:
            return decode(_decoder.decode, data, "its JSON")  # type: ignore[arg-type]  # a str is decoded, too
        except UsageError as error:
            raise TransportError(str(error)) from None
        except MalformedRecord as error:
            raise TransportError(f"this is no payload reference: {error}") from None

    def __str__(self) -> str:
        return f"{self.ring}[{self.slot}]@{self.generation} of {self.node or 'this node'} ({self.size} bytes)"


def is_ring_name(name: str) -> bool:
    """Names become paths and messages: nothing else is let through."""
    return _RING.fullmatch(name) is not None


def checksum_text(checksum: int | None) -> str:
    """As a ref has it: 16 hexadecimal digits, or "" for none."""
    return "" if checksum is None else f"{checksum:016x}"


def _is_word(it: object) -> bool:
    return type(it) is int and 0 <= it < 1 << 63


_SOUND: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("node", lambda it: type(it) is str),
    ("ring", lambda it: type(it) is str and is_ring_name(it)),
    ("slot", lambda it: _is_word(it) and it <= _U32),
    ("generation", _is_word),
    ("size", _is_word),
    ("checksum", lambda it: type(it) is str and (not it or _SUM.fullmatch(it))),
    ("schema", lambda it: type(it) is str),
    ("ports", lambda it: type(it) is tuple and all(type(port) is str for port in it)),
)

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(PayloadRef)
