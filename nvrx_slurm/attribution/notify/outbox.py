"""What is still to be reported to one receiver: a spool of files, and the worker that delivers them in order.

The worker tries again after a pause, stops in time, and logs each problem once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from nvrx_slurm.attribution.http_client import PermanentError, RetryableError
from nvrx_slurm.attribution.notify.base import (
    DecidedFailure,
    DeliveryLimits,
    FlushResult,
    Message,
    Receiver,
    bounded,
)
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.log import get_logger

log = get_logger("postprocessing")

# How many messages a spool holds, however long its receiver is away. The oldest are dropped first.
MOST_MESSAGES = 256

LARGEST_BYTES = 1 << 20


class Spool:
    """A folder (0700) for one receiver, a file for each message, numbered. Its methods block and raise OSError."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self._clock = clock

    def put(self, identity: str, body: bytes) -> int:
        """Keep a message, unless the spool holds one of that identity. Returns how many older ones it dropped."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        waiting = self._paths()
        if any(path.stem.partition("-")[2] == identity for path in waiting):
            return 0
        number = int(waiting[-1].name.partition("-")[0]) + 1 if waiting else 1
        # The new one is written before the oldest are dropped: a crash between the two loses none.
        write_private(self.folder / f"{number:09}-{identity}.json", body)
        too_many = waiting[: max(0, len(waiting) + 1 - MOST_MESSAGES)]
        for path in too_many:
            path.unlink(missing_ok=True)
        return len(too_many)

    def waiting(self, most: int = MOST_MESSAGES) -> list[Message]:
        """The oldest messages, in order."""
        found = []
        for path in self._paths()[:most]:
            # A longer file is cut here. Its receiver finds that it is malformed, and it is dropped.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # another process may remove it
                found.append(Message(path.stem.partition("-")[2], file.read(LARGEST_BYTES), path))
        return found

    def count(self) -> int:
        return len(self._paths())

    @staticmethod
    def drop(message: Message) -> None:
        if message.path is not None:
            message.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def emptying(self) -> Iterator[bool]:
        """Take messages out alone. Raises TimeoutError at once if another process is doing it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / ".lock", timeout_s=0.0, clock=self._clock) as is_locked:
            yield is_locked

    def _paths(self) -> list[Path]:
        # Numbers of the same width come first: the names sort in the order of arrival.
        return sorted(path for path in self.folder.glob("*-*.json") if path.name[:9].isdigit())


class OutboxWorker:
    """Delivers the messages of one spool. Its methods raise nothing but CancelledError."""

    def __init__(self, receiver: Receiver, spool: Spool, *, limits: DeliveryLimits, clock: Clock) -> None:
        self.receiver = receiver
        self._spool, self._limits, self._clock = spool, limits, clock
        self._unspooled: list[Message] = []
        self._putting = asyncio.Lock()
        self._paused: tuple[float, str] | None = None  # until when, and why
        self._logged: set[str] = set()
        self._sent = 0

    async def put(self, decided: DecidedFailure) -> None:
        """Spool its report."""
        body = self.receiver.body(decided)
        if body is None:
            return
        async with self._putting:
            try:
                lost = await bounded(lambda: self._spool.put(decided.identity, body))
            except OSError as error:
                self._complain(f"the spool {self._spool.folder} cannot be written ({error or type(error).__name__})")
                self._unspooled = [*self._unspooled, Message(decided.identity, body)][-MOST_MESSAGES:]
                return
        if lost:
            log.warning("%s: its spool is full; the oldest %d messages are dropped", self.receiver.name, lost)

    async def empty(self) -> FlushResult:
        """Deliver everything. Returns when nothing is left, or after `attempts` in vain."""
        # A receiver that has refused, or has asked for a pause, is not asked until that time is over.
        until, problem = self._paused or (0.0, None)
        if self._clock.monotonic() >= until:
            problem = None
        self._sent = 0
        if problem is None:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    emptying = self._spool.emptying()
                    try:
                        await bounded(emptying.__enter__)
                    except TimeoutError:
                        raise RetryableError("another process is delivering this spool") from None
                    except OSError:
                        pass  # a disk without locks: go on without one
                    else:
                        stack.push(emptying.__exit__)
                    await self._empty()
            except Exception as error:  # of any kind: the next receiver and the next failure have their turn
                problem = str(error) or type(error).__name__
                self._complain(problem)
        left = len(self._unspooled)
        with contextlib.suppress(OSError):
            left += await bounded(self._spool.count)
        return FlushResult(self.receiver.name, self._sent, left, problem)

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # a connection that is closed badly is closed
            await self.receiver.close()

    async def _empty(self) -> None:
        most = self.receiver.batch
        while True:
            try:
                spooled = await bounded(partial(self._spool.waiting, most))
            except OSError as error:
                self._complain(f"the spool {self._spool.folder} cannot be read ({error or type(error).__name__})")
                spooled = []
            batch = [*spooled, *self._unspooled][:most]
            if not batch:
                return
            for identity, problem in (await self._delivered(batch)).items():
                if problem is not None:
                    self._complain(f"it cannot accept the report of failure {identity}: {problem}")
                # A message goes only after its receiver has it: a crash between the two sends it twice.
                done = [message for message in batch if message.identity == identity]
                self._unspooled = [message for message in self._unspooled if message not in done]
                for message in done:
                    await bounded(partial(self._spool.drop, message))
                self._sent += problem is None

    async def _delivered(self, batch: Sequence[Message]) -> Mapping[str, str | None]:
        """The outcome of at most `attempts`: at least one message's, or it raises."""
        import stamina  # only now: few processes ever deliver anything

        logging.getLogger("stamina").addHandler(logging.NullHandler())  # `_complain` logs instead
        limits = self._limits

        def pause_after(error: Exception) -> bool | float:
            # As stamina's hooks have it: False ends the attempts, True takes its own pause, a number is the pause.
            if not isinstance(error, RetryableError):
                return False
            if error.after_s is None:
                return True
            # A little more than it asked for: it may have given many jobs the same moment.
            pause_s = error.after_s + random.uniform(0, limits.jitter_s)
            return pause_s if pause_s <= limits.longest_pause_s else False

        attempts = stamina.retry_context(
            on=pause_after,
            attempts=limits.attempts,
            timeout=limits.total_s,
            wait_initial=limits.first_pause_s,
            wait_max=limits.longest_pause_s,
            wait_jitter=limits.jitter_s,
        )
        async for attempt in attempts:
            with attempt:
                try:
                    outcome = await self.receiver.deliver(batch)
                    # Without this `_empty` would send the same batch again and again, without a pause.
                    if outcome and outcome.keys().isdisjoint(message.identity for message in batch):
                        raise PermanentError("its answer names none of the messages that were sent")
                except (PermanentError, ConfigError) as error:
                    self._paused = (self._clock.monotonic() + limits.refused_s, str(error))
                    raise PermanentError(str(error)) from None
                except RetryableError as error:
                    if error.after_s is not None:
                        self._paused = (self._clock.monotonic() + error.after_s, str(error))
                    raise
                if not outcome:
                    raise RetryableError("it has accepted nothing")
        return outcome

    def _complain(self, problem: str) -> None:
        # Once each: a receiver that is away is away for many failures.
        if problem not in self._logged:
            self._logged.add(problem)
            log.warning("%s: %s", self.receiver.name, problem)
