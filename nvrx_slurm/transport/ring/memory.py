"""A mapped ring: its slots as `slots.Slot` and back, its payloads, and the word that grows with each change.

A slot is stored in two moves: into the bank that is not in use, then, by one aligned store of 8 bytes, the word that
says which bank it is. Whoever is killed between any two instructions leaves the slot as it was, or as it should be.

The mapping goes when the last object that looks at it has gone: a copy, a step of another thread, a user's array.
Nothing unmaps it under them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import astuple

from nvrx_slurm.transport.ring import futex
from nvrx_slurm.transport.ring.layout import BANK_BYTES, CHANGES_AT, WAITING_AT, WORD_BYTES, WORDS_AT, Layout
from nvrx_slurm.transport.ring.mutex import Lock, holding, initialize
from nvrx_slurm.transport.slots import FREE, READY, Counts, Owner, Slot, State

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
        """Once, before anybody else knows of it. All else is zeros: slots are free."""
        for lock in self._locks:
            initialize(lock.address)

    def holding(self, index: int, act: Callable[[], T], patience_s: float) -> T:
        """What `act` returns under the slot's lock. Raises Contended."""
        return holding(self._locks[index], act, patience_s)

    def load(self, index: int) -> Slot:
        """Under its lock."""
        word = self._words[index]
        bank = self._banks[index] + BANK_BYTES * (word >> 2 & 1)
        found = _BANK.unpack_from(self.view, bank)
        lease_ns, size, checksum, has_checksum, schema_bytes = found[3:8]
        return Slot(
            _STATES[word & _STATE],
            word >> _GENERATION_SHIFT,
            Owner(*found[:3]),
            lease_ns,
            size,
            checksum if has_checksum else None,
            schema_bytes,
            Counts(*found[8:]),
        )

    def store(self, index: int, slot: Slot) -> None:
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
        self._words[index] = slot.generation << _GENERATION_SHIFT | bit | slot.state  # one store: it is so now

    def take(self, index: int, generation: int, size: int, consumed: bool, patience_s: float) -> bool:
        """`slots.take` under the slot's lock, of the bytes as they lie there: a small read is hardly more than that.
        Raises Contended."""
        taken = holding(self._locks[index], partial(self._take, index, generation, size, consumed), patience_s)
        if taken and consumed:
            self.tell()
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

    def look(self, index: int) -> Slot:
        """Without its lock, which somebody keeps who stands still: what was last made visible stays as it is."""
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
        """Somebody is going to wait: changes are told, until one was. Look once more, and only then wait."""
        self._waiting[0] = 1

    def tell(self) -> None:
        """Something has changed: wake who waits for that."""
        if self._waiting[0]:
            self._waiting[0] = 0
            futex.tell(self.changes_address)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Until something has changed since `seen`, but not for long: look again."""
        futex.wait(self.changes_address, seen, timeout_s)
