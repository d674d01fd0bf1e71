"""The steps of `slots.py`, each under its slot's lock, on the memory that processes share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from nvrx_slurm.transport import slots
from nvrx_slurm.transport.errors import PayloadTimeout, RingError
from nvrx_slurm.transport.ring.locks import Contended
from nvrx_slurm.transport.ring.memory import Glance, Memory
from nvrx_slurm.transport.ring.owners import is_dead, open_attempts, this_process
from nvrx_slurm.transport.slots import Refusal, RingSlot, SlotOwner, State
from nvrx_slurm.util.log import get_logger

PATIENCE_S = 0.05
"""How long a claim waits for a slot's lock. A step takes microseconds, but its process may have to wait its turn."""

END_PATIENCE_S = 2.0
"""The same for the end of a read or write: only a holder that stands still keeps a lock for so long."""

HELD = (State.WRITING, State.READING)
"""A slot in these has an owner."""

Move = Callable[[RingSlot], RingSlot | Refusal]
"""What the slot is afterwards, or why it stays as it is."""

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
        for glance in self.glance():
            if glance.state is State.READING:
                self._give_back(glance.slot, owners, slots.release)

    # ---- writers

    def begin(self, index: int, owner: SlotOwner, *, overwrite: bool, patience_s: float) -> int | None:
        """The generation that the slot has now; None where it cannot be had."""

        def move(slot: RingSlot) -> RingSlot | Refusal:
            generation = max(self.memory.latest_generation(), slot.generation) + 1
            return slots.begin(slot, generation, owner, overwrite=overwrite)

        try:
            begun = self._step(index, move, patience_s)
        except Contended:
            return None
        return None if isinstance(begun, Refusal) else begun.generation

    def publish(
        self, index: int, generation: int, owner: SlotOwner, *, size: int, checksum: int | None, schema_bytes: int
    ) -> bool:
        publish = partial(slots.publish, size=size, checksum=checksum, schema_bytes=schema_bytes)
        return self._end(index, generation, owner, publish)

    def abandon(self, index: int, generation: int, owner: SlotOwner) -> bool:
        return self._end(index, generation, owner, slots.abandon)

    def is_written_by(self, index: int, owner: SlotOwner) -> bool:
        """At a glance, without the slot's lock; never of the process that this one was forked from."""
        return self.memory.state(index) is State.WRITING and owner.pid == this_process()[0]

    # ---- readers

    def claim(self, index: int, generation: int | None, owner: SlotOwner, lease_ns: int) -> RingSlot | Refusal:
        if not 0 <= index < self.memory.layout.slots:
            return Refusal.STALE
        try:
            return self._step(index, lambda slot: slots.claim(slot, generation, owner, lease_ns), PATIENCE_S)
        except Contended:
            return Refusal.BUSY

    def renew(self, index: int, generation: int, owner: SlotOwner, lease_ns: int) -> bool:
        return self._end(index, generation, owner, partial(slots.renew, lease_ns=lease_ns))

    def finish(
        self, index: int, generation: int, owner: SlotOwner, *, consumed: bool, until: float | None = None
    ) -> bool:
        return self._end(index, generation, owner, slots.consume if consumed else slots.release, until)

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

    def is_its(self, index: int, generation: int, owner: SlotOwner) -> bool:
        slot = self.look(index)
        return (slot.state, slot.generation, slot.owner) == (State.READING, generation, owner)

    # ---- both

    def reclaim_all(self) -> None:
        """What owners have lost. A slot whose lock cannot be had at once is left for later."""
        for glance in self.glance():
            if glance.state in HELD:
                with contextlib.suppress(Contended):
                    self._step(glance.slot, lambda slot: slot, 0.0)

    def glance(self) -> list[Glance]:
        """All slots as they were a moment ago."""
        return self.memory.glance()

    def look(self, index: int) -> RingSlot:
        """The slot as it is; waits for a step that is under way."""
        try:
            return self.memory.holding(index, lambda: self.memory.load(index), PATIENCE_S)
        except Contended:
            return self.memory.look(index)

    def disown(self, owner: SlotOwner) -> None:
        """Give back every slot of this attempt, after an error: nothing is counted as late."""
        for glance in self.glance():
            if glance.state in HELD:
                end = slots.release if glance.state is State.READING else slots.abandon
                self._give_back(glance.slot, {owner}, end)

    # ---- how

    def _give_back(self, index: int, owners: set[SlotOwner], end: Callable[..., RingSlot | Refusal]) -> None:
        def move(slot: RingSlot) -> RingSlot | Refusal:
            if slot.owner not in owners or slot.owner.pid != this_process()[0]:
                return Refusal.LATE
            return end(slot, slot.generation, slot.owner)

        with contextlib.suppress(Contended):  # its lease, or the end of this process, will do it
            self._step(index, move, PATIENCE_S)

    def _end(
        self,
        index: int,
        generation: int,
        owner: SlotOwner,
        end: Callable[..., RingSlot | Refusal],
        until: float | None = None,
    ) -> bool:
        """Whether the slot was still the caller's. If not, nothing changes but a count."""
        is_own = owner.pid == this_process()[0]  # a forked child has a copy of the claim, not the slot
        ended = self._patient(
            index, lambda slot: end(slot, generation, owner) if is_own else Refusal.LATE, until, is_end=True
        )
        if isinstance(ended, RingSlot):
            return True
        _log.warning("%s[%d]@%d: the end of a read or write came too late: %s", self.name, index, generation, ended)
        return False

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
