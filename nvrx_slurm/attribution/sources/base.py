"""The port behind which every source of attribution stands."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import Protocol

from nvrx_slurm.errors import SourceError, UsageError
from nvrx_slurm.journal.verdicts import Attribution, Inquiry


class Unanswered(SourceError):
    """Nobody was there, or the answer ended half way: the same may be asked again."""


class Source(Protocol):
    """Somebody who can be asked about a failure.

    `open` gets ready what an ask would have to wait for; an ask does not need it. `ask` raises SourceError where
    there is no verdict; it may be called off at any moment, and is after `timeout_s`. `settled` is set once all
    workers of the cycle are gone, so that their logs are whole.
    """

    name: str

    async def open(self) -> None: ...
    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution: ...
    async def close(self) -> None: ...


def need(module: str) -> ModuleType:
    """A module of the extra `attribution`. Raises UsageError that says how to install it.

    Imported when it is first needed, and best in a thread: it takes a good part of a second.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"{package} is needed: pip install 'nvrx-slurm[attribution]' ({error})") from None
