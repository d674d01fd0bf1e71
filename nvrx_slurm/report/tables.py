"""Tables of text, which the plain page and the coloured one draw alike. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nvrx_slurm.util.sanitize import one_line

# What a row means, for a page with colours.
Mood = Literal["good", "busy", "spare", "bad", "dim", "plain"]

# Of jobs, replicas and nodes; any other is `plain`.
STATES: dict[Mood, tuple[str, ...]] = {
    "good": ("active", "running", "completed", "done"),
    "spare": ("standby",),
    "busy": ("ready", "joining", "starting", "stopping", "recovering"),
    "dim": ("left", "drained", "stopped", "cancelled"),
    "bad": ("lost", "quarantined", "failed", "timeout", "died"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table. Its cells hold text from elsewhere: control characters are made visible.

    `cut`: on a terminal the text of a fact is cut, not wrapped; `end` follows it, and is not cut off.
    """

    cells: tuple[str, ...]
    mood: Mood = "plain"
    cut: bool = False
    end: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(map(one_line, self.cells)))
        object.__setattr__(self, "end", one_line(self.end))


@dataclass(frozen=True, slots=True)
class Table:
    """`right` names the columns whose cells are numbers."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    right: frozenset[str] = field(default_factory=frozenset)


def mood(state: str) -> Mood:
    """What a state means."""
    return next((kind for kind, states in STATES.items() if state in states), "plain")


def number(value: int | None) -> str:
    """The number, or `-` where there is none."""
    return "-" if value is None else str(value)
