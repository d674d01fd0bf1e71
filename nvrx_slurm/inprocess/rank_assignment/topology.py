"""The topology tree of a world: layers, branches, leaves. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.rank_assignment.base import Key


class LayerFlag(enum.Flag):
    """Where a rank that is out may be replaced from.

    RESERVE: from this branch's ranks in reserve. BACKFILL: by the branch's active rank with the highest number, which
    gives up its own. A flag counts only if the layers below this one have it too.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclass(frozen=True)
class Layer:
    """One level of the tree: its ranks are in one branch if they have the same key, here and in all layers above.

    `min_ranks`: with fewer healthy ranks a whole branch is put out. `max_ranks`: so many at most are active in a
    branch (None: without a limit). `key_or_fn`: the key, or what says it from the rank's first state. `flag`: None
    for none. Raises OptionError for negative numbers.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: Key = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        for name in ("min_ranks", "max_ranks"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise OptionError(f"Layer: {name} is {value}; it must be 0 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A node of the tree that is no leaf. `depth` is 0 for the root."""

    layer: Layer
    depth: int
    parent: Branch | None

    def lineage(self) -> Iterator[Branch]:
        """Itself, and so on up to the root."""
        branch: Branch | None = self
        while branch is not None:
            yield branch
            branch = branch.parent

    def domains(self, flag: LayerFlag) -> list[Branch]:
        """From here up, as long as the flag is there."""
        return list(
            takewhile(lambda branch: branch.layer.flag is not None and flag in branch.layer.flag, self.lineage())
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """A rank in its branch. `reserved`: the higher, the later it came into reserve."""

    branch: Branch
    active_rank: int | None = None
    reserved: int = 0


World = tuple[Leaf, ...]
"""One leaf a rank, in depth-first order: rank n is the n-th."""


def planted(layers: Sequence[Layer], keys: Mapping[int, tuple[str, ...]]) -> dict[int, Leaf]:
    """A leaf for each rank, in depth-first order. Of branches, the one with the lowest rank comes first.

    Raises OptionError if the ranks have different roots, or another number of keys than there are layers.
    """
    _check(keys, len(layers))
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


def _check(keys: Mapping[int, tuple[str, ...]], layers: int) -> None:
    first = min(keys, default=0)
    for rank, path in keys.items():
        if len(path) != layers:
            raise OptionError(f"Tree has {layers} layers here, and {len(path)} on rank {rank}: they must be the same")
        if path[0] != keys[first][0]:
            seen = f"{keys[first][0]!r} on rank {first}, and {path[0]!r} on rank {rank}"
            raise OptionError(f"Tree: the first layer's key must be the same on all ranks; it is {seen}")
