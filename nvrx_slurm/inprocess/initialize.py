"""What a rank does before the function, in every iteration."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.inprocess.exception import OptionError, RestartAbort
from nvrx_slurm.inprocess.state import Callback, FrozenState


class Initialize(Callback):
    """Called at the start of every iteration, the first one too, before the health check and the function.

    An `Exception` of it interrupts the iteration for all ranks, as one of the function does; what is no `Exception`
    takes this rank out. `Compose` makes one of several.
    """


@dataclass(frozen=True)
class RetryController(Initialize):
    """Ends the retries.

    Raises RestartAbort on each rank: after `max_iterations` iterations have failed (None: without a limit), and when
    fewer ranks are left than `min_world_size`, or fewer of them active than `min_active_world_size`. Raises
    OptionError for numbers below 1.
    """

    max_iterations: int | None = None
    min_world_size: int = 1
    min_active_world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_iterations", "min_world_size", "min_active_world_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"RetryController: {name} is {value}; it must be 1 or more", name)

    def __call__(self, state: FrozenState) -> FrozenState:
        active = state.active_world_size or 0
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(f"{state.iteration} iterations have failed: max_iterations={self.max_iterations}")
        if state.world_size < self.min_world_size:
            raise RestartAbort(f"{state.world_size} ranks are left, fewer than min_world_size={self.min_world_size}")
        if active < self.min_active_world_size:
            least = self.min_active_world_size
            raise RestartAbort(f"{active} ranks are active, fewer than min_active_world_size={least}")
        return state
