"""`Claim` and `Writing`: one read of a slot, and one write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import xxhash

from nvrx_slurm.transport import arguments
from nvrx_slurm.transport.errors import PayloadCorrupt, RingError, StaleSlotError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA, PayloadRef, checksum_text
from nvrx_slurm.transport.ring import copying
from nvrx_slurm.transport.ring.owners import OwnedAttempt, this_process
from nvrx_slurm.transport.ring.steps import Steps
from nvrx_slurm.transport.slots import RingSlot

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
        return PayloadRef(
            node="",
            ring=self._steps.name,
            slot=self.slot,
            generation=self.generation,
            size=self.size,
            checksum=checksum_text(self.checksum),
            schema=self.schema,
        )

    def copy_into(
        self, buffer: bytearray | memoryview, start: int = 0, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill `buffer` with the payload from `start` on. `seen` gets each piece of it once, in order, while it is
        still in the processor's cache. Raises ValueError where the payload is shorter than that."""
        self._steps.check()
        target = copying.as_bytes(buffer)
        if not 0 <= start <= self.size - target.nbytes:
            raise ValueError(f"bytes {start} to {start + target.nbytes} of a payload of {self.size} cannot be read")
        source = self.payload[start : start + target.nbytes]
        if seen is None:
            copying.copy(target, source)
        else:
            copying.copy_seen(target, source, seen)

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
        return self._steps.is_its(self.slot, self.generation, self._attempt.owner)

    def renew(self, lease_s: float) -> bool:
        """Keep it for so long from now. False where it is not this claim's any more."""
        self._steps.check()
        until_ns = time.monotonic_ns() + int(lease_s * 1e9)
        return self._steps.renew(self.slot, self.generation, self._attempt.owner, until_ns)

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
        return self._steps.finish(self.slot, self.generation, self._attempt.owner, consumed=consumed, until=until)

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
        self._in_order = 0  # so many bytes have come one after the other: these are hashed. Negative: not all have
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
        in_order, self._in_order = self._in_order, -1
        if self._hash is None or offset != in_order:
            copying.copy(target, source)
        else:
            copying.copy_seen(target, source, self._hash.update)
            self._in_order = offset + source.nbytes

    def publish(self) -> PayloadRef:
        """All is there: let readers have it. Raises StaleSlotError where the slot is not this writer's any more."""
        self._steps.check()
        checksum = self._checksum()
        published = self._steps.publish(
            self.slot,
            self.generation,
            self._attempt.owner,
            size=self.size,
            checksum=checksum,
            schema_bytes=len(self._schema),
        )
        ref = PayloadRef(
            node="",
            ring=self._steps.name,
            slot=self.slot,
            generation=self.generation,
            size=self.size,
            checksum=checksum_text(checksum),
            schema=self._schema.decode(),
        )
        self._is_over = True
        if not published:
            raise StaleSlotError(f"{ref}: this write has ended before", ref=ref)
        return ref

    def abandon(self) -> bool:
        """Give the slot back without a payload. False where it is not this writer's any more."""
        abandoned = self._steps.abandon(self.slot, self.generation, self._attempt.owner)
        self._is_over = True
        return abandoned

    def drop(self) -> None:
        """After an error: give the slot back if it is still this writer's. Raises nothing, counts nothing as late."""
        self._is_over = True
        self._steps.disown(self._attempt.owner)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor was cut
            if self._steps.is_written_by(self.slot, self._attempt.owner):
                self.drop()

    def _checksum(self) -> int | None:
        if self._hash is None:
            return None
        return self._hash.intdigest() if self._in_order == self.size else copying.checksum(self._payload)
