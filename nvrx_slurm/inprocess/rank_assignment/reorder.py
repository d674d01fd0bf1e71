"""How the numbers close up over the ranks that are out."""

from __future__ import annotations

from collections.abc import Collection

from nvrx_slurm.inprocess.rank_assignment.base import RankAssignment, RankAssignmentCtx


class ShiftRanks(RankAssignment):
    """The ranks that are left keep their order and close up.

    Of 0 1 2 3 4 5 6 7 without 1, 4 and 5 this makes 0 2 3 6 7: all after the first gap get new numbers, and
    neighbours stay neighbours.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return ctx.renumbered(ctx.healthy)


class FillGaps(RankAssignment):
    """The last ranks fill the gaps, in their order; all others keep their numbers.

    Of 0 1 2 3 4 5 6 7 without 1, 4 and 5 this makes 0 6 2 3 7: no more ranks get new numbers than must.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        healthy = ctx.healthy
        moved = gaps_filled(healthy, ctx.terminated_ranks)
        return ctx.renumbered(sorted(healthy, key=lambda rank: moved.get(rank, rank)))


def gaps_filled(taken: Collection[int], free: Collection[int]) -> dict[int, int]:
    """Who moves where, so that the lowest of all these numbers are taken, and as few as possible move."""
    lowest = set(sorted({*taken, *free})[: len(taken)])
    return dict(zip(sorted(set(taken) - lowest), sorted(lowest - set(taken)), strict=True))
