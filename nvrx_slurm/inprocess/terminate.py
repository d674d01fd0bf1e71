"""What a rank does when it leaves for good."""

from __future__ import annotations

from nvrx_slurm.inprocess.state import Callback


class Terminate(Callback):
    """Called on a rank that leaves the group before the call has completed: unfit, discarded, or by an exception.

    If it raises, the call raises that in place of the reason to leave, which is its cause. `Compose` makes one of
    several.
    """
