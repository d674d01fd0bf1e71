"""What a rank assignment gets, and what it must give."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.state import FrozenState, Mode, State

Key = str | Callable[[FrozenState], str]
"""The name of a rank's group, or what says it."""


def key_of(key_or_fn: Key, state: FrozenState) -> str:
    """The name of this rank's group."""
    return key_or_fn(state) if callable(key_or_fn) else key_or_fn


@dataclass
class RankAssignmentCtx:
    """One rank's view of the world that is to be rearranged.

    `state`: its place. `terminated_ranks`: who is out, by their rank in `state`'s world. `published()`: what each
    rank has published for this assignment, by its rank in the iteration before. `origins`: once ranks were
    renumbered, the rank in the iteration before of each rank now; None while they are the same.
    """

    state: State
    published: Callable[[], Mapping[int, tuple[str, ...]]]
    terminated_ranks: set[int]
    origins: Sequence[int] | None = None

    @property
    def healthy(self) -> list[int]:
        """The ranks that are not out, ascending."""
        return [rank for rank in range(self.state.world_size) if rank not in self.terminated_ranks]

    def told(self) -> dict[int, tuple[str, ...]]:
        """What each healthy rank has published, by its rank now. Raises InternalError if one has not."""
        published = self.published()
        try:
            return {rank: published[self._origin(rank)] for rank in self.healthy}
        except KeyError as error:
            raise InternalError(f"rank {error} is not out, and has published nothing") from None

    def renumbered(self, order: Sequence[int]) -> RankAssignmentCtx:
        """The world of these ranks alone, in this order: rank `order[n]` becomes rank n. Nobody is active in it yet.

        Raises RankDiscarded on a rank that is not among them.
        """
        rank = self.state.rank
        if rank not in order:
            raise RankDiscarded(f"rank {rank} of {self.state.world_size} is not among the {len(order)} that go on")
        place = order.index(rank)
        state = dataclasses.replace(
            self.state,
            rank=place,
            world_size=len(order),
            mode=Mode.INITIALIZED,
            active_rank=None,
            active_world_size=None,
        )
        return dataclasses.replace(self, state=state, terminated_ranks=set(), origins=[*map(self._origin, order)])

    def _origin(self, rank: int) -> int:
        return rank if self.origins is None else self.origins[rank]


class RankAssignment(abc.ABC):
    """Gives the ranks that are left their new numbers, and says which of them are active: those call the function,
    the others are in reserve.

    Called on every rank that is left, before each iteration, with the same world everywhere. It must come to the same
    everywhere: ranks 0 to n-1 of n, each once; the same for those that are active. It may look at nothing but the
    context, and what it kept from its own earlier calls. It raises RankDiscarded on a rank that it leaves out, and
    only there. `Compose` makes one of several.
    """

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        """What the others must know of this rank (its host, say). Asked before all have arrived; `state` is still
        that of the iteration before. What it costs: each rank that asks for it reads everybody's."""
        return ()

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with its new state."""


class RankFilter(RankAssignment):
    """A rank assignment that leaves the numbers as they are, and says who is active.

    In a composition it comes after those that renumber, which is to say further left.
    """
