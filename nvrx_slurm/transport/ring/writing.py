"""A writing: one payload on its way into one slot."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import xxhash

from nvrx_slurm.transport import arguments
from nvrx_slurm.transport.errors import RingError, StaleSlotError
from nvrx_slurm.transport.ref import PayloadRef, checksum_text
from nvrx_slurm.transport.ring import copying
from nvrx_slurm.transport.ring.owners import Attempt, this_process
from nvrx_slurm.transport.ring.steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Writing:
    """A slot that is this writer's until it publishes or abandons; one that is forgotten is abandoned.

    Bytes of the payload that nobody copies in are whatever was there before.
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
        self, steps: Steps, attempt: Attempt, index: int, generation: int, size: int, schema: bytes, *, checksum: bool
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
