"""The port of every receiver of decided failures, and what passes through it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol, TypeVar

from nvrx_slurm.attribution.http_client import HttpClient, HttpReply, PermanentError, RetryableError
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict, VerdictRecord, Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.threads import awaitable_thread

# How long a file system may take before its work is given up.
DISK_S = 3.0

_TRY_AGAIN = (408, 425, 429)

_T = TypeVar("_T")


class DecidedFailure(Wire, frozen=True, kw_only=True):
    """One failure, all that was said of it, and the decision; `judged` is None where a service only answers."""

    key: FailureKey
    inquiry: Inquiry
    attributions: tuple[Attribution, ...] = ()
    judged: VerdictRecord | None = None

    @property
    def identity(self) -> str:
        """32 hex digits, the same for the same failure, however often and by whichever process it is reported."""
        return hashlib.sha256(str(self.key).encode(errors="surrogateescape")).hexdigest()[:32]

    @property
    def job_id(self) -> str:
        return PurePath(self.key.job).name

    @property
    def leading(self) -> Attribution | None:
        """The surest of the answers that agree with the decision; without one, the surest of all."""
        verdict = self.judged.verdict if self.judged else None
        agreeing = [each for each in self.attributions if each.verdict == verdict] or self.attributions
        return max(agreeing, key=lambda each: each.confidence, default=None)

    @property
    def verdict(self) -> Verdict:
        if self.judged is not None:
            return self.judged.verdict
        return self.leading.verdict if self.leading else Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class Message:
    """The report of one failure to one receiver. `identity` names the failure; `path`: its file, if it has one."""

    identity: str
    body: bytes
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """Bounds of one receiver, in seconds.

    A delivery of `attempts` is over after about `total_s`, or if the receiver wants a longer pause than
    `longest_pause_s`; the rest then stays in the spool. After a PermanentError the receiver is not asked for
    `refused_s`: a person may repair it while the job runs on.
    """

    connect_s: float = 3.0
    answer_s: float = 10.0
    attempts: int = 5
    first_pause_s: float = 0.5
    jitter_s: float = 1.0
    longest_pause_s: float = 60.0
    total_s: float = 120.0
    refused_s: float = 600.0


class Receiver(Protocol):
    """Takes the reports of decided failures. `batch`: how many messages it takes at a time."""

    name: str
    batch: int

    def body(self, decided: DecidedFailure) -> bytes | None:
        """The report of a failure; None: there is nothing to report."""
        ...

    async def deliver(self, messages: Sequence[Message]) -> Mapping[str, str | None]:
        """Identity → None: delivered; or why it never can be. A message that is left out is to be tried again.

        Raises RetryableError, PermanentError, or ConfigError where its token cannot be read; bounded in time.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FlushResult:
    """The result for one receiver's spool. `problem`: why `left` messages are still there."""

    receiver: str
    sent: int
    left: int
    problem: str | None = None


class ReceiverHttp:
    """The HTTP connection to one receiver, which `name` names in messages."""

    def __init__(self, name: str, *, limits: DeliveryLimits, clock: Clock) -> None:
        self._name, self._limits, self._clock = name, limits, clock
        self._http = HttpClient()

    async def send(
        self, method: str, url: str, *, content: bytes, content_type: str, authorization: str | None
    ) -> HttpReply:
        """The reply, if it is about what was sent. Raises RetryableError (no connection, no answer in time, 408, 425,
        429, 5xx; with their Retry-After) and PermanentError (an invalid URL; a redirect)."""
        limits, headers = self._limits, {"Content-Type": content_type}
        if authorization:
            headers["Authorization"] = authorization
        try:
            reply = await self._http.send(
                method,
                url,
                body=content,
                headers=headers,
                connect_s=limits.connect_s,
                read_s=limits.answer_s,
                total_s=limits.connect_s + limits.answer_s,
            )
        except UsageError as error:  # httpx2 is not installed
            raise PermanentError(str(error)) from None
        if reply.status >= 500 or reply.status in _TRY_AGAIN:
            raise RetryableError(f"{self._name} answers {reply.status}", reply.retry_after_s(self._clock.wall()))
        if 300 <= reply.status < 400:
            raise PermanentError(
                f"{self._name} redirects ({reply.status}), which is not followed: set the URL that it redirects to"
            )
        return reply

    async def close(self) -> None:
        await self._http.close()


async def bounded(work: Callable[[], _T], timeout_s: float = DISK_S) -> _T:
    """Blocking work in a thread. Raises what it raises, and TimeoutError, which is an OSError."""
    return await asyncio.wait_for(awaitable_thread(work, "postprocessing"), timeout_s)
