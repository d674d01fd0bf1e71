"""A clock that stands still."""

from __future__ import annotations


class StillClock:
    """The time changes only when `sleep` is called, or when the test sets `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
