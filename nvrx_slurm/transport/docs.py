"""Draws the life of a slot in docs/transport.md: `python -m nvrx_slurm.transport.docs docs/transport.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.transport import slots
from nvrx_slurm.transport.slots import NO_OWNER, Refusal, RingSlot, SlotOwner, State
from nvrx_slurm.util import pages

COMMAND = "python -m nvrx_slurm.transport.docs docs/transport.md"

_OWNER = SlotOwner(1, 1, 1)
_STEPS: dict[str, Callable[[RingSlot], RingSlot | Refusal]] = {
    "begin": lambda slot: slots.begin(slot, slot.generation + 1, _OWNER, overwrite=True),
    "publish": lambda slot: slots.publish(slot, 1, _OWNER, size=0, checksum=None, schema_bytes=0),
    "abandon": lambda slot: slots.abandon(slot, 1, _OWNER),
    "claim": lambda slot: slots.claim(slot, 1, _OWNER, 0),
    "consume": lambda slot: slots.consume(slot, 1, _OWNER),
    "release": lambda slot: slots.release(slot, 1, _OWNER),
    "take": lambda slot: slots.take(slot, 1, slot.size, consumed=True),
    "settle": lambda slot: slots.settle(slot, 1),
    "reclaim": lambda slot: slots.reclaim(slot) if slots.lapsed(slot, 0, owner_is_dead=True) else Refusal.BUSY,
}


def diagram() -> str:
    """What each step makes of a slot in each state: found by taking all of them."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.FREE.name}"]
    for state in State:
        owner = _OWNER if state in (State.WRITING, State.READING) else NO_OWNER
        for name, step in _STEPS.items():
            after = step(RingSlot(state, 1, owner))
            if isinstance(after, RingSlot):
                lines.append(f"    {state.name} --> {after.state.name} : {name}")
    return "\n".join(lines)


def with_diagram(page: str) -> str:
    """The page, with the slot as it is now. Raises ValueError for a page without a place for it."""
    return pages.with_diagram(page, COMMAND, diagram())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_diagram(page.read_text()))
