"""Until when rank and monitor may live without a beat that gets through."""

from __future__ import annotations

import math
import time

from nvrx_slurm.liveness.last_resort import LastResort

SHARE = 0.75
"""Of the heartbeat timeout. A sibling waits for all of it, so that what it calls dead has died before."""

LAST_RESORT_SHARE = 0.8
"""When the kernel kills a monitor that has not looked at its lease (it is frozen), and thereby its rank."""


class Lease:
    """`ends_at`, on the monotonic clock: a moment that only a beat moves on, and that the first one sets. The scribe
    renews it, the loop obeys."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._last_resort = LastResort()
        self.ends_at = math.inf

    def renew(self, sent_at: float) -> None:
        """A beat got through. What counts is when it was sent: the store may have had it since then."""
        self.ends_at = sent_at + SHARE * self._timeout_s
        self._last_resort.kill_in(sent_at + LAST_RESORT_SHARE * self._timeout_s - time.monotonic())

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()
