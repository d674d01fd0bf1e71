"""The store's clock, read from here: the only one that the journal knows."""

from __future__ import annotations

from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("controller")

JUMP_S = 1.0
"""A clock that is adjusted in passing moves by less between two answers; one that is set moves by more."""


class ServerClock:
    """Estimates the store's time between its answers. Never runs backwards, and never jumps.

    The core measures its deadlines on this clock. When somebody sets the store's, they would all pass at once, or not
    for hours: so it follows small corrections, and goes on at its own pace over large ones.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = 0.0
        self._told_offset: float | None = None  # what the store itself says, jumps and all
        self._last = 0.0

    def set(self, server_time: float) -> None:
        """The store has just told its time (seconds since the epoch)."""
        told = server_time - self._clock.monotonic()
        if self._told_offset is None:
            self._offset = told
        elif abs(step := told - self._told_offset) <= JUMP_S:
            self._offset += step
        else:
            log.warning("the store's clock was set, or its answer took long (%+.1f s); the journal's goes on", step)
        self._told_offset = told

    def go_on(self, t: float, clock_s: float) -> None:
        """It was `t` when our monotonic clock said `clock_s`: an earlier controller on this host has noted that. What
        the store's clock was set by since is no time that has passed."""
        self._offset = t - clock_s

    def start_after(self, t: float) -> None:
        """Nothing may be stamped before `t`: the journal already holds it. A clock that is behind goes on from
        there."""
        self._offset += max(0.0, t - self.now())
        self._last = max(self._last, t)

    def stamp(self, t: float, since: float | None = None) -> float:
        """The moment `t` of the store's clock, on this one; not before an earlier stamp, and not after now.

        `since`: when it had not come yet, by our own monotonic clock. A store whose clock is set back goes on to
        number what comes by the moment of the last before, and we learn of it only with its next answer.
        """
        told = t if self._told_offset is None else t - self._told_offset + self._offset
        earliest = self._last if since is None else since + self._offset
        self._last = max(self._last, min(max(told, earliest), self._clock.monotonic() + self._offset))
        return self._last

    def now(self) -> float:
        self._last = max(self._last, self._clock.monotonic() + self._offset)
        return self._last

    def until(self, t: float) -> float:
        """Seconds from now until `t`; a moment, if it has passed."""
        return max(0.001, t - (self._clock.monotonic() + self._offset))
