"""A slot in memory: it is stored as a whole, or not at all."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nvrx_slurm.transport import slots as rules
from nvrx_slurm.transport.ring_file import BANK_BYTES, Layout, Memory
from nvrx_slurm.transport.slots import Counts, RingSlot, SlotOwner, State

LAYOUT = Layout(2, 100)

words = st.integers(0, 2**64 - 1)
near = st.sampled_from([0, 0, -1, 1])
slots = st.builds(
    RingSlot,
    state=st.sampled_from(State),
    generation=st.integers(0, 2**61 - 1),
    owner=st.builds(SlotOwner, words, words, words),
    lease_ns=words,
    size=words,
    checksum=st.none() | words,
    schema_bytes=st.integers(0, 2**32 - 1),
    counts=st.builds(Counts, *[words] * 6),
)


@pytest.fixture(scope="module")
def memory() -> Memory:
    """The memory of a ring that no other process shares."""
    memory = Memory(mmap.mmap(-1, LAYOUT.total_bytes), LAYOUT, "nvrx-ring-of-a-test")
    memory.initialize()
    return memory


@given(first=slots, second=slots)
def test_what_is_stored_is_loaded(memory: Memory, first: RingSlot, second: RingSlot) -> None:
    """Loading gives the stored slot, also after it was stored again; the neighbouring slot is not changed."""
    for slot in (first, second, first):
        memory.store(0, slot)
        memory.store(1, replace(slot, state=State.FREE))
        assert memory.load(0) == memory.look(0) == slot
        assert memory.glance()[0].state is memory.state(0) is slot.state
        assert memory.load(1) == replace(slot, state=State.FREE)


@given(before=slots, written=st.binary(max_size=BANK_BYTES))
def test_half_a_store_is_none(memory: Memory, before: RingSlot, written: bytes) -> None:
    """However much of the other bank was written, the slot is as before until the word is set; the next store is
    complete."""
    memory.store(0, before)
    banks = LAYOUT.banks_at(0)
    both = memory.view[banks : banks + 2 * BANK_BYTES]
    used = memory._words[0] >> 2 & 1
    start = (1 - used) * BANK_BYTES
    both[start : start + len(written)] = written
    assert memory.load(0) == before
    after = replace(before, size=7)
    memory.store(0, after)
    assert memory.load(0) == after


@pytest.mark.parametrize("state", State)
@given(
    before=slots, age=st.sampled_from([0, 0, -1, 1]), larger=st.sampled_from([0, 0, -1, 1]), consumed=st.booleans()
)
def test_to_take_is_what_the_rules_say(
    memory: Memory, state: State, before: RingSlot, age: int, larger: int, consumed: bool
) -> None:
    """The result on the bytes is that of the rules on the slot, for any slot."""
    slot = replace(before, state=state, counts=replace(before.counts, consumed=3, released=3))
    memory.store(0, slot)
    generation, size = slot.generation + age, slot.size + larger
    expected = rules.take(slot, generation, size, consumed=consumed)
    assert memory.take(0, generation, size, consumed, 0.0) == isinstance(expected, RingSlot)
    assert memory.load(0) == (expected if isinstance(expected, RingSlot) else slot)


def test_slots_do_not_touch() -> None:
    """Words, mutexes, banks, schemas and payloads of all slots do not overlap, and each begins at its alignment."""
    layout = Layout(3, 5000)
    assert layout.areas_at >= layout.banks_at(2) + 2 * BANK_BYTES
    assert layout.banks_at(0) + 2 * BANK_BYTES == layout.mutex_at(1)
    for index in range(3):
        assert layout.mutex_at(index) % 64 == layout.payload_at(index) % 4096 == 0
        end = layout.payload_at(index) + 5000
        assert end <= (layout.schema_at(index + 1) if index < 2 else layout.total_bytes)
