"""How long each part of a restart takes on this rank."""

from __future__ import annotations

import time

from nvrx_slurm.inprocess.timeline import Phase


class Stopwatch:
    """Marks are set by whichever thread ends a part; each part begins where the one before it ended."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        """A fault happens here, now: what follows is a restart."""
        self._last, self._parts = time.monotonic(), {}

    def mark(self, phase: Phase) -> None:
        """This part has ended. The first mark without a beginning is one."""
        now = time.monotonic()
        if phase is Phase.DETECTED and (self._last is None or self._parts):
            self._last, self._parts = now, {}
        if self._last is not None:
            self._parts[phase.value] = self._parts.get(phase.value, 0.0) + now - self._last
            self._last = now

    def parts(self) -> dict[str, float]:
        """The parts so far, in seconds."""
        return dict(self._parts)
