"""One inquiry's way through a service: submitted, polled, and submitted again where the service has forgotten it."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import msgspec

from nvrx_slurm.attribution.sources import replies
from nvrx_slurm.attribution.sources.answers import Answer, read_answer
from nvrx_slurm.attribution.sources.base import Unanswered
from nvrx_slurm.attribution.sources.exchange import Exchange, Reply
from nvrx_slurm.attribution.sources.patience import is_conclusive
from nvrx_slurm.attribution.sources.places import Locate
from nvrx_slurm.errors import SourceError
from nvrx_slurm.journal.verdicts import Inquiry
from nvrx_slurm.util.clock import Clock

Intent = Literal["progressive", "terminal"]

POLL_S = 20
"""How long one request asks the service to hold its answer back."""

SPARE_S = 2.0
"""How much longer than that the service may be silent before the request counts as lost."""

LEAST_POLL_S = 0.5
"""A service that does not hold its answer back is asked so often."""

MOST_LAST_WORDS_S = 1.0
"""No try is begun so shortly before the end: whoever asks is to hear what went wrong, not that time is up."""

TRIES = 4
FIRST_PAUSE_S = 0.1
LOOK_AGAIN_S = 0.1
"""How often a service that is about to start is looked for."""


class Talk:
    """With one service about one inquiry, within `timeout_s`.

    A request that was lost or refused for now is sent again, `TRIES` times in all: a service has one answer to one
    key, however often it is asked. One that `waits_for_start` looks for the service as long as there is time. No
    redirect is followed: the token is for this service alone.
    """

    def __init__(
        self,
        exchange: Exchange,
        locate: Locate,
        inquiry: Inquiry,
        *,
        clock: Clock,
        timeout_s: float,
        waits_for_start: bool = False,
    ) -> None:
        self._exchange, self._locate, self._inquiry, self._clock = exchange, locate, inquiry, clock
        self._waits_for_start = waits_for_start
        self._deadline = clock.monotonic() + timeout_s
        self._last_words_s = min(MOST_LAST_WORDS_S, timeout_s / 5)
        self._answer: Answer | None = None

    async def until_conclusive(self) -> None:
        """Until nothing that the logs may still say would change the answer. Raises SourceError."""
        await self._follow("progressive", settled=False)

    async def for_good(self, *, settled: bool) -> Answer:
        """The service's last word. Raises SourceError."""
        if self._answer is None or not self._answer.is_final:
            return await self._follow("terminal", settled=settled)
        return self._answer

    async def _follow(self, intent: Intent, *, settled: bool) -> Answer:
        answer = await self._submit(intent, settled)
        while not self._is_enough(answer, intent):
            asked_at = self._clock.monotonic()
            polled = await self._poll(answer)
            answer = polled or await self._submit(intent, settled)
            await asyncio.sleep(LEAST_POLL_S - (self._clock.monotonic() - asked_at) if not answer.is_final else 0.0)
        return answer

    def _is_enough(self, answer: Answer, intent: Intent) -> bool:
        self._answer = answer
        return answer.is_final or (intent == "progressive" and is_conclusive(answer.attribution, self._inquiry))

    async def _submit(self, intent: Intent, settled: bool) -> Answer:
        body = msgspec.json.encode({"inquiry": self._inquiry, "intent": intent, "settled": settled})
        reply = await self._request("POST", "/v1/inquiries", body)
        return read_answer(reply.body, self._inquiry.key)

    async def _poll(self, answer: Answer) -> Answer | None:
        """None: the service knows nothing of the inquiry any more."""
        path = f"/v1/inquiries/{replies.identity(self._inquiry.key)}?wait={self._wait_s}&after={answer.revision}"
        reply = await self._request("GET", path, None)
        return None if reply.status == 404 else read_answer(reply.body, self._inquiry.key)

    async def _request(self, method: str, path: str, body: bytes | None) -> Reply:
        tried = 0
        while True:
            tried += 1
            pause_s = FIRST_PAUSE_S * 2 ** min(tried, TRIES) * random.uniform(0.5, 1.0)
            try:
                reply = await self._send(method, path, body)
                if reply.status in (200, 202) or (method == "GET" and reply.status == 404):
                    return reply
                problem = replies.problem(reply)
                if tried >= TRIES or not replies.may_pass(reply.status):
                    raise SourceError(problem)
                asked_s = replies.retry_after_s(reply, self._clock.wall())
                pause_s = pause_s if asked_s is None else asked_s
            except Unanswered as error:
                problem = str(error)
                if self._waits_for_start:
                    pause_s = LOOK_AGAIN_S
                elif tried >= TRIES:
                    raise
            if pause_s + self._last_words_s > self._left_s:
                raise SourceError(f"{problem}: another try, {pause_s:.1f} s from now, would be too late")
            await asyncio.sleep(pause_s)

    async def _send(self, method: str, path: str, body: bytes | None) -> Reply:
        place = await asyncio.to_thread(self._locate)  # it reads files, on a file system that may hang
        wait_s = self._wait_s
        return await self._exchange.send(
            place, method, path, body=body, prefer_s=wait_s if body else 0, read_s=wait_s + SPARE_S
        )

    @property
    def _left_s(self) -> float:
        return self._deadline - self._clock.monotonic()

    @property
    def _wait_s(self) -> int:
        return max(0, min(POLL_S, int(self._left_s)))
