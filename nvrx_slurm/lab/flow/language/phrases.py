"""Turns of phrase that flows made by us share: branches side by side, bounds that people would write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from nvrx_slurm.lab.flow.language.writing import Item

NICE_S = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 3600)


def in_any_order(branches: list[list[Item]]) -> list[Item]:
    """Branches side by side; one alone needs no word."""
    if len(branches) <= 1:
        return branches[0] if branches else []
    return [{"any_order": [branch[0] if len(branch) == 1 else branch for branch in branches]}]


def without_never(items: Iterable[Any]) -> Iterator[Any]:
    """What is left where the job has no end: nothing would ever tell that something never came."""
    for item in items:
        if isinstance(item, list):
            yield list(without_never(item))
        elif "any_order" in item:
            yield {"any_order": list(without_never(item["any_order"]))}
        elif "never" not in item:
            yield item


def nice(seconds: float) -> float:
    """The next longer duration that people would write."""
    return next((nice_s for nice_s in NICE_S if nice_s >= seconds), math.ceil(seconds / 3600) * 3600)
