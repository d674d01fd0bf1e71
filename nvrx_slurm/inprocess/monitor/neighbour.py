"""The sibling's process, where it is on this host: its end is known at once even if its own monitor died first."""

from __future__ import annotations

import math
import os
import select

from nvrx_slurm.inprocess.gates import Joining
from nvrx_slurm.inprocess.monitor import process

HEAD_START_S = 0.1
"""A process that has ended is first left to its own monitor, which knows how, and why."""


class Neighbour:
    """A member's process. `record_at`: when its end is to be recorded, unless its monitor has; infinite while it
    lives, and where it cannot be seen from here."""

    def __init__(self, member: int, ours: Joining, theirs: Joining) -> None:
        self.member, self.host = member, theirs.host
        self.pidfd = process.find(theirs.pid, theirs.began) if ours.host == theirs.host else None
        self.record_at = math.inf

    def watch(self, poller: select.poll) -> None:
        """Have the poller tell its end."""
        if self.pidfd is not None:
            poller.register(self.pidfd, select.POLLIN)

    def forget(self, poller: select.poll) -> None:
        """It is watched no longer."""
        if self.pidfd is not None:
            poller.unregister(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None

    def has_ended(self, now: float) -> None:
        """Its own monitor has a head start."""
        self.record_at = now + HEAD_START_S
