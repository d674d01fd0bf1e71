"""A clock that stands still."""

from __future__ import annotations


class StillClock:
    """Moves only when somebody sleeps, or when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
