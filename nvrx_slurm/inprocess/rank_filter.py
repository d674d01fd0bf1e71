"""Which ranks are active, apart from their assignment: the older way, kept for code that uses it.

New code composes the filters of `rank_assignment` with its assignment.
"""

from __future__ import annotations

import abc

from nvrx_slurm.inprocess.rank_assignment import divisible, limited, with_active
from nvrx_slurm.inprocess.state import State


class RankFilter(abc.ABC):
    """Called on every rank after the rank assignment, with the same world everywhere, and must decide the same
    everywhere: the state with `mode`, `active_rank` and `active_world_size`. `Compose` makes one of several."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """The state with its active part."""


class MaxActiveWorldSize(RankFilter):
    """As `rank_assignment.MaxActiveWorldSize`."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self._size = limited(max_active_world_size)

    def __call__(self, state: State) -> State:
        return with_active(state, self._size)


class WorldSizeDivisibleBy(RankFilter):
    """As `rank_assignment.ActiveWorldSizeDivisibleBy`."""

    def __init__(self, divisor: int = 1) -> None:
        self._size = divisible(divisor)

    def __call__(self, state: State) -> State:
        return with_active(state, self._size)


ActiveWorldSizeDivisibleBy = WorldSizeDivisibleBy
