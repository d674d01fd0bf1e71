"""What a rank does once the call has completed."""

from __future__ import annotations

import abc

from nvrx_slurm.inprocess.state import FrozenState


class Completion(abc.ABC):
    """Called on every rank that is left, reserves too, once all active ranks have returned from the function.

    What it raises is logged: the function's value is returned all the same. `Compose` makes one of several.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns the state as it is."""
