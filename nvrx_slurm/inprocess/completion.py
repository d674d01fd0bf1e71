"""What a rank does once the call has completed."""

from __future__ import annotations

from nvrx_slurm.inprocess.state import Callback


class Completion(Callback):
    """Called on every rank that is left, reserves too, once all active ranks have returned from the function.

    An exception of it is logged, and the function's value is returned. `Compose` makes one of several.
    """
