"""`Claim` and `Writing`: one read of a slot, one write; `Steps`: what `slots.py` decides, under the slots' locks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from nvrx_slurm.transport import arguments, copying, slots
from nvrx_slurm.transport.errors import PayloadCorrupt, PayloadTimeout, RingError, StaleSlotError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA, PayloadRef, checksum_text
from nvrx_slurm.transport.ring_file import Memory
from nvrx_slurm.transport.ring_locks import Contended, OwnedAttempt, is_dead, open_attempts, this_process
from nvrx_slurm.transport.slots import Refusal, RingSlot, SlotOwner, SlotState
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Claim:
    """The payload of a slot, for as long as its lease. `payload` lies in the ring itself, read-only; `size` in bytes;
    `checksum` None where the ring has none.

    What was read is the payload only if `finish` says True: until then its lease may have lapsed, and a writer have
    the slot. A claim ends with its last reference, and with its process.
    """

    __slots__ = (
        "_attempt",
        "_memory",
        "_schema_bytes",
        "_steps",
        "checksum",
        "generation",
        "payload",
        "size",
        "slot",
    )

    def __init__(self, steps: Steps, attempt: OwnedAttempt, index: int, claimed: RingSlot) -> None:
        self._steps, self._attempt, self._memory = steps, attempt, steps.memory
        self.slot, self.generation = index, claimed.generation
        self.size, self.checksum = claimed.size, claimed.checksum
        if claimed.size > self._memory.layout.slot_bytes or claimed.schema_bytes > LONGEST_SCHEMA:
            raise PayloadCorrupt(f"slot {index}@{claimed.generation} says that it has more than fits into it")
        self.payload = self._memory.payload(index, claimed.size).toreadonly()
        self._schema_bytes = claimed.schema_bytes

    @property
    def schema(self) -> str:
        """Raises PayloadCorrupt where it is no text: then a writer has the slot by now."""
        try:
            return str(self._memory.schema(self.slot, self._schema_bytes), "utf-8")
        except UnicodeDecodeError as error:
            raise PayloadCorrupt(f"the schema is no UTF-8: {error}") from None

    @property
    def ref(self) -> PayloadRef:
        """What names this payload on its node."""
        return _ref(self._steps, self, self.checksum, self.schema)

    def copy_into(
        self, buffer: bytearray | memoryview, start: int = 0, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill `buffer` with the payload from `start` on. `seen` gets each piece of it once, in order, while it is
        still in the processor's cache. Raises ValueError where the payload is shorter than that."""
        self._steps.check()
        target = copying.as_bytes(buffer)
        if not 0 <= start <= self.size - target.nbytes:
            raise ValueError(f"bytes {start} to {start + target.nbytes} of a payload of {self.size} cannot be read")
        copying.copy(target, self.payload[start : start + target.nbytes], seen)

    def copied(self, expected: str = "") -> bytearray:
        """The payload, as a copy. `expected`: the checksum of its ref. Raises PayloadCorrupt where these are not the
        bytes that were written."""
        data = copying.room(self.size)
        if self.checksum is None and not expected:
            self.copy_into(data)
        else:
            self._compare(copying.copy_hashed(memoryview(data), self.payload), expected)
        return data

    def check(self, expected: str = "") -> None:
        """Read all of the payload where it lies. Raises PayloadCorrupt as `copied`."""
        if self.checksum is not None or expected:
            self._compare(copying.checksum(self.payload), expected)

    def _compare(self, seen: int, expected: str) -> None:
        if (self.checksum is not None and seen != self.checksum) or (expected and seen != int(expected, 16)):
            raise PayloadCorrupt(f"slot {self.slot}@{self.generation} has another checksum than what was written")

    def is_ours(self) -> bool:
        """Whether the slot is still this claim's: then all that was read until now is the payload."""
        slot = self._steps.look(self.slot)
        own = SlotState.READING, self.generation, self._attempt.owner
        return (slot.state, slot.generation, slot.owner) == own

    def renew(self, lease_s: float) -> bool:
        """Keep it for so long from now. False where it is not this claim's any more."""
        self._steps.check()
        renew = partial(slots.renew, lease_ns=lease_end(arguments.lease(lease_s)))
        return self._steps.end(self.slot, self.generation, self._attempt.owner, renew)

    def finish(self, consumed: bool, until: float | None = None) -> bool:
        """End it: the slot is free now or, if it was not `consumed`, ready again. False where it was not this claim's
        any more: what was read is worth nothing. Raises PayloadTimeout where a stopped process keeps the slot's lock,
        for seconds, or at `until` (of `time.monotonic()`): then the claim has not ended, and whether what was read is
        worth anything is not known."""
        try:
            self._steps.check()
        except RingError:
            self.drop()
            raise
        end = slots.consume if consumed else slots.release
        return self._steps.end(self.slot, self.generation, self._attempt.owner, end, until)

    def drop(self) -> None:
        """After an error: give it back if it is still this claim's. Raises nothing, counts nothing as late."""
        self._steps.disown(self._attempt.owner)


class Writing:
    """A slot that is this writer's until it publishes or abandons; one that is forgotten is abandoned.

    Bytes of the payload that are not copied in keep the value that they had.
    """

    __slots__ = (
        "_attempt",
        "_hash",
        "_in_order",
        "_is_over",
        "_payload",
        "_schema",
        "_steps",
        "generation",
        "size",
        "slot",
    )

    def __init__(
        self,
        steps: Steps,
        attempt: OwnedAttempt,
        index: int,
        generation: int,
        size: int,
        schema: bytes,
        *,
        checksum: bool,
    ) -> None:
        self._steps, self._attempt = steps, attempt
        self.slot, self.generation, self.size = index, generation, size
        self._schema = schema
        self._is_over = False
        self._payload = steps.memory.payload(index, size)
        self._hash = xxhash.xxh3_64() if checksum else None
        # So many bytes were copied in one after the other, and hashed. Negative: some came out of order.
        self._in_order = 0
        if schema:
            steps.memory.schema(index, len(schema))[:] = schema

    def copy_in(self, offset: int, buffer: Buffer) -> None:
        """Write these bytes there. Raises RingError where that is beyond the payload, and StaleSlotError once
        this write has ended: others read there by then, or write."""
        self._steps.check()
        if self._is_over:
            raise StaleSlotError(
                f"slot {self.slot}@{self.generation} of ring {self._steps.name}: this write has ended"
            )
        source, offset = copying.as_bytes(buffer), arguments.whole("offset", offset, 0)
        if not 0 <= offset <= self.size - source.nbytes:
            raise RingError(
                f"bytes {offset} to {offset + source.nbytes} are beyond a payload of {self.size} bytes, as begun"
            )
        if self._attempt.owner.pid != this_process()[0]:
            raise RingError("this process was forked in the middle of a write: that is its parent's to end")
        target = self._payload[offset : offset + source.nbytes]
        # Not in order until the copy has ended: an exception may leave the hash behind the bytes, or ahead of them.
        in_order, self._in_order = self._in_order, -1
        if self._hash is None or offset != in_order:
            copying.copy(target, source)
        else:
            copying.copy(target, source, self._hash.update)
            self._in_order = offset + source.nbytes

    def publish(self) -> PayloadRef:
        """The payload is complete: let readers have it. Raises StaleSlotError where this writer has lost the slot."""
        self._steps.check()
        checksum = None
        if self._hash is not None:
            # What was copied in out of order was not hashed on the way.
            is_hashed = self._in_order == self.size
            checksum = self._hash.intdigest() if is_hashed else copying.checksum(self._payload)
        publish = partial(slots.publish, size=self.size, checksum=checksum, schema_bytes=len(self._schema))
        is_published = self._steps.end(self.slot, self.generation, self._attempt.owner, publish)
        ref = _ref(self._steps, self, checksum, self._schema.decode())
        self._is_over = True
        if not is_published:
            raise StaleSlotError(f"{ref}: this write has ended before", ref=ref)
        return ref

    def abandon(self) -> bool:
        """Give the slot back without a payload. False where it is not this writer's any more."""
        is_abandoned = self._steps.end(self.slot, self.generation, self._attempt.owner, slots.abandon)
        self._is_over = True
        return is_abandoned

    def drop(self) -> None:
        """After an error: give the slot back if it is still this writer's. Raises nothing, counts nothing as late."""
        self._is_over = True
        self._steps.disown(self._attempt.owner)

    def __del__(self) -> None:
        # A constructor that was cut short has left attributes out.
        with contextlib.suppress(AttributeError):
            # At a glance, without the slot's lock. Not in a forked child: the slot is its parent's.
            is_writing = self._steps.memory.state(self.slot) is SlotState.WRITING
            if is_writing and self._attempt.owner.pid == this_process()[0]:
                self.drop()


def lease_end(lease_s: float) -> int:
    """When a lease ends that begins now, in nanoseconds of the machine's monotonic clock; not before that clock's
    begin."""
    return max(time.monotonic_ns() + int(lease_s * 1e9), 0)


def _ref(steps: Steps, of: Claim | Writing, checksum: int | None, schema: str) -> PayloadRef:
    return PayloadRef(
        node="",
        ring=steps.name,
        slot=of.slot,
        generation=of.generation,
        size=of.size,
        checksum=checksum_text(checksum),
        schema=schema,
    )


# How long a claim waits for a slot's lock. A step takes microseconds, but its process may have to wait its turn.
PATIENCE_S = 0.05
# The same for the end of a read or write: only a holder that stands still keeps a lock for so long.
END_PATIENCE_S = 2.0
HELD = (SlotState.WRITING, SlotState.READING)  # a slot in these has an owner
Move = Callable[[RingSlot], RingSlot | Refusal]  # what the slot is afterwards, or why it stays as it is
_log = get_logger("transport")


class Steps:
    """Those of one attached ring. They go on working once it is closed, for what this process still has to end."""

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory, self.name = memory, name
        self._is_closed = False

    def check(self) -> None:
        """Raises RingError if the ring was closed."""
        if self._is_closed:
            raise RingError(f"ring {self.name} is closed")

    def close(self) -> None:
        """Give back what this process reads. What it writes, it may be copying now: that is its writers' to end."""
        self._is_closed = True
        owners = open_attempts(id(self))
        for glance in self.memory.glance():
            if glance.state is SlotState.READING:
                self._give_back(glance.slot, owners, slots.release)

    # ---- writers

    def begin(self, index: int, owner: SlotOwner, *, drops: int | None, patience_s: float) -> int | Refusal:
        """The generation that the slot has now. `drops`: of the payload that may be overwritten; any other stays."""

        def move(slot: RingSlot) -> RingSlot | Refusal:
            if slot.state is SlotState.READY and drops is not None and drops != slot.generation:
                return Refusal.STALE
            # More than any slot's, not only this one's: readers take the lowest generation for the oldest payload.
            generation = max(self.memory.latest_generation(), slot.generation) + 1
            return slots.begin(slot, generation, owner, overwrite=drops is not None)

        try:
            begun = self._step(index, move, patience_s)
        except Contended:
            return Refusal.BUSY
        return begun if isinstance(begun, Refusal) else begun.generation

    # ---- readers

    def claim(self, index: int, generation: int | None, owner: SlotOwner, lease_ns: int) -> RingSlot | Refusal:
        if not 0 <= index < self.memory.layout.slots:
            return Refusal.STALE
        try:
            return self._step(index, lambda slot: slots.claim(slot, generation, owner, lease_ns), PATIENCE_S)
        except Contended:
            return Refusal.BUSY

    def take(self, index: int, generation: int, size: int, *, consumed: bool) -> bool:
        """Not from an owner that has lost the slot: that is for a claim to find out."""
        if not 0 <= index < self.memory.layout.slots:
            return False
        try:
            return self.memory.take(index, generation, size, consumed, PATIENCE_S)
        except Contended:
            return False

    def settle(self, index: int, generation: int) -> bool:
        if not 0 <= index < self.memory.layout.slots:
            return False
        settled = self._patient(index, lambda slot: slots.settle(slot, generation))
        return not isinstance(settled, Refusal)

    # ---- both

    def reclaim_all(self) -> None:
        """What owners have lost. A slot whose lock cannot be had at once is left for later."""
        for glance in self.memory.glance():
            if glance.state in HELD:
                with contextlib.suppress(Contended):
                    self._step(glance.slot, lambda slot: slot, 0.0)

    def look(self, index: int) -> RingSlot:
        """The slot as it is; waits for a step that is under way."""
        try:
            return self.memory.holding(index, lambda: self.memory.load(index), PATIENCE_S)
        except Contended:
            return self.memory.look(index)

    def disown(self, owner: SlotOwner) -> None:
        """Give back every slot of this attempt, after an error: nothing is counted as late."""
        for glance in self.memory.glance():
            if glance.state in HELD:
                end = slots.release if glance.state is SlotState.READING else slots.abandon
                self._give_back(glance.slot, {owner}, end)

    def end(
        self,
        index: int,
        generation: int,
        owner: SlotOwner,
        end: Callable[..., RingSlot | Refusal],
        until: float | None = None,
    ) -> bool:
        """End a read or a write, or renew its lease. False where the slot was not the caller's any more: then nothing
        changes but a count."""
        # A forked child has a copy of the claim, not the slot.
        is_own = owner.pid == this_process()[0]
        ended = self._patient(
            index, lambda slot: end(slot, generation, owner) if is_own else Refusal.LATE, until, is_end=True
        )
        if isinstance(ended, RingSlot):
            return True
        _log.warning("%s[%d]@%d: the end of a read or write came too late: %s", self.name, index, generation, ended)
        return False

    # ---- how

    def _give_back(self, index: int, owners: set[SlotOwner], end: Callable[..., RingSlot | Refusal]) -> None:
        def move(slot: RingSlot) -> RingSlot | Refusal:
            if slot.owner not in owners or slot.owner.pid != this_process()[0]:
                return Refusal.LATE
            return end(slot, slot.generation, slot.owner)

        # Where the lock is contended, the end of the lease or of this process gives the slot back.
        with contextlib.suppress(Contended):
            self._step(index, move, PATIENCE_S)

    def _patient(
        self, index: int, move: Move, until: float | None = None, *, is_end: bool = False
    ) -> RingSlot | Refusal:
        patience_s = END_PATIENCE_S
        if until is not None:
            patience_s = min(patience_s, max(until - time.monotonic(), PATIENCE_S))
        try:
            return self._step(index, move, patience_s, is_end=is_end)
        except Contended:
            raise PayloadTimeout(
                f"{self.name}[{index}]: a process has kept the slot's lock for {patience_s:.3g} s: is it stopped?"
            ) from None

    def _step(self, index: int, move: Move, patience_s: float, *, is_end: bool = False) -> RingSlot | Refusal:
        """Raises Contended. A step that is the end of a read or write counts it where it comes too late; any other
        first takes the slot from an owner that has lost it."""
        memory, is_news = self.memory, False

        def act() -> RingSlot | Refusal:
            nonlocal is_news
            before = slot = memory.load(index)
            # The end of a read is valid after its lease, too, as long as no other step has taken the slot from it.
            if not is_end and slot.state in HELD:
                lost = slots.lapsed(slot, time.monotonic_ns(), owner_is_dead=is_dead(slot.owner))
                slot = slots.reclaim(slot) if lost else slot
            outcome = move(slot)
            if isinstance(outcome, RingSlot):
                slot = outcome
            elif is_end:
                slot = slots.count_late(slot)
            if slot is not before:
                memory.store(index, slot)
                is_news = slot.state is not before.state and slot.state not in HELD
            return outcome

        outcome = memory.holding(index, act, patience_s)
        # After the lock is released: a woken process wants that lock. Waiting processes want a slot that is ready or
        # free, so other changes wake no one.
        if is_news:
            memory.wake_waiting()
        return outcome
