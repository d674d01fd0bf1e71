"""Who is out, and who is active, in the world of a topology tree. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.rank_assignment.reorder import gaps_filled
from nvrx_slurm.inprocess.rank_assignment.topology import Branch, LayerFlag, Leaf, World


def put_out(leaves: Sequence[Leaf], out: Iterable[int]) -> set[int]:
    """Who is out once branches with too few healthy ranks are put out too, the lowest branches first."""
    gone = set(out)
    members: defaultdict[Branch, list[int]] = defaultdict(list)
    for rank, leaf in enumerate(leaves):
        for branch in leaf.branch.lineage():
            members[branch].append(rank)
    for branch in sorted(members, key=lambda branch: -branch.depth):
        healthy = [rank for rank in members[branch] if rank not in gone]
        if len(healthy) < branch.layer.min_ranks:
            gone.update(healthy)
    return gone


def activated(leaves: Sequence[Leaf]) -> World:
    """The first world: each rank is active, unless a branch that it is in has its `max_ranks` already."""
    room, numbers = _Room(), itertools.count()
    return tuple(
        dataclasses.replace(leaf, active_rank=next(numbers))
        if room.take(leaf.branch)
        else dataclasses.replace(leaf, reserved=place)
        for place, leaf in enumerate(leaves)
    )


def rearranged(world: World, out: set[int]) -> World:
    """The world without those who are out; who was active among them is replaced as the flags allow.

    From a reserve first: the nearest branch's, and there whoever came into it last. Then by the active ranks with the
    highest numbers. What is still open is closed by all later ones moving up.
    """
    active = {rank: leaf.active_rank for rank, leaf in enumerate(world) if leaf.active_rank is not None}
    vacant = {rank: active.pop(rank) for rank in sorted(out) if rank in active}
    _draw_on_reserves(world, out, active, vacant)
    _backfill(world, active, vacant)
    number = {rank: place for place, rank in enumerate(sorted(active, key=active.__getitem__))}
    return tuple(
        dataclasses.replace(leaf, active_rank=number.get(rank)) for rank, leaf in enumerate(world) if rank not in out
    )


def filtered(world: World, size_of: Callable[[int], int]) -> World:
    """The world where only the first `size_of(how many)` active ranks are active. Raises OptionError for more."""
    size = sum(leaf.active_rank is not None for leaf in world)
    wanted = size_of(size)
    if not 0 <= wanted <= size:
        raise OptionError(f"Tree: world_size_filter({size}) is {wanted}; it must be from 0 to {size}")
    later = itertools.count(max((leaf.reserved for leaf in world), default=0) + 1)
    return tuple(
        dataclasses.replace(leaf, active_rank=None, reserved=next(later))
        if leaf.active_rank is not None and leaf.active_rank >= wanted
        else leaf
        for leaf in world
    )


class _Room:
    """How many are active in each branch so far."""

    def __init__(self) -> None:
        self._active: Counter[Branch] = Counter()

    def take(self, branch: Branch) -> bool:
        """Make one more active in it, if it and all above have room. Returns whether that was so."""
        lineage = list(branch.lineage())
        limits = ((above.layer.max_ranks, self._active[above]) for above in lineage)
        if any(limit is not None and active >= limit for limit, active in limits):
            return False
        self._active.update(lineage)
        return True


def _draw_on_reserves(world: World, out: set[int], active: dict[int, int], vacant: dict[int, int]) -> None:
    """Give vacant numbers to ranks in reserve.

    A candidate that has no room is dropped for good: branches only fill up here. So each costs one look a branch.
    """
    room, reserves = _Room(), _reserves(world, out)
    for rank in active:
        room.take(world[rank].branch)
    for rank in list(vacant):
        for branch in world[rank].branch.domains(LayerFlag.RESERVE):
            candidates = (reserves[branch].pop() for _ in range(len(reserves[branch])))
            fit = (each for each in candidates if each not in active and room.take(world[each].branch))
            if (substitute := next(fit, None)) is not None:
                active[substitute] = vacant.pop(rank)
                break


def _reserves(world: World, out: set[int]) -> defaultdict[Branch, list[int]]:
    """Each branch's ranks in reserve, as they came into it."""
    reserves: defaultdict[Branch, list[int]] = defaultdict(list)
    waiting = (rank for rank, leaf in enumerate(world) if leaf.active_rank is None and rank not in out)
    for rank in sorted(waiting, key=lambda rank: world[rank].reserved):
        for branch in world[rank].branch.lineage():
            reserves[branch].append(rank)
    return reserves


def _backfill(world: World, active: dict[int, int], vacant: dict[int, int]) -> None:
    """Let the active ranks with the highest numbers of a domain have its vacant numbers."""
    open_numbers: defaultdict[Branch, list[int]] = defaultdict(list)
    for rank, number in vacant.items():
        for domain in world[rank].branch.domains(LayerFlag.BACKFILL)[-1:]:
            open_numbers[domain].append(number)
    if not open_numbers:
        return
    members: defaultdict[Branch, list[int]] = defaultdict(list)
    for rank in active:
        for domain in world[rank].branch.domains(LayerFlag.BACKFILL)[-1:]:
            members[domain].append(rank)
    for domain, free in open_numbers.items():
        moved = gaps_filled([active[rank] for rank in members[domain]], free)
        active.update((rank, moved.get(active[rank], active[rank])) for rank in members[domain])
