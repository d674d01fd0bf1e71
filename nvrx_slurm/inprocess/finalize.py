"""What a rank does after a fault, once the function was left."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.inprocess import callback_support
from nvrx_slurm.inprocess.callback_support import bounded
from nvrx_slurm.inprocess.state import Callback, FrozenState


class Finalize(Callback):
    """Prepares this process for the next call of the function: frees memory, ends what the function has started.

    Called after Abort, once the function was left, and before the health check. An exception of it takes this rank
    out, and ends its process: what it could not clean up must not reach the next iteration. `Compose` makes one of
    several.
    """


@dataclass(frozen=True)
class ThreadedFinalize(Finalize):
    """Calls `fn(*args, **kwargs)` in a thread of its own, and waits for it no longer than `timeout`.

    The thread uses this rank's CUDA device if this process has a CUDA context. Raises what `fn` raises, and
    TimeoutError when the bound passes; the thread then goes on, and does not keep the process from its end.
    """

    timeout: datetime.timedelta
    fn: Callable[..., Any]
    args: tuple[Any, ...] | None = ()
    kwargs: Mapping[str, Any] | None = None

    def __call__(self, state: FrozenState) -> FrozenState:
        in_use = callback_support.initialised()
        # Looked up here, and not in the new thread: a thread begins on the first device.
        device = None if in_use is None else callback_support.own_device(in_use)

        def work() -> object:
            if in_use is not None:
                in_use.set_device(device)
            return self.fn(*(self.args or ()), **(self.kwargs or {}))

        name = getattr(self.fn, "__qualname__", repr(self.fn))
        bounded(work, self.timeout, f"ThreadedFinalize: {name} of rank {state.rank}")
        return state
