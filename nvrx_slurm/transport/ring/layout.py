"""Where everything lies in a ring's file, and what its first bytes say.

    0        header      magic, version, creator; then the number of slots, their size, and how they are used
    128      changes     4 bytes that grow with a change that somebody waits for; and whether anybody does (4 bytes)
    192      words       8 bytes a slot: generation | bank | state
    …        controls    320 bytes a slot: its mutex (64), and two banks (128 each)
    a page   areas       a slot's schema (`LONGEST_SCHEMA` bytes), then its payload, each from the start of a page

The header's first part, up to the creator, is the same in all versions: a sweeper knows the rings of each.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA

MAGIC = b"nvrxring"
VERSION = 1
PAGE, LINE = 4096, 64
HEADER_BYTES = 128
CHANGES_AT, WAITING_AT = 128, 132
WORDS_AT = 192
WORD_BYTES, MUTEX_BYTES, BANK_BYTES = 8, 64, 128
CONTROL_BYTES = MUTEX_BYTES + 2 * BANK_BYTES
MOST_SLOTS = 1 << 16
MOST_BYTES = 1 << 46

_MADE_BY = struct.Struct("=8sIxxxxQQQ")
_SHAPE = struct.Struct("=IIQQ")
_OVERWRITE, _CHECKSUM = 1, 2


class Creator(NamedTuple):
    """The process that made the ring: its id, when it began, and the namespace in which that is its id."""

    pid: int
    started_ticks: int
    namespace: int


class Shape(NamedTuple):
    """How a ring was made."""

    slots: int
    slot_bytes: int
    overwrite: bool
    checksum: bool
    lease_ns: int


class Header(NamedTuple):
    """What the file says of itself."""

    creator: Creator
    shape: Shape

    def pack(self) -> bytes:
        slots, slot_bytes, overwrite, checksum, lease_ns = self.shape
        flags = overwrite * _OVERWRITE | checksum * _CHECKSUM
        return _MADE_BY.pack(MAGIC, VERSION, *self.creator) + _SHAPE.pack(slots, flags, slot_bytes, lease_ns)

    @classmethod
    def unpack(cls, data: bytes, name: str) -> Header:
        """Raises RingError where it is none, or of another version."""
        creator, version = made_by(data)
        if creator is None:
            raise RingError(f"{name} is not a ring")
        if version != VERSION:
            raise RingError(f"{name} is a ring of version {version}, this side knows {VERSION}: use one release")
        slots, flags, slot_bytes, lease_ns = _SHAPE.unpack_from(data, _MADE_BY.size)
        return cls(creator, Shape(slots, slot_bytes, bool(flags & _OVERWRITE), bool(flags & _CHECKSUM), lease_ns))


def made_by(data: bytes) -> tuple[Creator | None, int]:
    """The creator and the version, of a ring of any version; no creator if these are not the first bytes of one."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None, 0
    _, version, *creator = _MADE_BY.unpack_from(data)
    return Creator(*creator), version


class Layout(NamedTuple):
    """Offsets in the file. Raises nothing: `checked` has looked at the numbers."""

    slots: int
    slot_bytes: int

    @property
    def controls_at(self) -> int:
        return up_to(LINE, WORDS_AT + self.slots * WORD_BYTES)

    @property
    def areas_at(self) -> int:
        return up_to(PAGE, self.controls_at + self.slots * CONTROL_BYTES)

    @property
    def area_bytes(self) -> int:
        return up_to(PAGE, LONGEST_SCHEMA + self.slot_bytes)

    @property
    def total_bytes(self) -> int:
        return self.areas_at + self.slots * self.area_bytes

    def mutex_at(self, index: int) -> int:
        return self.controls_at + index * CONTROL_BYTES

    def banks_at(self, index: int) -> int:
        return self.mutex_at(index) + MUTEX_BYTES

    def schema_at(self, index: int) -> int:
        return self.areas_at + index * self.area_bytes

    def payload_at(self, index: int) -> int:
        return self.schema_at(index) + LONGEST_SCHEMA


def checked(slots: int, slot_bytes: int) -> Layout:
    """Raises RingError where such a ring cannot be."""
    if not 1 <= slots <= MOST_SLOTS:
        raise RingError(f"a ring of {slots} slots cannot be: it has 1 to {MOST_SLOTS}")
    if not 1 <= slot_bytes <= MOST_BYTES:
        raise RingError(f"slots of {slot_bytes} bytes cannot be: they have 1 to {MOST_BYTES}")
    return Layout(slots, slot_bytes)


def up_to(boundary: int, number: int) -> int:
    return -(-number // boundary) * boundary
