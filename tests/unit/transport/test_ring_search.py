"""Two slots, two readers and a writer, by the rules of `slots.py`: every order of their steps, with every fault."""

from __future__ import annotations

import pytest

from nvrx_slurm.transport import slots
from nvrx_slurm.transport.slots import RingSlot, State
from tests.unit.transport.slot_search import Actor, World, current, held, searched


def world(*, writes: int, reads: int, overwrite: bool = True, peeking: int = 0) -> World:
    """No actor has begun; `peeking` of the two readers copy first and take then."""
    readers = (Actor(writes=False, todo=reads, peeks=number < peeking) for number in range(2))
    return World((RingSlot(), RingSlot()), ((0, 0), (0, 0)), (Actor(writes=True, todo=writes), *readers), overwrite)


@pytest.mark.parametrize(
    ("start", "deaths", "least"),
    [
        (world(writes=2, reads=1), 2, 10_000),
        (world(writes=2, reads=1, overwrite=False), 1, 5_000),
        (world(writes=3, reads=1), 1, 100_000),
        (world(writes=3, reads=1, peeking=1), 1, 50_000),
        (world(writes=2, reads=1, peeking=2), 2, 5_000),
    ],
    ids=[
        "two payloads",
        "without overwriting",
        "each slot is written twice",
        "one reader copies before it takes",
        "both copy before they take",
    ],
)
def test_every_order_of_steps_and_faults(start: World, deaths: int, least: int) -> None:
    """No reader returns wrong bytes, each owned slot has an actor that will end its step, and each payload is counted
    exactly once."""
    states = 0
    for here in searched(start, deaths):
        states += 1
        assert not here.wrong, here
        assert_owned_slots_can_be_freed(here)
        assert_all_are_counted(here)
    assert states > least  # the search has covered the states that it should


def assert_owned_slots_can_be_freed(here: World) -> None:
    """The owner of a slot is writing or reading it; if it has died, or a reader's lease is over, the slot can be
    reclaimed."""
    for index, slot in enumerate(here.slots):
        if slot.state not in (State.WRITING, State.READING):
            continue
        holder = here.actors[slot.owner.pid]
        is_at_it = (holder.slot, holder.generation, holder.attempt) == (index, slot.generation, slot.owner.attempt)
        assert holder.step and is_at_it, here
        if holder.dead or (holder.lapsed and slot.state is State.READING):
            assert current(here, index).state in (State.FREE, State.READY), here


def assert_all_are_counted(here: World) -> None:
    counts = [slot.counts for slot in here.slots]
    published = sum(count.published for count in counts)
    assert published == len(here.refs), here
    assert published == sum(count.consumed + count.dropped for count in counts) + held(here), here


def lapses_by_time(slot: RingSlot, now_ns: int, *, owner_is_dead: bool) -> bool:
    """A wrong rule: it also reclaims the slot of a writer that stopped for too long, as if such a writer could be
    stopped."""
    if slot.state is State.WRITING and owner_is_dead is False and now_ns > 0:
        return True
    return slots.lapsed(slot, now_ns, owner_is_dead=owner_is_dead)


@pytest.mark.parametrize(
    "flawed",
    [
        world(writes=2, reads=1)._replace(
            actors=(Actor(True, 1), Actor(True, 1), Actor(False, 1)), lapsed=lapses_by_time
        ),
        world(writes=3, reads=1)._replace(trusting=True),
        world(writes=3, reads=1, peeking=1)._replace(trusting=True),
    ],
    ids=[
        "a writer's slot is taken while it lives",
        "a read that ended too late counts",
        "a copy that could not be taken counts",
    ],
)
def test_the_search_sees_what_is_wrong(flawed: World) -> None:
    """With a broken rule the search finds a reader that returns another payload's bytes."""
    assert any(here.wrong for here in searched(flawed, 0))
