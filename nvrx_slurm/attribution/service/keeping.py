"""Writing to the state folder without holding anybody up, in order, and whether or not it can be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from nvrx_slurm.attribution.service.aside import Aside, Stalled
from nvrx_slurm.attribution.service.lifecycle import Record
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.results import Results
from nvrx_slurm.util.log import get_logger

log = get_logger("attrsvc")


class Keeper:
    """Keeps records in `results`; without one, in memory alone."""

    def __init__(self, results: Results | None, aside: Aside, metrics: Metrics) -> None:
        self._results, self._aside, self._metrics = results, aside, metrics
        self._turn = asyncio.Lock()  # first come, first served: the record on disk is never the older one

    def load(self) -> dict[str, Record]:
        """id → record of all that is kept. Blocks; raises OSError."""
        return {} if self._results is None else self._results.load()

    async def save(self, identity: str, record: Record) -> None:
        """A record that cannot be written is answered all the same, as long as this process lives."""
        if self._results is not None:
            await self._write(partial(self._results.save, identity, record))

    async def drop(self, identities: list[str]) -> None:
        if self._results is not None and identities:
            await self._write(partial(self._results.drop, identities))

    async def _write(self, work: Callable[[], None]) -> None:
        async with self._turn:
            try:
                await self._aside.run(work)
            except (OSError, Stalled) as error:
                self._metrics.unsaved.inc()
                log.error("the state folder cannot be written: %s", error)
