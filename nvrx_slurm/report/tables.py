"""Tables of text, which the plain page and the coloured one draw alike. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nvrx_slurm.util.sanitize import one_line

Mood = Literal["good", "busy", "spare", "bad", "dim", "plain"]
"""What a row means, for a page with colours."""

STATE_MOODS: dict[str, Mood] = {
    "active": "good",
    "running": "good",
    "completed": "good",
    "done": "good",
    "standby": "spare",
    "ready": "busy",
    "joining": "busy",
    "starting": "busy",
    "stopping": "busy",
    "recovering": "busy",
    "left": "dim",
    "drained": "dim",
    "stopped": "dim",
    "cancelled": "dim",
    "lost": "bad",
    "quarantined": "bad",
    "failed": "bad",
    "timeout": "bad",
    "died": "bad",
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
    return STATE_MOODS.get(state, "plain")


def number(value: int | None) -> str:
    """The number, or `-` where there is none."""
    return "-" if value is None else str(value)
