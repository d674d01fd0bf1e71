"""The sources `attrsvc` and by URL: a service that speaks the API of docs/attrsvc.md."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from nvrx_slurm.attribution.sources.answers import verdict_of
from nvrx_slurm.attribution.sources.exchange import Exchange
from nvrx_slurm.attribution.sources.places import Locate
from nvrx_slurm.attribution.sources.talk import Talk
from nvrx_slurm.journal.verdicts import Attribution, Inquiry
from nvrx_slurm.util.clock import Clock


class ServiceSource:
    """Asks a service over HTTP: first about logs that are still written; then, once they are whole, or the failing
    rank has said enough, or `patience_s` is over, for good. What it is told for good is the same for all who ask.

    `managed`: the job runs the service itself. It is waited for while it starts. `local`: it is on this machine, and
    reached without a proxy.
    """

    def __init__(
        self,
        name: str,
        locate: Locate,
        *,
        patience_s: float,
        clock: Clock,
        managed: bool = False,
        local: bool = False,
    ) -> None:
        self.name = name
        self._locate, self._patience_s, self._clock = locate, patience_s, clock
        self._managed = managed
        self._exchange = Exchange(proxies=not (managed or local))

    async def open(self) -> None:
        await self._exchange.open()

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """The service's last word. Raises SourceError."""
        talk = Talk(
            self._exchange,
            self._locate,
            inquiry,
            clock=self._clock,
            timeout_s=timeout_s,
            waits_for_start=self._managed,
        )
        if not settled.is_set():
            await _while_unsettled(talk.until_conclusive(), settled, self._patience_s)
        return verdict_of(await talk.for_good(settled=settled.is_set()))

    async def close(self) -> None:
        await self._exchange.close()


async def _while_unsettled(work: Coroutine[Any, Any, object], settled: asyncio.Event, patience_s: float) -> None:
    """Do the work, as long as the logs are not whole and patience lasts. Raises what the work does."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(settled.wait())
    try:
        await asyncio.wait({working, waiting}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        working.cancel()
        waiting.cancel()
