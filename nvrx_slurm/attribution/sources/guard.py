"""A source as the desk sees it: whatever it does, an ask ends in time, with an attribution."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from msgspec.structs import replace

from nvrx_slurm.attribution.sources.answers import trimmed
from nvrx_slurm.attribution.sources.base import Source
from nvrx_slurm.attribution.sources.breaker import Breaker
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, Verdict
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

AT_ONCE = 16
"""So many asks of one source run at a time; more of them wait, and their time runs."""

CLOSE_S = 3.0


class Guard:
    """Bounds a source in time and in number, leaves it alone while its circuit is open, and never raises."""

    def __init__(self, source: Source, *, clock: Clock, chance: Callable[[], float] = random.random) -> None:
        self.name = source.name
        self._source, self._clock, self._chance = source, clock, chance
        self._breaker = Breaker()
        self._problem = ""
        self._places = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> None:
        """Get the source ready; what goes wrong here an ask will tell."""
        try:
            await self._source.open()
        except NvrxError as error:
            log.info("%s: not ready yet: %s", self.name, error)

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """The source's answer; TIMEOUT after `timeout_s`; UNKNOWN with the `problem` where it has failed."""
        began = self._clock.monotonic()
        task = asyncio.create_task(self._ask(inquiry, settled, timeout_s), name=f"ask {self.name}")
        try:
            # Not asyncio.timeout: that would wait for as long as the source takes to be called off.
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()
        answer = task.result() if task.done() else self._too_late(timeout_s)
        return trimmed(replace(answer, source=self.name, latency_s=self._clock.monotonic() - began))

    async def close(self) -> None:
        """End what the source holds; bounded."""
        task = asyncio.create_task(self._source.close())
        await asyncio.wait({task}, timeout=CLOSE_S)
        task.cancel()

    async def _ask(self, inquiry: Inquiry, settled: asyncio.Event, timeout_s: float) -> Attribution:
        async with self._places:
            left = self._breaker.pause_left(self._clock.monotonic())
            if left:
                return self._unknown(f"{self._problem} (circuit open for another {left:.0f} s)")
            self._breaker = self._breaker.asked()
            try:
                answer = await self._source.ask(inquiry, settled=settled, timeout_s=timeout_s)
            except asyncio.CancelledError:
                self._breaker = self._breaker.given_up()
                raise
            except NvrxError as error:
                return self._failed(str(error))
            except Exception as error:  # a source is others' code: it may raise what it likes, and nothing ends of it
                log.exception("%s failed", self.name)
                return self._failed(f"{type(error).__name__}: {error}")
            self._breaker = self._breaker.succeeded()
            return answer

    def _failed(self, problem: str) -> Attribution:
        self._count_failure(problem)
        log.warning("%s: %s", self.name, problem)
        return self._unknown(problem)

    def _too_late(self, timeout_s: float) -> Attribution:
        problem = f"no answer within {timeout_s:g} s"
        self._count_failure(problem)
        return Attribution(source=self.name, verdict=Verdict.TIMEOUT, problem=problem)

    def _count_failure(self, problem: str) -> None:
        self._problem = problem
        self._breaker = self._breaker.failed(self._clock.monotonic(), chance=self._chance())

    def _unknown(self, problem: str) -> Attribution:
        return Attribution(source=self.name, verdict=Verdict.UNKNOWN, problem=problem)
