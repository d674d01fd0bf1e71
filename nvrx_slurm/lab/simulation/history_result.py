"""What one history of virtual threads came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HistoryResult:
    """What a history came to. `what`: its shape; `lines`: what happened; `broken`: the first promise that was, in a
    sentence; `digest`: of all that happened."""

    seed: int
    what: str
    acts: tuple[Any, ...]
    lines: tuple[str, ...]
    promise: str | None
    broken: str | None
    digest: str
