"""Which of the ranks are active: always the first ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nvrx_slurm.inprocess.exception import InternalError, OptionError
from nvrx_slurm.inprocess.rank_assignment.base import RankAssignmentCtx, RankFilter
from nvrx_slurm.inprocess.state import Mode, State


class ActivateAllRanks(RankFilter):
    """All ranks call the function, whatever was said before."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        everyone = dataclasses.replace(ctx.state, active_world_size=None)
        return dataclasses.replace(ctx, state=with_active(everyone, lambda size: size))


class MaxActiveWorldSize(RankFilter):
    """No more than `max_active_world_size` ranks are active (None: without a limit).

    Of those that were active so far in the composition; of all if nothing was said. Raises OptionError below 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self._size = limited(max_active_world_size)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return dataclasses.replace(ctx, state=with_active(ctx.state, self._size))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is a multiple of `divisor`: the greatest there is, and 0 if there are too few.

    Of those that were active so far in the composition; of all if nothing was said. Raises OptionError below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._size = divisible(divisor)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return dataclasses.replace(ctx, state=with_active(ctx.state, self._size))


def limited(max_active_world_size: int | None) -> Callable[[int], int]:
    """How many of so many are active. Raises OptionError."""
    if max_active_world_size is None:
        return lambda size: size
    if max_active_world_size < 1:
        raise OptionError(f"MaxActiveWorldSize: {max_active_world_size} active ranks; it must be 1 or more")
    return lambda size: min(size, max_active_world_size)


def divisible(divisor: int) -> Callable[[int], int]:
    """How many of so many are active. Raises OptionError."""
    if divisor < 1:
        raise OptionError(f"ActiveWorldSizeDivisibleBy: the divisor is {divisor}; it must be 1 or more")
    return lambda size: size // divisor * divisor


def with_active(state: State, size_of: Callable[[int], int]) -> State:
    """The state where of those who were active so far, the first `size_of(how many)` are."""
    if state.rank is None:
        raise InternalError("a rank without a number cannot be active: a rank assignment must come first")
    before = state.world_size if state.active_world_size is None else min(state.active_world_size, state.world_size)
    size = size_of(before)
    active = state.rank < size
    return dataclasses.replace(
        state,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
        active_rank=state.rank if active else None,
        active_world_size=size,
    )
