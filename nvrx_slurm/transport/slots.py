"""The life of a slot, as pure rules: what a slot is, and what each step makes of it. No clock, no memory, no lock.

                 begin                publish                claim
        FREE ───────────▶ WRITING ───────────▶ READY ───────────▶ READING
         ▲ ▲                 │                 ▲   │ begin          │  │
         │ └──── abandon ────┘                 │   └─▶ WRITING      │  │
         │                                     └────── release ─────┘  │
         └──────────────────────────── consume ────────────────────────┘

- `begin` gives the slot a new generation; with it every older ref is stale. It takes READY only where overwriting is
  allowed, and counts what it drops.
- `claim` makes its caller the one owner of this read. Only the owner ends it, once, by `consume` or `release`.
  Any other end of a read changes nothing, and is counted as late.
- `take` is both at once, for a reader that has copied the payload before it: a generation is written once, so that
  what is READY in it still has not changed meanwhile.
- READING has a lease. Once it has lapsed, or its owner is dead, `reclaim` makes the slot ready again: the payload was
  not read.
- WRITING has none: nothing keeps a writer that stood still from writing on when it wakes, into what would be
  another's payload by then. `reclaim` makes the slot free again when the writer is dead.

`ring_access.py` does each step under the slot's lock, and makes it visible with one store.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, StrEnum

import msgspec
from msgspec.structs import replace


class SlotState(IntEnum):
    """FREE has no payload; READY has one that waits for a reader."""

    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3


FREE, WRITING, READY, READING = SlotState
State = SlotState  # its name in `nvrx_slurm.transport`


class SlotOwner(msgspec.Struct, frozen=True, gc=False):
    """Who writes or reads: a process (its id, and when it began, in ticks), and which of its attempts."""

    pid: int
    started_ticks: int
    attempt: int


NO_OWNER = SlotOwner(0, 0, 0)


class Counts(msgspec.Struct, frozen=True, gc=False):
    """What a slot has seen so far."""

    published: int = 0
    consumed: int = 0
    dropped: int = 0  # payloads that were overwritten before they were consumed
    released: int = 0  # reads that failed, or kept the payload: it stayed
    lapsed: int = 0  # owners that died, or kept a slot for longer than their lease
    late: int = 0  # ends of a read or write that was not the caller's any more: they changed nothing


class RingSlot(msgspec.Struct, frozen=True, gc=False):
    """All that is known of a slot. `generation`: of its last `begin`, 0 before the first one; `lease_ns`: until when
    its reader may keep it, by the machine's monotonic clock; `size`, `checksum`, `schema_bytes`: of its payload."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    owner: SlotOwner = NO_OWNER
    lease_ns: int = 0
    size: int = 0
    checksum: int | None = None
    schema_bytes: int = 0
    counts: Counts = Counts()


class Refusal(StrEnum):
    """Why a step was not taken. The value is for people."""

    BUSY = "another process or thread has the slot now"
    STALE = "the slot has another payload by now"
    CONSUMED = "the payload was consumed"
    NOT_READY = "there is no payload in the slot"
    OCCUPIED = "the slot has a payload that may not be overwritten"
    LATE = "the slot is not the caller's any more"


def lapsed(slot: RingSlot, now_ns: int, *, owner_is_dead: bool) -> bool:
    """Whether its owner has lost it."""
    if slot.state is READING:
        return owner_is_dead or now_ns >= slot.lease_ns
    return slot.state is WRITING and owner_is_dead


def reclaim(slot: RingSlot) -> RingSlot:
    """The slot is taken from an owner that has lost it (`lapsed`)."""
    state = FREE if slot.state is WRITING else READY
    return replace(slot, state=state, owner=NO_OWNER, lease_ns=0, counts=_add(slot, "lapsed"))


def begin(slot: RingSlot, generation: int, owner: SlotOwner, *, overwrite: bool) -> RingSlot | Refusal:
    """A writer takes the slot for a new payload."""
    if slot.state in (WRITING, READING):
        return Refusal.BUSY
    if slot.state is READY and not overwrite:
        return Refusal.OCCUPIED
    counts = _add(slot, "dropped") if slot.state is READY else slot.counts
    return RingSlot(WRITING, generation, owner, counts=counts)


def publish(
    slot: RingSlot, generation: int, owner: SlotOwner, *, size: int, checksum: int | None, schema_bytes: int
) -> RingSlot | Refusal:
    """The writer has written all of the payload."""
    if not _is_its(slot, WRITING, generation, owner):
        return Refusal.LATE
    return RingSlot(READY, generation, NO_OWNER, 0, size, checksum, schema_bytes, _add(slot, "published"))


def abandon(slot: RingSlot, generation: int, owner: SlotOwner) -> RingSlot | Refusal:
    """The writer could not write the payload."""
    if not _is_its(slot, WRITING, generation, owner):
        return Refusal.LATE
    return replace(slot, state=FREE, owner=NO_OWNER)


def claim(slot: RingSlot, generation: int | None, owner: SlotOwner, lease_ns: int) -> RingSlot | Refusal:
    """A reader takes the payload of that generation, or of any."""
    if generation is not None and generation != slot.generation:
        return Refusal.STALE
    if slot.state is READY:
        return replace(slot, state=READING, owner=owner, lease_ns=lease_ns)
    if slot.state is READING:
        return Refusal.BUSY
    return Refusal.NOT_READY if generation is None or slot.state is WRITING else Refusal.CONSUMED


def renew(slot: RingSlot, generation: int, owner: SlotOwner, lease_ns: int) -> RingSlot | Refusal:
    """The reader needs the slot for longer."""
    if not _is_its(slot, READING, generation, owner):
        return Refusal.LATE
    return replace(slot, lease_ns=lease_ns)


def consume(slot: RingSlot, generation: int, owner: SlotOwner) -> RingSlot | Refusal:
    """The reader has the payload: the slot is free."""
    if not _is_its(slot, READING, generation, owner):
        return Refusal.LATE
    return replace(slot, state=FREE, owner=NO_OWNER, lease_ns=0, counts=_add(slot, "consumed"))


def release(slot: RingSlot, generation: int, owner: SlotOwner) -> RingSlot | Refusal:
    """The reader has not got the payload, or leaves it for others."""
    if not _is_its(slot, READING, generation, owner):
        return Refusal.LATE
    return replace(slot, state=READY, owner=NO_OWNER, lease_ns=0, counts=_add(slot, "released"))


def take(slot: RingSlot, generation: int, size: int, *, consumed: bool) -> RingSlot | Refusal:
    """`claim` and its end in one, by a reader that has copied the payload before: it is ready still, so no writer
    has had the slot meanwhile. A payload of another size is not what was copied."""
    if slot.state is not READY or slot.generation != generation or slot.size != size:
        return Refusal.LATE
    if consumed:
        return replace(slot, state=FREE, counts=_add(slot, "consumed"))
    return replace(slot, counts=_add(slot, "released"))


def settle(slot: RingSlot, generation: int) -> RingSlot | Refusal:
    """A reader has the payload, but its Ack was lost, and the payload is ready again."""
    if slot.state is not READY or slot.generation != generation:
        return Refusal.LATE
    return replace(slot, state=FREE, counts=_add(slot, "consumed"))


def count_late(slot: RingSlot) -> RingSlot:
    """Count the end of a read or write that came too late. Nothing else changes."""
    return replace(slot, counts=_add(slot, "late"))


def _is_its(slot: RingSlot, state: SlotState, generation: int, owner: SlotOwner) -> bool:
    return slot.state is state and slot.generation == generation and slot.owner == owner


def _add(slot: RingSlot, name: str) -> Counts:
    return replace(slot.counts, **{name: getattr(slot.counts, name) + 1})


def diagram() -> str:
    """What each step makes of a slot in each state, as a Mermaid diagram: found by taking all of them."""
    me = SlotOwner(1, 1, 1)
    steps: dict[str, Callable[[RingSlot], RingSlot | Refusal]] = {
        "begin": lambda slot: begin(slot, slot.generation + 1, me, overwrite=True),
        "publish": lambda slot: publish(slot, 1, me, size=0, checksum=None, schema_bytes=0),
        "abandon": lambda slot: abandon(slot, 1, me),
        "claim": lambda slot: claim(slot, 1, me, 0),
        "consume": lambda slot: consume(slot, 1, me),
        "release": lambda slot: release(slot, 1, me),
        "take": lambda slot: take(slot, 1, slot.size, consumed=True),
        "settle": lambda slot: settle(slot, 1),
        "reclaim": lambda slot: reclaim(slot) if lapsed(slot, 0, owner_is_dead=True) else Refusal.BUSY,
    }
    lines = ["stateDiagram-v2", f"    [*] --> {SlotState.FREE.name}"]
    for state in SlotState:
        owner = me if state in (SlotState.WRITING, SlotState.READING) else NO_OWNER
        for name, step in steps.items():
            after = step(RingSlot(state, 1, owner))
            if isinstance(after, RingSlot):
                lines.append(f"    {state.name} --> {after.state.name} : {name}")
    return "\n".join(lines)
