"""A mapped ring: its slots as `slots.RingSlot` and back, its payloads, and the word that grows with each change.

A slot is stored in two moves: into the bank that is not in use, then, by one aligned store of 8 bytes, the word that
says which bank it is. A process that is killed between any two instructions leaves the slot in its old or its new
state.

The mapping goes when the last object that looks at it has gone: a copy, a step of another thread, a user's array.
Nothing unmaps it under them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import astuple

from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA
from nvrx_slurm.transport.ring import locks
from nvrx_slurm.transport.ring.locks import Lock, holding, initialize
from nvrx_slurm.transport.slots import FREE, READY, Counts, RingSlot, SlotOwner, State

T = TypeVar("T")

_BANK = struct.Struct("=QQQQQQII6Q")  # owner (3), lease, size, checksum, whether there is one, schema, counts (6)
_BANK_QUADS = _BANK.size // 8
_SIZE, _CONSUMED, _RELEASED = 4, 8, 10  # where they are in it, in steps of 8 bytes
_STATE, _BANK_BIT, _GENERATION_SHIFT = 3, 4, 3
_STATES = tuple(State)


class Glance(msgspec.Struct, frozen=True, gc=False):
    """What a word says of its slot, without its lock: true a moment ago."""

    state: State
    generation: int
    slot: int


class Memory:
    """One mapping of one ring."""

    def __init__(self, mapped: mmap.mmap, layout: Layout, name: str) -> None:
        self.layout = layout
        self.view = memoryview(mapped)
        self._anchor = ctypes.c_char.from_buffer(mapped)  # the mapping cannot move or go while this is there
        start = ctypes.addressof(self._anchor)
        self.changes_address = start + CHANGES_AT
        self._changes = self.view[CHANGES_AT : CHANGES_AT + 4].cast("I")
        self._waiting = self.view[WAITING_AT : WAITING_AT + 4].cast("I")
        self._words = self.view[WORDS_AT : WORDS_AT + layout.slots * WORD_BYTES].cast("Q")
        self._quads = self.view[: layout.areas_at].cast("Q")
        self._locks = [Lock(start + layout.mutex_at(index), (name, index)) for index in range(layout.slots)]
        self._banks = [layout.banks_at(index) for index in range(layout.slots)]
        self._schemas = [layout.schema_at(index) for index in range(layout.slots)]
        self._payloads = [layout.payload_at(index) for index in range(layout.slots)]

    def initialize(self) -> None:
        """Once, before the ring has a name. All else is zeros: slots are free."""
        for lock in self._locks:
            initialize(lock.address)

    def holding(self, index: int, act: Callable[[], T], patience_s: float) -> T:
        """What `act` returns under the slot's lock. Raises Contended."""
        return holding(self._locks[index], act, patience_s)

    def load(self, index: int) -> RingSlot:
        """Under its lock."""
        word = self._words[index]
        bank = self._banks[index] + BANK_BYTES * (word >> 2 & 1)
        found = _BANK.unpack_from(self.view, bank)
        lease_ns, size, checksum, has_checksum, schema_bytes = found[3:8]
        return RingSlot(
            _STATES[word & _STATE],
            word >> _GENERATION_SHIFT,
            SlotOwner(*found[:3]),
            lease_ns,
            size,
            checksum if has_checksum else None,
            schema_bytes,
            Counts(*found[8:]),
        )

    def store(self, index: int, slot: RingSlot) -> None:
        """Under its lock."""
        bit = ~self._words[index] & _BANK_BIT
        _BANK.pack_into(
            self.view,
            self._banks[index] + BANK_BYTES * (bit >> 2),
            *astuple(slot.owner),
            slot.lease_ns,
            slot.size,
            slot.checksum or 0,
            slot.checksum is not None,
            slot.schema_bytes,
            *astuple(slot.counts),
        )
        # The bank first, then the word: one aligned store of 8 bytes makes all of it visible at once. x86-64 keeps
        # the order of stores; on aarch64 the release of the mutex orders them for the next holder.
        self._words[index] = slot.generation << _GENERATION_SHIFT | bit | slot.state

    def take(self, index: int, generation: int, size: int, consumed: bool, patience_s: float) -> bool:
        """`slots.take` under the slot's lock, of the bytes as they lie there: a small read is hardly more than that.
        Raises Contended."""
        taken = holding(self._locks[index], partial(self._take, index, generation, size, consumed), patience_s)
        if taken and consumed:
            self.wake_waiting()
        return taken

    def _take(self, index: int, generation: int, size: int, consumed: bool) -> bool:
        word, quads = self._words[index], self._quads
        bit = word & _BANK_BIT
        here = self._banks[index] + BANK_BYTES * (bit >> 2) >> 3
        if word ^ bit != generation << _GENERATION_SHIFT | READY or quads[here + _SIZE] != size:
            return False
        bit ^= _BANK_BIT
        there = self._banks[index] + BANK_BYTES * (bit >> 2) >> 3
        quads[there : there + _BANK_QUADS] = quads[here : here + _BANK_QUADS]
        quads[there + (_CONSUMED if consumed else _RELEASED)] += 1
        self._words[index] = generation << _GENERATION_SHIFT | bit | (FREE if consumed else READY)
        return True

    def look(self, index: int) -> RingSlot:
        """Without its lock, which a stopped process may keep: the state that was last made visible."""
        # A bank is only written while the word names the other one. If the word is the same before and after, the
        # bank that was read was not written meanwhile.
        while True:
            word = self._words[index]
            slot = self.load(index)
            if self._words[index] == word:
                return slot

    def is_ready(self, index: int, generation: int) -> bool:
        """At a glance."""
        return self._words[index] & ~_BANK_BIT == generation << _GENERATION_SHIFT | READY

    def state(self, index: int) -> State:
        return _STATES[self._words[index] & _STATE]

    def glance(self) -> list[Glance]:
        return [
            Glance(_STATES[word & _STATE], word >> _GENERATION_SHIFT, index)
            for index, word in enumerate(self._words.tolist())
        ]

    def free(self, start: int) -> Iterator[int]:
        """Slots that are free at a glance, from `start` on and around: a slot rests for as long as it can."""
        words = self._words.tolist()
        for index in (*range(start, len(words)), *range(start)):
            if not words[index] & _STATE:
                yield index

    def latest_generation(self) -> int:
        return max(self._words.tolist()) >> _GENERATION_SHIFT

    def payload(self, index: int, size: int) -> memoryview:
        start = self._payloads[index]
        return self.view[start : start + size]

    def schema(self, index: int, size: int) -> memoryview:
        start = self._schemas[index]
        return self.view[start : start + size]

    def changes(self) -> int:
        return self._changes[0]

    def announce(self) -> None:
        """Call this before `wait`, and look at the slots once more in between: the next change then wakes the waiting
        processes. Changes wake no one where no process waits, which saves a system call for each."""
        self._waiting[0] = 1

    def wake_waiting(self) -> None:
        """A slot has changed: wake the processes that wait, if any."""
        if self._waiting[0]:
            self._waiting[0] = 0
            locks.wake_all(self.changes_address)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Until something has changed since `seen`, but not for long: look again."""
        locks.wait(self.changes_address, seen, timeout_s)


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


class RingShape(NamedTuple):
    """How a ring was made."""

    slots: int
    slot_bytes: int
    overwrite: bool
    checksum: bool
    lease_ns: int


class Header(NamedTuple):
    """What the file says of itself."""

    creator: Creator
    shape: RingShape

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
        return cls(creator, RingShape(slots, slot_bytes, bool(flags & _OVERWRITE), bool(flags & _CHECKSUM), lease_ns))


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
