from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.exception import InternalError, OptionError, RankDiscarded
from nvrx_slurm.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
)
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from tests.unit.inprocess.worlds import Worlds


def of_pairs(member: int, *, of: int = 2) -> FilterCountGroupedByKey:
    """A filter that keeps whole pairs of members only."""
    return FilterCountGroupedByKey(lambda state: f"pair-{member // of}", lambda count: count == of)


def test_shift_closes_up_in_order():
    """The remaining ranks keep their order; those that are out leave no gap."""
    worlds = Worlds(8, lambda _: Compose(ActivateAllRanks(), ShiftRanks()))
    worlds.next(1, 4, 5)
    worlds.check()
    assert worlds.order == worlds.active == [0, 2, 3, 6, 7]


def test_gaps_are_filled_from_the_end():
    """Ranks below the new world size keep their numbers; the last ones fill the gaps in order."""
    worlds = Worlds(8, lambda _: Compose(ActivateAllRanks(), FillGaps()))
    worlds.next(1, 4, 5)
    worlds.check()
    assert worlds.order == [0, 6, 2, 3, 7]


@given(st.data(), st.integers(1, 12))
def test_no_more_ranks_move_than_there_are_gaps(data: st.DataObject, size: int):
    """Under FillGaps exactly those ranks move whose number is not below the new world size."""
    out = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    worlds = Worlds(size, lambda _: Compose(ActivateAllRanks(), FillGaps()))
    worlds.next(*out)
    worlds.check()
    left = size - len(out)
    assert all(state.rank == member for member, state in worlds.states.items() if member < left)


def test_a_group_stays_as_a_whole_or_goes():
    """A pair that lost a rank is left out as a whole; the ranks of the others move up. The example is that of the
    documents."""
    worlds = Worlds(8, lambda member: Compose(ActivateAllRanks(), ShiftRanks(), of_pairs(member)))
    worlds.next(1, 4, 5)
    worlds.check()
    assert worlds.order == [2, 3, 6, 7]
    assert worlds.discarded == [0]


def test_keys_follow_their_ranks_when_they_are_renumbered():
    """Each of two filters in one composition sees its own keys, also after the ranks were renumbered in between."""
    worlds = Worlds(
        12,
        lambda member: Compose(
            ActivateAllRanks(), ShiftRanks(), of_pairs(member, of=4), FillGaps(), of_pairs(member, of=2)
        ),
    )
    worlds.next(5)
    worlds.check()
    assert worlds.order == [0, 1, 2, 3, 10, 11, 8, 9]
    assert sorted(worlds.discarded) == [4, 6, 7]


def test_a_rank_that_is_out_is_discarded():
    """RankDiscarded names the rank that is left out and the number of ranks that go on."""
    ctx = RankAssignmentCtx(State(rank=1, world_size=3), dict, {1})
    with pytest.raises(RankDiscarded, match=r"rank 1 of 3 is not among the 2 that go on"):
        ShiftRanks()(ctx)


def test_a_key_that_is_missing_is_an_error():
    """A rank that is not left out but has published no key cannot be counted: InternalError names it."""
    ctx = RankAssignmentCtx(State(rank=0, world_size=2), lambda: {0: ("a",)}, set())
    with pytest.raises(InternalError, match="rank 1 is not out, and has published nothing"):
        FilterCountGroupedByKey("a", bool)(ctx)


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([MaxActiveWorldSize(6)], 6),
        ([MaxActiveWorldSize(None)], 10),
        ([MaxActiveWorldSize(99)], 10),
        ([ActiveWorldSizeDivisibleBy(4)], 8),
        ([ActiveWorldSizeDivisibleBy(11)], 0),
        ([ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(7)], 4),
        ([MaxActiveWorldSize(6), ActiveWorldSizeDivisibleBy(4)], 6),
        ([ActivateAllRanks(), MaxActiveWorldSize(3)], 10),
    ],
)
def test_filters_say_how_many_are_active(parts: list[RankAssignment], size: int):
    """The first of 10 ranks are active: as many as the filters leave, applied from right to left."""
    worlds = Worlds(10, lambda _: Compose(*parts, ShiftRanks()))
    worlds.next()
    worlds.check()
    assert worlds.active == list(range(size))


def test_filters_begin_with_the_whole_world_each_time():
    """A rank that was inactive in one iteration can be active in the next: 6 of 10, and still 6 of 9, not 4."""
    worlds = Worlds(10, lambda _: Compose(MaxActiveWorldSize(6), ActiveWorldSizeDivisibleBy(4), ShiftRanks()))
    assert len(worlds.next()) == 10
    worlds.next(9)
    worlds.check()
    assert len(worlds.active) == 6


@pytest.mark.parametrize(
    ("make", "option"),
    [(lambda: MaxActiveWorldSize(0), "max_active_world_size"), (lambda: ActiveWorldSizeDivisibleBy(0), "divisor")],
)
def test_numbers_that_leave_no_rank_are_refused(make: type, option: str):
    """A filter that could activate no rank, or divides by 0, is an OptionError when it is made."""
    with pytest.raises(OptionError, match="1 or more") as caught:
        make()
    assert caught.value.options == (option,)


def test_a_rank_without_a_number_cannot_be_active():
    """The error of a filter that is called before a rank assignment says what is missing."""
    with pytest.raises(InternalError, match="a rank assignment must come first"):
        ActivateAllRanks()(RankAssignmentCtx(State(rank=None, world_size=3), dict, set()))


class Names(RankAssignment):
    """Publishes its texts, and records what it sees."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.seen: list[dict[int, tuple[str, ...]]] = []

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        return (*self.texts, *(f"{state.rank}" for _ in range(state.rank or 0)))

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        self.seen.append(dict(ctx.published()))
        return ctx


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=1, max_size=4))
def test_each_part_sees_its_own_publications(texts: list[list[str]]):
    """In any number of parts, nested too, each part gets exactly what it published itself on each rank."""
    fleets = [[Names(*part) for part in texts] for _ in range(3)]
    worlds = Worlds(3, lambda member: Compose(ShiftRanks(), Compose(*fleets[member]), Names("last")))
    worlds.next()
    for fleet in fleets:
        for part, own in zip(fleet, texts, strict=True):
            assert part.seen == [{rank: (*own, *[str(rank)] * rank) for rank in range(3)}]


ASSIGNMENTS = (
    lambda _: Compose(ActivateAllRanks(), ShiftRanks()),
    lambda _: Compose(ActivateAllRanks(), FillGaps()),
    lambda _: Compose(MaxActiveWorldSize(5), FillGaps()),
    lambda _: Compose(ActiveWorldSizeDivisibleBy(3), MaxActiveWorldSize(7), ShiftRanks()),
    lambda member: Compose(ActivateAllRanks(), ShiftRanks(), of_pairs(member)),
    lambda member: Compose(ActiveWorldSizeDivisibleBy(2), FillGaps(), of_pairs(member, of=3), of_pairs(member)),
)


@given(st.data(), st.sampled_from(ASSIGNMENTS), st.integers(1, 12))
def test_all_survivors_come_to_one_world(data: st.DataObject, make: object, size: int):
    """For any losses at any time, the remaining ranks make one world in each iteration, or are discarded."""
    worlds = Worlds(size, make)
    gone: set[int] = set()
    for _ in range(3):
        lost = data.draw(st.sets(st.sampled_from(sorted(worlds.states)))) if worlds.states else set()
        before = set(worlds.states)
        worlds.next(*lost)
        worlds.check()
        gone |= lost
        assert set(worlds.states) | set(worlds.discarded) | gone == set(range(size))
        assert set(worlds.states) == before - lost - set(worlds.discarded)


def test_no_rank_is_active_without_a_filter():
    """With a rank assignment alone a rank is neither active nor in reserve; the wrapper then takes all ranks for
    active."""
    ctx = RankAssignmentCtx(State(rank=1, world_size=3, mode=Mode.ACTIVE, active_rank=1), dict, {0})
    state = ShiftRanks()(ctx).state
    assert (state.rank, state.world_size, state.mode, state.active_rank) == (0, 2, Mode.INITIALIZED, None)
