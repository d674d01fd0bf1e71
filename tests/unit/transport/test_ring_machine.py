"""A real ring compared with the rules of `slots.py`: after any order of steps, both are in the same state."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nvrx_slurm.transport import slots
from nvrx_slurm.transport.errors import StaleSlotError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import Claim, SharedRing, Writing
from nvrx_slurm.transport.slots import NO_OWNER, Refusal, RingSlot, SlotOwner, State

SLOTS, SIZE = 3, 300
LONG_S = 3600.0

which = st.integers(0, 99)


class Held(NamedTuple):
    """A write or read that was begun, and may have ended."""

    at: Writing | Claim
    owner: SlotOwner


def content(generation: int, size: int) -> bytes:
    return bytes((generation + at) % 251 for at in range(size))


class Machine(RuleBasedStateMachine):
    """`model` has the slots as the rules give them; the ring is attached twice, and either attachment takes a
    step."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = SharedRing.create(SLOTS, SIZE, overwrite=False)
        self.rings = [self.ring, SharedRing.attach(self.ring.handle)]
        self.model = [RingSlot() for _ in range(SLOTS)]
        self.writings: list[Held] = []
        self.claims: list[Held] = []
        self.attempts = 0
        self.lapsed: set[int] = set()

    def teardown(self) -> None:
        for ring in self.rings:
            ring.close()
        self.ring.unlink()

    def owner(self) -> SlotOwner:
        self.attempts += 1
        return SlotOwner(1, 1, self.attempts)

    def now(self, index: int) -> RingSlot:
        """The slot as a step finds it: a lease of zero seconds ends at once."""
        slot = self.model[index]
        return slots.reclaim(slot) if slot.owner.attempt in self.lapsed else slot

    # --- writing

    @precondition(lambda self: any(self.now(index).state is State.FREE for index in range(SLOTS)))
    @rule(through=which, size=st.integers(0, SIZE))
    def begin(self, through: int, size: int) -> None:
        if all(slot.state is not State.FREE for slot in self.model):
            self.reclaim()  # only a writer that finds no free slot reclaims lost ones
        writing = self.rings[through % 2].begin(size, "s" * (size % 7))
        owner = self.owner()
        begun = slots.begin(self.now(writing.slot), self.latest() + 1, owner, overwrite=False)
        assert isinstance(begun, RingSlot)
        self.model[writing.slot] = begun
        self.writings.append(Held(writing, owner))
        writing.copy_in(0, content(writing.generation, size))

    @precondition(lambda self: any(self.now(index).state is State.FREE for index in range(SLOTS)))
    @rule(through=which, size=st.integers(0, SIZE))
    def write(self, through: int, size: int) -> None:
        self.begin(through, size)
        self.publish(*self.writings[-1])

    @precondition(lambda self: self.writings)
    @rule(number=which, publishes=st.booleans())
    def end_writing(self, number: int, publishes: bool) -> None:
        """Ends any of them, also one that has ended before."""
        writing, owner = self.writings[number % len(self.writings)]
        assert isinstance(writing, Writing)
        if publishes:
            self.publish(writing, owner)
        else:
            expected = slots.abandon(self.model[writing.slot], writing.generation, owner)
            assert writing.abandon() == self.ends(writing.slot, expected)

    def publish(self, writing: Writing | Claim, owner: SlotOwner) -> None:
        assert isinstance(writing, Writing)
        try:
            ref = writing.publish()
        except StaleSlotError:
            expected: RingSlot | Refusal = Refusal.LATE
        else:
            expected = slots.publish(
                self.model[writing.slot],
                writing.generation,
                owner,
                size=writing.size,
                checksum=int(ref.checksum, 16),
                schema_bytes=writing.size % 7,
            )
            assert isinstance(expected, RingSlot)
        self.ends(writing.slot, expected)

    # --- reading

    @rule(
        through=which, index=st.integers(0, SLOTS), age=st.integers(-1, 2), any_=st.booleans(), lapses=st.booleans()
    )
    def claim(self, through: int, index: int, age: int, any_: bool, lapses: bool) -> None:
        """Claims the current payload, an older or newer one, or any; perhaps with a lease of zero seconds."""
        generation = None if any_ else (self.model[index].generation if index < SLOTS else 1) - age
        claim = self.rings[through % 2].claim(index, generation, lease_s=0.0 if lapses else LONG_S)
        if index == SLOTS:
            assert claim is Refusal.STALE
            return
        owner = self.owner()
        expected = slots.claim(self.now(index), generation, owner, 1)
        self.model[index] = expected if isinstance(expected, RingSlot) else self.now(index)
        if isinstance(expected, RingSlot):
            assert isinstance(claim, Claim)
            assert bytes(claim.copied()) == content(claim.generation, claim.size)
            assert claim.schema == "s" * (claim.size % 7)
            self.claims.append(Held(claim, owner))
            if lapses:
                self.lapsed.add(owner.attempt)
        else:
            assert claim is expected

    @precondition(lambda self: self.claims)
    @rule(number=which, consumed=st.booleans())
    def finish(self, number: int, consumed: bool) -> None:
        """Ends any of them, also one that has ended before or whose lease has lapsed."""
        claim, owner = self.claims[number % len(self.claims)]
        assert isinstance(claim, Claim)
        end = slots.consume if consumed else slots.release
        expected = end(self.model[claim.slot], claim.generation, owner)
        assert claim.finish(consumed=consumed) == self.ends(claim.slot, expected)

    @precondition(lambda self: self.claims)
    @rule(number=which)
    def renew(self, number: int) -> None:
        claim, owner = self.claims[number % len(self.claims)]
        assert isinstance(claim, Claim)
        expected = slots.renew(self.model[claim.slot], claim.generation, owner, 1)
        assert claim.renew(LONG_S) == self.ends(claim.slot, expected)
        if isinstance(expected, RingSlot):
            self.lapsed.discard(owner.attempt)

    @rule(through=which, index=st.integers(0, SLOTS - 1), age=st.integers(0, 1), consumed=st.booleans())
    def take(self, through: int, index: int, age: int, consumed: bool) -> None:
        """Takes the current payload, or an older one, copied before. It reclaims no slot whose owner has lost it."""
        slot, ring = self.model[index], self.rings[through % 2]
        if slot.generation - age < 0:
            return
        ref = PayloadRef(node="", ring=ring.name, slot=index, generation=slot.generation - age, size=slot.size)
        buffer = memoryview(bytearray(slot.size))
        expected = slots.take(slot, ref.generation, ref.size, consumed=consumed)
        peeked = ring.peek(ref, buffer)
        assert not peeked or isinstance(expected, RingSlot)
        assert not peeked or buffer == content(ref.generation, ref.size)
        assert ring.take(ref, consume=consumed) == isinstance(expected, RingSlot)
        self.model[index] = expected if isinstance(expected, RingSlot) else slot

    @rule(index=st.integers(0, SLOTS - 1), age=st.integers(0, 1))
    def settle(self, index: int, age: int) -> None:
        generation = self.model[index].generation - age
        expected = slots.settle(self.now(index), generation)
        assert self.ring.settle(index, generation) == isinstance(expected, RingSlot)
        self.model[index] = expected if isinstance(expected, RingSlot) else self.now(index)

    # --- all

    def ends(self, index: int, outcome: RingSlot | Refusal) -> bool:
        """Updates the model after the end of a read or write; returns whether that was in time."""
        late = isinstance(outcome, Refusal)
        self.model[index] = slots.count_late(self.model[index]) if isinstance(outcome, Refusal) else outcome
        return not late

    def reclaim(self) -> None:
        self.model = [self.now(index) for index in range(SLOTS)]

    def latest(self) -> int:
        return max(slot.generation for slot in self.model)

    @invariant()
    def the_ring_is_as_the_rules_say(self) -> None:
        real = [replace(slot, owner=NO_OWNER, lease_ns=0) for slot in self.ring.slot_states()]
        assert real == [replace(slot, owner=NO_OWNER, lease_ns=0) for slot in self.model]

    @rule()
    def ready(self) -> None:
        """The oldest payload is first."""
        indices = self.rings[1].get_ready_indices()
        self.reclaim()
        ready = [index for index in range(SLOTS) if self.model[index].state is State.READY]
        assert indices == sorted(ready, key=lambda index: self.model[index].generation)


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestMachine = Machine.TestCase
