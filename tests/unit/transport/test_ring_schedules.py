"""One writer and two readers on a real ring, attached separately: every order of their primitive steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from nvrx_slurm.transport.errors import RingFull
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import Claim, SharedRing, Writing
from nvrx_slurm.transport.slots import State

HALF = 64
SIZE = 2 * HALF
STEPS = 4


def content(generation: int) -> bytes:
    """Different bytes for each of the generations that can meet."""
    return bytes([generation % 251]) * SIZE


class Writer:
    """Writes one payload in four steps; none if both slots are being read when it begins."""

    def __init__(self, ring: SharedRing) -> None:
        self.ring = ring
        self.writing: Writing | None = None

    def step(self, number: int) -> None:
        if number == 0:
            with contextlib.suppress(RingFull):
                self.writing = self.ring.begin(SIZE)
        elif self.writing is not None and number == STEPS - 1:
            self.writing.publish()
        elif self.writing is not None:
            self.writing.copy_in((number - 1) * HALF, content(self.writing.generation)[:HALF])


class Reader:
    """Reads one payload in four steps, and keeps what it may return."""

    def __init__(self, ring: SharedRing, ref: PayloadRef) -> None:
        self.ring, self.ref = ring, ref
        self.claim: Claim | None = None
        self.buffer = memoryview(bytearray(SIZE))
        self.read: bytes | None = None

    def step(self, number: int) -> None:
        if number == 0:
            claim = self.ring.claim_ref(self.ref)
            self.claim = claim if isinstance(claim, Claim) else None
        elif self.claim is not None and number < STEPS - 1:
            start = (number - 1) * HALF
            self.claim.copy_into(self.buffer[start : start + HALF], start)
        elif self.claim is not None and self.claim.finish(consumed=True):
            self.read = bytes(self.buffer)


class Peeker(Reader):
    """Copies first and takes then. `peek` copies in one go: here a writer may write between its halves."""

    def step(self, number: int) -> None:
        memory = self.ring._steps.memory
        if number == 0:
            self.is_ready = memory.is_ready(self.ref.slot, self.ref.generation)
        elif self.is_ready and number < STEPS - 1:
            half = slice((number - 1) * HALF, number * HALF)
            self.buffer[half] = memory.payload(self.ref.slot, SIZE)[half]
        elif self.is_ready and self.ring.take(self.ref, consume=True):
            self.read = bytes(self.buffer)


Readers = tuple[type[Reader], type[Reader]]
KINDS = ["both claim", "one copies before it takes", "both copy before they take"]


@pytest.fixture(scope="module")
def rings() -> Iterator[list[SharedRing]]:
    """One ring, attached by each of the three."""
    with SharedRing.create(2, SIZE, checksum=False) as ring:
        others = [SharedRing.attach(ring.handle) for _ in range(2)]
        yield [ring, *others]
        for other in others:
            other.close()


def schedules() -> Iterator[list[int]]:
    """Every order of four steps of each of three actors; of orders that differ only in steps that commute, one."""
    places = range(3 * STEPS)
    for of_writer in itertools.combinations(places, STEPS):
        left = [place for place in places if place not in of_writer]
        for of_first in itertools.combinations(left, STEPS):
            schedule = [0 if place in of_writer else 1 if place in of_first else 2 for place in places]
            if is_least(schedule):
                yield schedule


def is_least(schedule: list[int]) -> bool:
    """Whether two neighbouring steps that commute are always in the order of their actors. Each class of equivalent
    orders has one of this form (the lexicographic normal form of a Mazurkiewicz trace): 5,194 of 34,650."""
    taken = [0] * 3
    before: tuple[int, int] | None = None
    for which in schedule:
        step = (which, taken[which])
        if before is not None and before[0] > which and commute(step, before):
            return False
        taken[which] += 1
        before = step
    return True


def commute(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether the steps commute: those in the middle copy bytes of the payload, the first and the last change only
    the ring's control words. `one` belongs to the actor with the smaller number: the writer, if it is one of the
    two."""
    one_copies, other_copies = (0 < number < STEPS - 1 for _, number in (one, other))
    if one[0] == 0:
        return one_copies and not other_copies
    return one_copies or other_copies


@pytest.mark.parametrize("kinds", [(Reader, Reader), (Peeker, Reader), (Peeker, Peeker)], ids=KINDS)
@pytest.mark.parametrize("asked", [(0, 1), (0, 0)], ids=["each its own", "both the same"])
def test_every_schedule(rings: list[SharedRing], asked: tuple[int, int], kinds: Readers) -> None:
    """Each reader returns its ref's bytes or nothing; at the end no slot is owned, and each payload was counted
    once."""
    consumed = rings[0].metrics().consumed
    for schedule in schedules():
        if asked == (0, 0) and kinds[0] is kinds[1] and schedule.index(1) > schedule.index(2):
            continue  # the readers are of one kind: this schedule was run with their roles swapped
        refs = [write(rings[0]), write(rings[0])]
        actors = run(rings, [refs[which] for which in asked], kinds, schedule)
        consumed = check(rings[0], actors, consumed, schedule)


def write(ring: SharedRing) -> PayloadRef:
    writing = ring.begin(SIZE)
    writing.copy_in(0, content(writing.generation))
    return writing.publish()


def run(
    rings: list[SharedRing], refs: list[PayloadRef], kinds: Readers, schedule: list[int]
) -> list[Writer | Reader]:
    """The actors, after each has taken its steps."""
    actors = [Writer(rings[0]), kinds[0](rings[1], refs[0]), kinds[1](rings[2], refs[1])]
    taken = [0] * len(actors)
    for which in schedule:
        actors[which].step(taken[which])
        taken[which] += 1
    return actors


def check(ring: SharedRing, actors: list[Writer | Reader], consumed: int, schedule: list[int]) -> int:
    """Checks what must be true after a schedule, then empties the ring. Returns how many payloads were consumed so
    far."""
    reads = 0
    for reader in actors:
        if isinstance(reader, Reader) and reader.read is not None:
            assert reader.read == content(reader.ref.generation), schedule
            reads += 1
    metrics = ring.metrics()
    ready = metrics.states[State.READY]
    assert ready + metrics.states[State.FREE] == 2, schedule
    assert metrics.consumed == consumed + reads, schedule
    assert metrics.published == metrics.consumed + metrics.dropped + ready, schedule
    assert metrics.late == metrics.lapsed == metrics.released == 0, schedule
    for _ in range(ready):
        claim = next(claim for slot in range(2) if isinstance(claim := ring.claim(slot), Claim))
        claim.finish(consumed=True)
    return metrics.consumed + ready
