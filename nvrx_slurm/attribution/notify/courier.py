"""Carries one receiver's parcels to it, in order: tries again after a while, gives up in time, complains once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping, Sequence

from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.receiver import Flushed, Later, Patience, Receiver, Refused, bounded
from nvrx_slurm.attribution.notify.spool import MOST_PARCELS, Parcel, Spool
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("postprocessing")


class Courier:
    """One receiver and its spool. Nothing here raises but CancelledError."""

    def __init__(self, receiver: Receiver, spool: Spool, *, patience: Patience, clock: Clock) -> None:
        self.receiver = receiver
        self._spool, self._patience, self._clock = spool, patience, clock
        self._unspooled: list[Parcel] = []
        self._putting = asyncio.Lock()
        self._left_alone: tuple[float, str] | None = None  # until when, and why
        self._complained: set[str] = set()
        self._sent = 0

    async def put(self, decided: Decided) -> None:
        """Have it told, some time."""
        body = self.receiver.body(decided)
        if body is None:
            return
        async with self._putting:
            try:
                lost = await bounded(lambda: self._spool.put(decided.identity, body))
            except OSError as error:
                self._complain(f"the spool {self._spool.folder} takes nothing ({error or type(error).__name__})")
                self._unspooled = [*self._unspooled, Parcel(decided.identity, body)][-MOST_PARCELS:]
                return
        if lost:
            log.warning("%s: its spool is full; the oldest %d will not be told", self.receiver.name, lost)

    async def empty(self) -> Flushed:
        """Tell all that waits. Returns when nothing is left, or when the receiver has had its chances."""
        self._sent, problem = 0, self._why_not_now()
        if problem is None:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await self._enter(stack)
                    await self._empty()
            except Exception as error:  # whatever it is, the next receiver and the next failure have their turn
                problem = str(error) or type(error).__name__
                self._complain(problem)
        return Flushed(self.receiver.name, self._sent, await self._left(), problem)

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # a connection that is closed badly is closed
            await self.receiver.close()

    async def _enter(self, stack: contextlib.AsyncExitStack) -> None:
        """Keep others from emptying the same spool. A disk that takes no lock takes no parcels either."""
        emptying = self._spool.emptying()
        try:
            await bounded(emptying.__enter__)
        except TimeoutError:
            raise Later("somebody else is just telling what waits here") from None
        except OSError:
            return
        stack.push(emptying.__exit__)

    async def _empty(self) -> None:
        while batch := await self._waiting(self.receiver.batch):
            for identity, problem in (await self._delivered(batch)).items():
                if problem is not None:
                    self._complain(f"it cannot take the one of failure {identity}: {problem}")
                await self._drop([parcel for parcel in batch if parcel.identity == identity])
                self._sent += problem is None

    async def _waiting(self, most: int) -> list[Parcel]:
        try:
            spooled = await bounded(lambda: self._spool.waiting(most))
        except OSError as error:
            self._complain(f"the spool {self._spool.folder} cannot be read ({error or type(error).__name__})")
            spooled = []
        return [*spooled, *self._unspooled][:most]

    async def _left(self) -> int:
        with contextlib.suppress(OSError):
            return len(self._unspooled) + await bounded(self._spool.count)
        return len(self._unspooled)

    async def _drop(self, parcels: Sequence[Parcel]) -> None:
        self._unspooled = [parcel for parcel in self._unspooled if parcel not in parcels]
        for parcel in parcels:
            await bounded(lambda parcel=parcel: self._spool.drop(parcel))  # type: ignore[misc]  # mypy knows no such lambda

    async def _delivered(self, batch: Sequence[Parcel]) -> Mapping[str, str | None]:
        """What one round of attempts comes to; something, or it raises."""
        import stamina  # only now: hardly any process ever gets here

        logging.getLogger("stamina").addHandler(logging.NullHandler())  # what is shown is our own complaint
        patience = self._patience
        attempts = stamina.retry_context(
            on=self._pause_after,
            attempts=patience.attempts,
            timeout=patience.total_s,
            wait_initial=patience.first_pause_s,
            wait_max=patience.longest_pause_s,
            wait_jitter=patience.jitter_s,
        )
        async for attempt in attempts:
            with attempt:
                outcome = await self._attempt(batch)
        return outcome

    async def _attempt(self, batch: Sequence[Parcel]) -> Mapping[str, str | None]:
        try:
            outcome = await self.receiver.deliver(batch)
        except (Refused, ConfigError) as error:
            self._leave_alone(self._patience.refused_s, str(error))
            raise Refused(str(error)) from None
        except Later as error:
            if error.after_s is not None:
                self._leave_alone(error.after_s, str(error))
            raise
        if not outcome:
            raise Later("it has taken nothing")
        return outcome

    def _pause_after(self, error: Exception) -> bool | float:
        """As stamina's hooks have it: False ends the round, a number is the pause."""
        if not isinstance(error, Later):
            return False
        if error.after_s is None:
            return True
        # A little more than it asked for: many jobs may have been told the same moment.
        pause_s = error.after_s + random.uniform(0, self._patience.jitter_s)
        return pause_s if pause_s <= self._patience.longest_pause_s else False

    def _leave_alone(self, seconds: float, why: str) -> None:
        self._left_alone = (self._clock.monotonic() + seconds, why)

    def _why_not_now(self) -> str | None:
        until, why = self._left_alone or (0.0, "")
        return why if self._clock.monotonic() < until else None

    def _complain(self, problem: str) -> None:
        """Once each: a receiver that is away is away for many failures."""
        if problem not in self._complained:
            self._complained.add(problem)
            log.warning("%s: %s", self.receiver.name, problem)
