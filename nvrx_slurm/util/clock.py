"""The one module that touches `time`. Everything else gets a `Clock` through its constructor."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`wall` is seconds since the epoch (for people); `monotonic` is for measuring, and never jumps."""

    def wall(self) -> float: ...
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
