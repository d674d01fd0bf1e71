"""What one history of virtual threads came to."""

from __future__ import annotations

import hashlib
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


def result_of(
    seed: int, what: str, acts: tuple[Any, ...], lines: list[str], promise: str | None, broken: str | None, end: str
) -> HistoryResult:
    """`end`: how the scheduler stood at the end; it counts for the digest alone."""
    digest = hashlib.sha256("\n".join(lines).encode())
    digest.update(f"{broken} {end}".encode())
    return HistoryResult(seed, what, acts, tuple(lines), promise, broken, digest.hexdigest())
