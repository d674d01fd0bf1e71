"""A clock for tests of waiting."""

from __future__ import annotations


class WaitingClock:
    """Moves only when somebody sleeps, and remembers for how long."""

    def __init__(self) -> None:
        self._now = 0.0
        self.slept: list[float] = []

    def wall(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0 or self.slept == [] or self.slept[-1] > 0, "it spins"
        self.slept.append(seconds)
        self._now += seconds
