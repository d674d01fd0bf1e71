"""The clocks of simulated nodes: no two run alike."""

from __future__ import annotations

from nvrx_slurm.lab.simulation.loop import VirtualLoop


class DriftingClock:
    """A clock that runs `rate` times as fast as virtual time, and whose wall clock is `ahead_s` of it."""

    def __init__(self, loop: VirtualLoop, rate: float, ahead_s: float) -> None:
        self._loop, self.rate, self._ahead_s = loop, rate, ahead_s

    @property
    def pace(self) -> float:
        """Virtual seconds in one of its own."""
        return 1.0 / self.rate

    def at(self, moment: float) -> float:
        """What this clock says at a moment of virtual time."""
        return moment * self.rate

    def monotonic(self) -> float:
        return self._loop.now_s * self.rate

    def wall(self) -> float:
        return self._loop.now_s * self.rate + self._ahead_s

    def sleep(self, seconds: float) -> None:
        raise RuntimeError("nothing sleeps in virtual time")
