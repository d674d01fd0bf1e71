"""What everybody is who is told of failures: the port, and what may come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.spool import Parcel
from nvrx_slurm.errors import DeliveryError
from nvrx_slurm.util.threads import in_thread

DISK_S = 3.0
"""How long a file system may take before we go on without it."""

_T = TypeVar("_T")


class Later(DeliveryError):
    """The receiver is away, or asks to be left alone for `after_s` seconds."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Refused(DeliveryError):
    """It would refuse everything else too, until somebody has mended something."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a receiver is put up with, in seconds. One round of `attempts` is over after about `total_s`, or where
    the receiver wants a longer pause than `longest_pause_s`; what is left then waits in the spool. One that refuses
    is left alone for `refused_s`: somebody may mend it while the job runs on."""

    connect_s: float = 3.0
    answer_s: float = 10.0
    attempts: int = 5
    first_pause_s: float = 0.5
    jitter_s: float = 1.0
    longest_pause_s: float = 60.0
    total_s: float = 120.0
    refused_s: float = 600.0


class Receiver(Protocol):
    """One that is told. `batch`: how many parcels it takes at a time; `own`: what reaches it, for messages."""

    name: str
    batch: int

    def body(self, decided: Decided) -> bytes | None:
        """What it is told of a failure; None: nothing."""
        ...

    async def deliver(self, parcels: Sequence[Parcel]) -> Mapping[str, str | None]:
        """Identity → None: it has it; or why it never will. Those left out are to be tried again.

        Raises Later, Refused, or ConfigError where its token cannot be had; bounded in time.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Flushed:
    """What became of one receiver's spool. `problem`: why `left` parcels are still there."""

    receiver: str
    sent: int
    left: int
    problem: str | None = None


async def bounded(work: Callable[[], _T], timeout_s: float = DISK_S) -> _T:
    """Blocking work aside from the event loop. Raises what it raises, and TimeoutError, which is an OSError."""
    return await asyncio.wait_for(asyncio.wrap_future(in_thread(work, "postprocessing")), timeout_s)
