"""A clock for tests of waiting."""

from __future__ import annotations

from tests.still_clock import StillClock


class WaitingClock(StillClock):
    """Advances only in `sleep`, and records for how long."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0 or self.slept == [] or self.slept[-1] > 0, "it spins"
        self.slept.append(seconds)
        super().sleep(seconds)
