"""Ranks by where they are: which branch may fail as a whole, and from where a rank is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from nvrx_slurm.inprocess.exception import InternalError, OptionError
from nvrx_slurm.inprocess.rank_assignment.activation import activated, filtered, put_out, rearranged
from nvrx_slurm.inprocess.rank_assignment.base import RankAssignment, RankAssignmentCtx, key_of
from nvrx_slurm.inprocess.rank_assignment.topology import Layer, Leaf, World, planted
from nvrx_slurm.inprocess.state import FrozenState, Mode
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")


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
    5. With `world_size_filter` only so many of n active ranks stay active as it says for n; the rest is in reserve.

    ```python
    # hosts of 8 ranks, active as a whole or not at all; up to 32 of them, and not without 16; the others in reserve
    Tree([
        Layer(min_ranks=128, max_ranks=256, key_or_fn="root", flag=LayerFlag.RESERVE),
        Layer(min_ranks=8, max_ranks=8, key_or_fn=lambda _: socket.gethostname(), flag=LayerFlag.RESERVE),
    ])
    ```

    The keys are read once a call, which costs each rank as much as there are ranks; later assignments ask nobody. It
    decides who is active, so it composes with what puts ranks out before it, and with nothing after it.

    Raises OptionError without layers, for a root that is not the same on all ranks, and for a `world_size_filter`
    that wants more than there is.
    """

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        if not layers:
            raise OptionError("Tree needs at least one layer: the root")
        self.layers = tuple(layers)
        self.world_size_filter = world_size_filter
        self._world: World = ()

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        if state.mode is not Mode.INITIALIZED:
            return ()
        return tuple(key_of(layer.key_or_fn, state) for layer in self.layers)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.mode is Mode.INITIALIZED:
            ranks, leaves = self._planted(ctx)
            out = put_out(leaves, ())
            world = activated([leaf for place, leaf in enumerate(leaves) if place not in out])
        else:
            ranks, leaves = list(range(ctx.state.world_size)), self._grown(ctx)
            out = put_out(leaves, ctx.terminated_ranks)
            world = rearranged(leaves, out)
        self._world = world if self.world_size_filter is None else filtered(world, self.world_size_filter)
        return self._told(ctx.renumbered([rank for place, rank in enumerate(ranks) if place not in out]))

    def _planted(self, ctx: RankAssignmentCtx) -> tuple[list[int], World]:
        """The ranks in depth-first order, and their leaves."""
        leaves = planted(self.layers, ctx.told())
        moved = [rank for rank, before in zip(leaves, ctx.healthy, strict=True) if rank != before]
        if moved and ctx.state.rank == min(moved):
            log.warning(
                "ranks are not in the tree's order (%d of %d move): neighbours of a branch get neighbouring numbers",
                len(moved),
                len(leaves),
            )
        return list(leaves), tuple(leaves.values())

    def _grown(self, ctx: RankAssignmentCtx) -> World:
        if len(self._world) != ctx.state.world_size:
            raise InternalError(
                f"Tree knows {len(self._world)} ranks, and the world has {ctx.state.world_size}: something after it"
                " has renumbered them; Tree must be the last part (the leftmost) of a composition"
            )
        return self._world

    def _told(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        leaf: Leaf = self._world[ctx.state.rank or 0]
        state = dataclasses.replace(
            ctx.state,
            mode=Mode.INACTIVE if leaf.active_rank is None else Mode.ACTIVE,
            active_rank=leaf.active_rank,
            active_world_size=sum(each.active_rank is not None for each in self._world),
        )
        return dataclasses.replace(ctx, state=state)
