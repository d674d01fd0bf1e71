"""Bounds a source: every ask ends in time, with an attribution; a circuit breaker pauses a source that keeps failing.

closed ── three failures in a row ──▶ open ── the pause is over ──▶ half-open (one try)
  ▲                                     ▲                               │      │
  └────────── the try succeeds ─────────┼───────────────────────────────┘      │
                                        └── it fails: a longer pause ──────────┘
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed

from msgspec.structs import replace

from nvrx_slurm.attribution.sources.base import FindingsTaker, Source, trimmed
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, Inquiry, Verdict
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

# So many asks of one source run at a time; more of them wait, and their time runs.
AT_ONCE = 16

CLOSE_S = 3.0

# So many in a row open the circuit.
FAILURES = 3

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
# A pause is up to so much longer, so that many jobs do not come back to one service at one moment.
JITTER = 0.5


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """One source's circuit. `retry_at` is None while it is closed; `trying`: a half-open circuit's one try runs."""

    failures: int = 0
    pauses: int = 0
    retry_at: float | None = None
    trying: bool = False

    def pause_left(self, now: float) -> float:
        """For how many seconds nothing is asked; 0 where it may be."""
        if self.retry_at is None:
            return 0.0
        left = max(0.0, self.retry_at - now)
        return left or (FIRST_PAUSE_S if self.trying else 0.0)

    def asked(self) -> CircuitBreaker:
        """After it was admitted: an ask is under way."""
        return self if self.retry_at is None else changed(self, trying=True)

    def succeeded(self) -> CircuitBreaker:
        """After an answer, whichever ask it belongs to: the source works."""
        return CircuitBreaker()

    def given_up(self) -> CircuitBreaker:
        """After an ask that was cancelled: it proves nothing."""
        return changed(self, trying=False)

    def failed(self, now: float, *, chance: float) -> CircuitBreaker:
        """After a failure. `chance`, from 0 to 1, chooses the pause within its bounds."""
        if self.retry_at is not None and not self.trying:
            return self  # an ask of before it opened: its failure counts no more
        failures = self.failures + 1
        if failures < FAILURES and not self.trying:
            return changed(self, failures=failures)
        return CircuitBreaker(failures, self.pauses + 1, now + pause_s(self.pauses, chance))


def pause_s(pauses: int, chance: float) -> float:
    """How long the circuit stays open after so many pauses in a row."""
    doubled = FIRST_PAUSE_S * 2.0 ** min(pauses, 16)
    return min(LONGEST_PAUSE_S, doubled * (1.0 + JITTER * chance))


class GuardedSource:
    """Bounds a source in time and in number, leaves it alone while its circuit is open, and never raises."""

    def __init__(self, source: Source, *, clock: Clock, chance: Callable[[], float] = random.random) -> None:
        self.name = source.name
        self._source, self._clock, self._chance = source, clock, chance
        self._breaker = CircuitBreaker()
        self._problem = ""
        self._places = asyncio.Semaphore(AT_ONCE)

    async def open(self) -> None:
        """Get the source ready; an ask reports what goes wrong."""
        try:
            await self._source.open()
        except NvrxError as error:
            log.info("%s: not ready yet: %s", self.name, error)

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """The source's answer; TIMEOUT after `timeout_s`; UNKNOWN with the `problem` where it has failed."""
        began = self._clock.monotonic()
        task = asyncio.create_task(self._ask(inquiry, settled, timeout_s), name=f"ask {self.name}")
        try:
            # Not asyncio.timeout: that would wait for as long as the source takes to be cancelled.
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()
        if task.done():
            answer = task.result()
        else:
            problem = f"no answer within {timeout_s:g} s"
            self._count_failure(problem)
            answer = Attribution(source=self.name, verdict=Verdict.TIMEOUT, problem=problem)
        return trimmed(replace(answer, source=self.name, latency_s=self._clock.monotonic() - began))

    def found(self, findings: AgentFindings) -> None:
        """Pass on what an agent has found, to a source that takes it: others read all logs themselves."""
        if isinstance(self._source, FindingsTaker):
            self._source.found(findings)

    async def close(self) -> None:
        """End what the source holds; bounded."""
        task = asyncio.create_task(self._source.close())
        await asyncio.wait({task}, timeout=CLOSE_S)
        task.cancel()

    async def _ask(self, inquiry: Inquiry, settled: asyncio.Event, timeout_s: float) -> Attribution:
        async with self._places:
            # After the wait for a place: the circuit may have opened meanwhile.
            left = self._breaker.pause_left(self._clock.monotonic())
            if left:
                problem = f"{self._problem} (circuit open for another {left:.0f} s)"
                return Attribution(source=self.name, verdict=Verdict.UNKNOWN, problem=problem)
            self._breaker = self._breaker.asked()
            try:
                answer = await self._source.ask(inquiry, settled=settled, timeout_s=timeout_s)
            except asyncio.CancelledError:
                self._breaker = self._breaker.given_up()
                raise
            except NvrxError as error:
                problem = str(error)
            except Exception as error:  # a plug-in may raise anything
                log.exception("%s failed", self.name)
                problem = f"{type(error).__name__}: {error}"
            else:
                self._breaker = self._breaker.succeeded()
                return answer
            self._count_failure(problem)
            log.warning("%s: %s", self.name, problem)
            return Attribution(source=self.name, verdict=Verdict.UNKNOWN, problem=problem)

    def _count_failure(self, problem: str) -> None:
        self._problem = problem
        self._breaker = self._breaker.failed(self._clock.monotonic(), chance=self._chance())
