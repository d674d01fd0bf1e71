"""`python -m tests.transport.ring_actor RING ROLE SEED`: writes, or reads, until a line arrives on stdin.

The bytes of a payload show its generation, so that a reader notices bytes of another one. Each action is reported as
one line, written in a single write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import sys

from nvrx_slurm.transport.errors import PayloadTimeout, RingFull, StaleSlotError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import Claim, SharedRing

PIECES = 8


def pattern(generation: int, size: int) -> bytes:
    return (generation.to_bytes(8, "little") * (size // 8 + 1))[:size]


def is_told() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def write(ring: SharedRing, dice: random.Random) -> None:
    size = dice.randrange(8, ring.slot_bytes)
    try:
        writing = ring.begin(size, timeout_s=0.05)
    except RingFull:
        return
    if dice.random() < 0.1:
        writing.abandon()
        return
    data, step = pattern(writing.generation, size), size // PIECES + 1
    for start in range(0, size, step):
        writing.copy_in(start, data[start : start + step])
    writing.publish()
    tell("published")


def read(ring: SharedRing, dice: random.Random) -> None:
    for index in ring.get_ready_indices():
        claim = ring.claim(index)
        if isinstance(claim, Claim):
            end(claim, consumed=dice.random() < 0.8)
            return
    wait(ring)


def peek(ring: SharedRing, dice: random.Random) -> None:
    for index in ring.get_ready_indices():
        slot, consumed = ring.slot_states()[index], dice.random() < 0.8
        ref = PayloadRef(node="", ring=ring.name, slot=index, generation=slot.generation, size=slot.size)
        data = bytearray(slot.size)
        if ring.peek(ref, memoryview(data)) and ring.take(ref, consume=consumed):
            judge(data, index, slot.generation, consumed=consumed)
        return
    wait(ring)


def wait(ring: SharedRing) -> None:
    """Wait for a payload, and look at it without taking it."""
    with contextlib.suppress(PayloadTimeout, StaleSlotError), ring.view(timeout_s=0.05, keep=True) as payload:
        assert isinstance(payload, memoryview)


def end(claim: Claim, *, consumed: bool) -> None:
    data, step = bytearray(claim.size), claim.size // PIECES + 1
    for start in range(0, claim.size, step):
        claim.copy_into(memoryview(data)[start : start + step], start)
    if claim.finish(consumed):
        judge(data, claim.slot, claim.generation, consumed=consumed)


def judge(data: bytearray, index: int, generation: int, *, consumed: bool) -> None:
    if data != pattern(generation, len(data)):
        tell(f"wrong bytes in {index}@{generation}")
    elif consumed:
        tell("consumed")


def main(name: str, role: str, seed: int) -> None:
    logging.getLogger("nvrx").setLevel(logging.ERROR)
    ring, dice = SharedRing.attach(name), random.Random(seed)
    tell("begun")
    while not is_told():
        {"writer": write, "reader": read, "peeker": peek}[role](ring, dice)
    ring.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
