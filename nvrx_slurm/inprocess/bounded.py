"""Work that may hang: it gets a thread of its own, and so much time."""

from __future__ import annotations

import concurrent.futures
import datetime
from collections.abc import Callable
from typing import TypeVar

from nvrx_slurm.inprocess.exception import TimeoutError
from nvrx_slurm.util.threads import in_thread

T = TypeVar("T")


def bounded(work: Callable[[], T], bound: datetime.timedelta, what: str) -> T:
    """What `work` returns. Raises what it raises, and TimeoutError, naming `what`, once the bound has passed; the
    thread then goes on, and does not keep the process from its end."""
    future = in_thread(work, what)
    concurrent.futures.wait([future], bound.total_seconds())
    if not future.done():
        raise TimeoutError(f"{what} has not ended within {bound.total_seconds():g} s")
    return future.result()
