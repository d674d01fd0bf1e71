"""The store's clock, read from here: the only one that the journal knows."""

from __future__ import annotations

from nvrx_slurm.clock import Clock


class ServerClock:
    """Estimates the store's time between its answers. Never runs backwards."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = 0.0
        self._last = 0.0

    def set(self, server_time: float) -> None:
        """The store has just told its time (seconds since the epoch)."""
        self._offset = server_time - self._clock.monotonic()

    def start_after(self, t: float) -> None:
        """Nothing may be stamped before `t`: the journal already holds it."""
        self._last = max(self._last, t)

    def now(self) -> float:
        self._last = max(self._last, self._clock.monotonic() + self._offset)
        return self._last

    def until(self, t: float) -> float:
        """Seconds from now until `t`; a moment, if it has passed."""
        return max(0.001, t - (self._clock.monotonic() + self._offset))
