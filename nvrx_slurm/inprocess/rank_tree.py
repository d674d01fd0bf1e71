"""Ranks as a tree, by where they are: which branch is put out as a whole, and from where a rank is replaced. Pure.

`rank_assignment.Tree` is the rank assignment by these rules.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.state import FrozenState

# The name of a rank's group, or a function that returns it. What is no text counts as its text.
Key = Hashable | Callable[[FrozenState], Hashable]


class LayerFlag(enum.Flag):
    """Which ranks may replace a rank that is out.

    RESERVE: this branch's ranks in reserve. BACKFILL: the branch's active rank with the highest number, which gives
    up its own. A flag counts only if the layers below this one have it too.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass(frozen=True)
class Layer:
    """One level of the tree: its ranks are in one branch if they have the same key, here and in all layers above.

    `min_ranks`: with fewer healthy ranks a whole branch is put out. `max_ranks`: how many are active in a branch at
    most (None: without a limit). `key_or_fn`: the key, or a function that returns it for the rank's first state.
    `flag`: None for none. Raises OptionError for negative numbers.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: Key = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        for name in ("min_ranks", "max_ranks"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise OptionError(f"Layer: {name} is {value}; it must be 0 or more", name)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A node of the tree that is no leaf. `depth` is 0 for the root."""

    layer: Layer
    depth: int
    parent: Branch | None

    def lineage(self) -> Iterator[Branch]:
        """The branch itself, its parent, and so on up to the root."""
        branch: Branch | None = self
        while branch is not None:
            yield branch
            branch = branch.parent

    def domains(self, flag: LayerFlag) -> list[Branch]:
        """The branch and those above it, as long as their layers have the flag."""
        return list(
            takewhile(lambda branch: branch.layer.flag is not None and flag in branch.layer.flag, self.lineage())
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """A rank in its branch. `reserved` is higher for a rank that came into reserve later."""

    branch: Branch
    active_rank: int | None = None
    reserved: int = 0


World = tuple[Leaf, ...]  # one leaf for each rank, in depth-first order: rank n is the n-th leaf


def planted(layers: Sequence[Layer], keys: Mapping[int, tuple[str, ...]]) -> dict[int, Leaf]:
    """A leaf for each rank, in depth-first order. Of branches, the one with the lowest rank comes first.

    Raises OptionError if the ranks have different roots, or another number of keys than there are layers.
    """
    first = min(keys, default=0)
    for rank, key in keys.items():
        if len(key) != len(layers):
            raise OptionError(
                f"Tree has {len(layers)} layers here, and {len(key)} on rank {rank}: they must be the same"
            )
        if key[0] != keys[first][0]:
            seen = f"{keys[first][0]!r} on rank {first}, and {key[0]!r} on rank {rank}"
            raise OptionError(f"Tree: the first layer's key must be the same on all ranks; it is {seen}")
    branches: dict[tuple[str, ...], Branch] = {}
    places: dict[tuple[str, ...], int] = {}
    for rank in sorted(keys):
        parent = None
        for depth, layer in enumerate(layers):
            path = keys[rank][: depth + 1]
            parent = branches.setdefault(path, Branch(layer, depth, parent))
            places.setdefault(path, len(places))
    paths = {rank: [path[: depth + 1] for depth in range(len(layers))] for rank, path in keys.items()}
    ordered = sorted(keys, key=lambda rank: (*(places[path] for path in paths[rank]), rank))
    return {rank: Leaf(branches[keys[rank]]) for rank in ordered}


def put_out(leaves: Sequence[Leaf], out: Iterable[int]) -> set[int]:
    """The ranks that are out, with those of branches with too few healthy ranks, the lowest branches first."""
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
    """The world without the ranks that are out; the active ones among them are replaced as the flags allow.

    From a reserve first: the nearest branch's, and there the rank that came into it last. Then by the active ranks
    with the highest numbers. What is still open is closed: all later active ranks move up.
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
        raise OptionError(
            f"Tree: world_size_filter({size}) is {wanted}; it must be from 0 to {size}", "world_size_filter"
        )
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
        """Make one more rank active in the branch, if it and all above it have room. Returns whether they had."""
        lineage = list(branch.lineage())
        limits = ((above.layer.max_ranks, self._active[above]) for above in lineage)
        if any(limit is not None and active >= limit for limit, active in limits):
            return False
        self._active.update(lineage)
        return True


def _draw_on_reserves(world: World, out: set[int], active: dict[int, int], vacant: dict[int, int]) -> None:
    """Give vacant numbers to ranks in reserve."""
    room = _Room()
    for rank in active:
        room.take(world[rank].branch)
    # Each branch's ranks in reserve, as they came into it.
    reserves: defaultdict[Branch, list[int]] = defaultdict(list)
    waiting = (rank for rank, leaf in enumerate(world) if leaf.active_rank is None and rank not in out)
    for rank in sorted(waiting, key=lambda rank: world[rank].reserved):
        for branch in world[rank].branch.lineage():
            reserves[branch].append(rank)
    for rank in list(vacant):
        for branch in world[rank].branch.domains(LayerFlag.RESERVE):
            # A candidate without room is dropped for good, since branches only fill up here: so each costs one look
            # a branch.
            candidates = (reserves[branch].pop() for _ in range(len(reserves[branch])))
            fit = (each for each in candidates if each not in active and room.take(world[each].branch))
            if (substitute := next(fit, None)) is not None:
                active[substitute] = vacant.pop(rank)
                break


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


def gaps_filled(taken: Collection[int], free: Collection[int]) -> dict[int, int]:
    """Which taken number moves to which free one, so that the lowest numbers are taken and as few as possible
    move."""
    lowest = set(sorted({*taken, *free})[: len(taken)])
    return dict(zip(sorted(set(taken) - lowest), sorted(lowest - set(taken)), strict=True))
