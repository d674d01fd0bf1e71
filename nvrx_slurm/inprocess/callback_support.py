"""What the ready-made callbacks share: work with a time limit, and this rank's CUDA device."""

from __future__ import annotations

import concurrent.futures
import datetime
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from nvrx_slurm.inprocess.environment import local_rank
from nvrx_slurm.inprocess.exception import TimeoutError
from nvrx_slurm.util.threads import in_thread

T = TypeVar("T")


def bounded(work: Callable[[], T], bound: datetime.timedelta, what: str) -> T:
    """Run `work` in a thread, and return its result. Raises what it raises, and TimeoutError, naming `what`, once the
    bound has passed; the thread then goes on, and does not keep the process from its end."""
    future = in_thread(work, what)
    concurrent.futures.wait([future], bound.total_seconds())
    if not future.done():
        raise TimeoutError(f"{what} has not ended within {bound.total_seconds():g} s")
    return future.result()


def initialised() -> Any | None:
    """`torch.cuda` if this process has a CUDA context; else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def own_device(cuda: Any) -> int:
    """This rank's device: the device of its local rank. Without a local rank, or where the rank sees fewer devices
    than that (some launchers show each rank only its own), the calling thread's current device."""
    own = local_rank()
    if own is not None and own < cuda.device_count():
        return own
    return int(cuda.current_device())
