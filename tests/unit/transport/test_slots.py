"""The result of each step on a slot in each state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from nvrx_slurm.transport import slots
from nvrx_slurm.transport.slots import NO_OWNER, Counts, Refusal, RingSlot, SlotOwner, State

OURS, THEIRS = SlotOwner(10, 1000, 1), SlotOwner(10, 1000, 2)
COUNTS = Counts(9, 8, 7, 6, 5, 4)
FREE, WRITING, READY, READING = (
    RingSlot(State.FREE, 5, counts=COUNTS),
    RingSlot(State.WRITING, 5, OURS, counts=COUNTS),
    RingSlot(State.READY, 5, size=3, checksum=0, schema_bytes=2, counts=COUNTS),
    RingSlot(State.READING, 5, OURS, 100, size=3, checksum=0, schema_bytes=2, counts=COUNTS),
)
SLOTS = (FREE, WRITING, READY, READING)
PUBLISHED = {"size": 4, "checksum": 7, "schema_bytes": 1}

Step = Callable[[RingSlot], RingSlot | Refusal]

STEPS: dict[str, Step] = {
    "begin": lambda slot: slots.begin(slot, 6, OURS, overwrite=False),
    "begin over": lambda slot: slots.begin(slot, 6, OURS, overwrite=True),
    "publish": lambda slot: slots.publish(slot, 5, OURS, **PUBLISHED),
    "abandon": lambda slot: slots.abandon(slot, 5, OURS),
    "claim any": lambda slot: slots.claim(slot, None, OURS, 200),
    "claim": lambda slot: slots.claim(slot, 5, OURS, 200),
    "claim older": lambda slot: slots.claim(slot, 4, OURS, 200),
    "claim newer": lambda slot: slots.claim(slot, 6, OURS, 200),
    "renew": lambda slot: slots.renew(slot, 5, OURS, 300),
    "consume": lambda slot: slots.consume(slot, 5, OURS),
    "release": lambda slot: slots.release(slot, 5, OURS),
    "take": lambda slot: slots.take(slot, 5, slot.size, consumed=True),
    "take and leave": lambda slot: slots.take(slot, 5, slot.size, consumed=False),
    "take older": lambda slot: slots.take(slot, 4, slot.size, consumed=True),
    "take larger": lambda slot: slots.take(slot, 5, slot.size + 1, consumed=True),
    "settle": lambda slot: slots.settle(slot, 5),
    "settle older": lambda slot: slots.settle(slot, 4),
}

BUSY, STALE, CONSUMED, NOT_READY, OCCUPIED, LATE = Refusal

TABLE: dict[str, tuple[State | Refusal, State | Refusal, State | Refusal, State | Refusal]] = {
    #               of FREE           WRITING        READY          READING
    "begin": (State.WRITING, BUSY, OCCUPIED, BUSY),
    "begin over": (State.WRITING, BUSY, State.WRITING, BUSY),
    "publish": (LATE, State.READY, LATE, LATE),
    "abandon": (LATE, State.FREE, LATE, LATE),
    "claim any": (NOT_READY, NOT_READY, State.READING, BUSY),
    "claim": (CONSUMED, NOT_READY, State.READING, BUSY),
    "claim older": (STALE, STALE, STALE, STALE),
    "claim newer": (STALE, STALE, STALE, STALE),
    "renew": (LATE, LATE, LATE, State.READING),
    "consume": (LATE, LATE, LATE, State.FREE),
    "release": (LATE, LATE, LATE, State.READY),
    "take": (LATE, LATE, State.FREE, LATE),
    "take and leave": (LATE, LATE, State.READY, LATE),
    "take older": (LATE, LATE, LATE, LATE),
    "take larger": (LATE, LATE, LATE, LATE),
    "settle": (LATE, LATE, State.FREE, LATE),
    "settle older": (LATE, LATE, LATE, LATE),
}

COUNTED = {
    ("begin over", State.READY): "dropped",
    ("publish", State.WRITING): "published",
    ("consume", State.READING): "consumed",
    ("release", State.READING): "released",
    ("take", State.READY): "consumed",
    ("take and leave", State.READY): "released",
    ("settle", State.READY): "consumed",
}

every_step_from_every_state = pytest.mark.parametrize(
    ("step", "slot"),
    [pytest.param(step, slot, id=f"{step}-{slot.state.name}") for step in STEPS for slot in SLOTS],
)


@every_step_from_every_state
def test_every_step_from_every_state(step: str, slot: RingSlot) -> None:
    """The step leads to the state in the table, increments the count in the table of counts, and changes no other
    count."""
    after = STEPS[step](slot)
    expected = TABLE[step][slot.state]
    assert (after.state if isinstance(after, RingSlot) else after) == expected
    counted = COUNTED.get((step, slot.state))
    if isinstance(after, RingSlot):
        assert after.counts == (replace(COUNTS, **{counted: getattr(COUNTS, counted) + 1}) if counted else COUNTS)
    else:
        assert counted is None


@every_step_from_every_state
def test_an_owner_and_a_lease_are_of_a_slot_that_is_held(step: str, slot: RingSlot) -> None:
    """READING has both, WRITING an owner, the other states neither."""
    after = STEPS[step](slot)
    if isinstance(after, RingSlot):
        assert (after.owner != NO_OWNER) == (after.state in (State.WRITING, State.READING))
        assert (after.lease_ns != 0) == (after.state is State.READING)


@pytest.mark.parametrize("end", ["publish", "abandon", "renew", "consume", "release"])
@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.state.name)
@pytest.mark.parametrize(
    "change", [{"owner": THEIRS}, {"generation": 6}, {"owner": NO_OWNER}, {"owner": SlotOwner(10, 1001, 1)}], ids=str
)
def test_an_end_from_elsewhere_changes_nothing(end: str, slot: RingSlot, change: dict[str, object]) -> None:
    """An end by another owner, of another generation, or by a process that has reused the pid is LATE in every
    state."""
    assert STEPS[end](replace(slot, **change)) is Refusal.LATE


@pytest.mark.parametrize("end", ["consume", "release"])
def test_a_read_ends_once(end: str) -> None:
    """The second end is LATE, whichever it is."""
    ended = STEPS[end](READING)
    assert isinstance(ended, RingSlot)
    assert {STEPS[again](ended) for again in ("consume", "release", "renew")} == {Refusal.LATE}


@pytest.mark.parametrize(("consumed", "end"), [(True, "consume"), (False, "release")])
def test_to_take_is_to_claim_and_to_end_it(consumed: bool, end: str) -> None:
    """`take` does both in one step, with no state in between."""
    claimed = STEPS["claim"](READY)
    assert isinstance(claimed, RingSlot)
    assert slots.take(READY, 5, READY.size, consumed=consumed) == STEPS[end](claimed)


def test_a_new_payload_has_nothing_of_the_old_one() -> None:
    """`begin` keeps the counts, and resets size, checksum and schema."""
    assert slots.begin(READY, 6, THEIRS, overwrite=True) == RingSlot(
        State.WRITING, 6, THEIRS, counts=replace(COUNTS, dropped=COUNTS.dropped + 1)
    )


@pytest.mark.parametrize(
    ("slot", "now_ns", "dead", "expected"),
    [
        (FREE, 10**9, True, False),
        (READY, 10**9, True, False),
        (READING, 99, False, False),
        (READING, 100, False, True),
        (READING, 0, True, True),
        (WRITING, 10**18, False, False),  # the writer may still be writing
        (WRITING, 0, True, True),
    ],
)
def test_who_has_lost_a_slot(slot: RingSlot, now_ns: int, dead: bool, expected: bool) -> None:
    """A reader whose lease is over, or any dead owner, has lost it; a living writer has not."""
    assert slots.lapsed(slot, now_ns, owner_is_dead=dead) is expected


def test_a_read_that_lapsed_leaves_its_payload() -> None:
    """It is READY again, unchanged, and the lapse is counted."""
    assert slots.reclaim(READING) == replace(READY, counts=replace(COUNTS, lapsed=COUNTS.lapsed + 1))


def test_a_write_that_lapsed_leaves_nothing() -> None:
    """It is FREE again, and the lapse is counted."""
    assert slots.reclaim(WRITING) == replace(FREE, counts=replace(COUNTS, lapsed=COUNTS.lapsed + 1))


def test_coming_late_is_counted_and_nothing_else() -> None:
    """This holds in every state."""
    for slot in SLOTS:
        assert slots.count_late(slot) == replace(slot, counts=replace(COUNTS, late=COUNTS.late + 1))


def test_a_reader_that_renews_has_the_slot_for_longer() -> None:
    """Only the lease changes."""
    reading = slots.claim(RingSlot(State.READY, 5), 5, OURS, 100)
    assert isinstance(reading, RingSlot)
    renewed = slots.renew(reading, 5, OURS, 300)
    assert renewed == replace(reading, lease_ns=300)


def test_what_is_published_is_described_as_its_writer_said() -> None:
    """Readers use these fields: the generation, the size to read, and the checksum."""
    counts = replace(COUNTS, published=COUNTS.published + 1)
    assert STEPS["publish"](WRITING) == RingSlot(State.READY, 5, NO_OWNER, 0, 4, 7, 1, counts)
