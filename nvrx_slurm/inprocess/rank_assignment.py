"""Rank assignments: the ranks of the next iteration, from those of the last one and those that are out."""

from __future__ import annotations

import abc
import dataclasses
import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nvrx_slurm.inprocess.exception import InternalError, OptionError, RankDiscarded
from nvrx_slurm.inprocess.rank_tree import (
    Key,
    Layer,
    LayerFlag,
    Leaf,
    World,
    activated,
    filtered,
    gaps_filled,
    planted,
    put_out,
    rearranged,
)
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.util.log import get_logger

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]

log = get_logger("inprocess")


@dataclass
class RankAssignmentCtx:
    """One rank's view of the world that is to be rearranged.

    `state`: its place. `terminated_ranks`: the ranks that are out, in `state`'s world. `published()`: what each rank
    has published for this assignment, by its rank in the iteration before. `origins`: once ranks were renumbered, the
    rank in the iteration before of each rank now; None while they are the same.
    """

    state: State
    published: Callable[[], Mapping[int, tuple[str, ...]]]
    terminated_ranks: set[int]
    origins: Sequence[int] | None = None

    @property
    def healthy(self) -> list[int]:
        """The ranks that are not out, ascending."""
        return [rank for rank in range(self.state.world_size) if rank not in self.terminated_ranks]

    def published_here(self) -> dict[int, tuple[str, ...]]:
        """What each healthy rank has published, by its rank now. Raises InternalError if one has not."""
        published = self.published()
        try:
            return {rank: published[self._origin(rank)] for rank in self.healthy}
        except KeyError as error:
            raise InternalError(f"rank {error} is not out, and has published nothing") from None

    def renumbered(self, order: Sequence[int]) -> RankAssignmentCtx:
        """The world of these ranks alone, in this order: rank `order[n]` becomes rank n. No rank is active in it yet.

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


def published_by(assignment: RankAssignment, state: FrozenState) -> tuple[str, ...]:
    """What it publishes. Raises InternalError if that is not a tuple of strings: other ranks could not read it."""
    published = assignment.publish(state)
    if not isinstance(published, tuple | list) or not all(isinstance(each, str) for each in published):
        name = type(assignment).__qualname__
        raise InternalError(f"{name}.publish must return a tuple of strings, not {published!r}")
    return tuple(published)


class RankAssignment(abc.ABC):
    """Gives the ranks that are left their new numbers, and decides which of them are active: those call the function,
    the others are in reserve.

    Called on every rank that is left, before each iteration, with the same world everywhere. It must decide the same
    everywhere: ranks 0 to n-1 of n, each once; the same for those that are active. So it may use only the context,
    and what it kept from its own earlier calls. It raises RankDiscarded on a rank that it leaves out, and only there.
    `Compose` makes one of several.
    """

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        """What the other ranks must know of this one, for example its host. Called before all have arrived; `state`
        is still that of the iteration before. Its cost: a rank that needs it reads that of all ranks."""
        return ()

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with its new state."""


class ActivationFilter(RankAssignment):
    """A rank assignment that leaves the numbers as they are, and decides which ranks are active.

    In a composition it comes after those that renumber: further left.
    """


RankFilter = ActivationFilter  # its name for users; `rank_filter` has another one of that name


class ShiftRanks(RankAssignment):
    """The ranks that are left keep their order and close up.

    Of 0 1 2 3 4 5 6 7 without 1, 4 and 5 this makes 0 2 3 6 7: all ranks after the first gap get new numbers, and
    neighbours stay neighbours.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return ctx.renumbered(ctx.healthy)


class FillGaps(RankAssignment):
    """The last ranks fill the gaps, in their order; all others keep their numbers.

    Of 0 1 2 3 4 5 6 7 without 1, 4 and 5 this makes 0 6 2 3 7: as few ranks as possible get new numbers.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        healthy = ctx.healthy
        moved = gaps_filled(healthy, ctx.terminated_ranks)
        return ctx.renumbered(sorted(healthy, key=lambda rank: moved.get(rank, rank)))


class ActivateAllRanks(ActivationFilter):
    """All ranks call the function, also those that an earlier part of the composition left in reserve."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        everyone = dataclasses.replace(ctx.state, active_world_size=None)
        return dataclasses.replace(ctx, state=with_active(everyone, lambda size: size))


class MaxActiveWorldSize(ActivationFilter):
    """No more than `max_active_world_size` ranks are active (None: without a limit).

    Of those that earlier parts of the composition made active, else of all. Raises OptionError below 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self._size = limited(max_active_world_size)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return dataclasses.replace(ctx, state=with_active(ctx.state, self._size))


class ActiveWorldSizeDivisibleBy(ActivationFilter):
    """The number of active ranks is the greatest multiple of `divisor`, and 0 if there are too few.

    Of those that earlier parts of the composition made active, else of all. Raises OptionError below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        self._size = divisible(divisor)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return dataclasses.replace(ctx, state=with_active(ctx.state, self._size))


def limited(max_active_world_size: int | None) -> Callable[[int], int]:
    """A function from a number of ranks to how many of them are active. Raises OptionError."""
    if max_active_world_size is None:
        return lambda size: size
    if max_active_world_size < 1:
        raise OptionError(
            f"MaxActiveWorldSize: {max_active_world_size} active ranks; it must be 1 or more", "max_active_world_size"
        )
    return lambda size: min(size, max_active_world_size)


def divisible(divisor: int) -> Callable[[int], int]:
    """A function from a number of ranks to how many of them are active. Raises OptionError."""
    if divisor < 1:
        raise OptionError(f"ActiveWorldSizeDivisibleBy: the divisor is {divisor}; it must be 1 or more", "divisor")
    return lambda size: size // divisor * divisor


def with_active(state: State, size_of: Callable[[int], int]) -> State:
    """The state where the first `size_of(n)` of the n ranks that were active so far are active."""
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


class FilterCountGroupedByKey(RankAssignment):
    """Counts the healthy ranks of each group, and puts out those of a group where `condition` of the count is false.

    A group is those ranks with the same key; its ranks are added to the terminated ones, which an assignment further
    left in the composition must take from there:

    ```python
    # a host goes on with all of its 8 ranks, or not at all
    Compose(ShiftRanks(), FilterCountGroupedByKey(lambda _: socket.gethostname(), lambda count: count == 8))
    ```

    Each rank evaluates its own `key_or_fn`, with the state of the iteration before, and publishes the key. All ranks
    evaluate `condition`, which must return the same on each. `timeout` is accepted for older code and has no effect:
    the keys have arrived when the assignment is made.
    """

    def __init__(
        self,
        key_or_fn: Key,
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
    ) -> None:
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        return (_key_of(self.key_or_fn, state),)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        keys = ctx.published_here()
        unfit = {key for key, count in Counter(keys.values()).items() if not self.condition(count)}
        out = {rank for rank, key in keys.items() if key in unfit}
        return dataclasses.replace(ctx, terminated_ranks=ctx.terminated_ranks | out)


class Tree(RankAssignment):
    """Assigns and activates ranks by a tree of branches, a layer a level, the root's layer first.

    At the start of a call all ranks are ordered depth-first, and each is active unless a branch that it is in has its
    `max_ranks`. When ranks are out:

    1. A branch with fewer healthy ranks than its `min_ranks` is put out as a whole, the lowest branches first.
    2. Each active rank that is out is replaced by one in reserve, from the nearest branch that has one, upward as
       long as the layers have `LayerFlag.RESERVE`. No branch gets more active ranks than its `max_ranks`.
    3. What is still open is given to the active ranks with the highest numbers, within the largest branch up to which
       all layers have `LayerFlag.BACKFILL`.
    4. What is open after that is closed by all later active ranks moving up.
    5. With `world_size_filter` the first `world_size_filter(n)` of n active ranks stay active; the rest is in
    reserve.

    ```python
    # hosts of 8 ranks, active as a whole or not at all; up to 32 of them, and not without 16; the others in reserve
    Tree([
        Layer(min_ranks=128, max_ranks=256, key_or_fn="root", flag=LayerFlag.RESERVE),
        Layer(min_ranks=8, max_ranks=8, key_or_fn=lambda _: socket.gethostname(), flag=LayerFlag.RESERVE),
    ])
    ```

    Each rank reads the keys of all ranks once a call; later assignments read nothing. Tree decides which ranks are
    active: so what puts ranks out must come before it in a composition, and nothing may come after it.

    Raises OptionError without layers, for a root that is not the same on all ranks, and for a `world_size_filter`
    that returns more than n.
    """

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        if not layers:
            raise OptionError("Tree needs at least one layer: the root", "layers")
        self.layers = tuple(layers)
        self.world_size_filter = world_size_filter
        self._world: World = ()

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        if state.mode is not Mode.INITIALIZED:
            return ()
        return tuple(_key_of(layer.key_or_fn, state) for layer in self.layers)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.mode is Mode.INITIALIZED:
            # By rank, in depth-first order.
            found = planted(self.layers, ctx.published_here())
            moved = [rank for rank, before in zip(found, ctx.healthy, strict=True) if rank != before]
            if moved and ctx.state.rank == min(moved):
                log.warning(
                    "ranks are not in the tree's order (%d of %d move): each branch gets consecutive numbers",
                    len(moved),
                    len(found),
                )
            ranks, leaves = list(found), tuple(found.values())
            out = put_out(leaves, ())
            world = activated([leaf for place, leaf in enumerate(leaves) if place not in out])
        else:
            if len(self._world) != ctx.state.world_size:
                raise InternalError(
                    f"Tree knows {len(self._world)} ranks, and the world has {ctx.state.world_size}: something after"
                    " it has renumbered them; Tree must be the last part (the leftmost) of a composition"
                )
            ranks, leaves = list(range(ctx.state.world_size)), self._world
            out = put_out(leaves, ctx.terminated_ranks)
            world = rearranged(leaves, out)
        self._world = world if self.world_size_filter is None else filtered(world, self.world_size_filter)
        ctx = ctx.renumbered([rank for place, rank in enumerate(ranks) if place not in out])
        leaf: Leaf = self._world[ctx.state.rank or 0]
        state = dataclasses.replace(
            ctx.state,
            mode=Mode.INACTIVE if leaf.active_rank is None else Mode.ACTIVE,
            active_rank=leaf.active_rank,
            active_world_size=sum(each.active_rank is not None for each in self._world),
        )
        return dataclasses.replace(ctx, state=state)


def _key_of(key_or_fn: Key, state: FrozenState) -> str:
    """The name of this rank's group, as text: other ranks compare it."""
    return str(key_or_fn(state) if callable(key_or_fn) else key_or_fn)
