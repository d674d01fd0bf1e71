"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Simulation = Literal["job", "inprocess", "transport"]
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Edit:
    """One place of the source, which is there exactly once, and the text in its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A way to break the product. `promise`: what does not hold then. `tests`: the files of unit tests that must see
    it; `simulated`: the simulation that should (`nvrx-slurm ci simulate --of`), and `flows`: globs of the flows."""

    name: str
    promise: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    simulated: Simulation | None = None
    flows: tuple[str, ...] = ()
