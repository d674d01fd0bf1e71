"""The sources `attrsvc` and by URL: a service with the API of docs/attrsvc.md.

An inquiry is submitted, polled, and submitted again if the service has forgotten it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.http_client import HttpClient, HttpReply, RetryableError, token_of
from nvrx_slurm.attribution.local_service import find_token
from nvrx_slurm.attribution.service.wire import Intent, id_of
from nvrx_slurm.attribution.sources.base import SourceAnswer, is_conclusive, read_answer, verdict_of
from nvrx_slurm.errors import MalformedRecord, SourceError, UnsafePath
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import JobFiles

MANAGED_NAME = "attrsvc.json"
CONNECT_S = 5.0

# How long one request asks the service to hold its answer back.
POLL_S = 20

# How much longer than that the service may be silent before the request counts as lost.
SPARE_S = 2.0

# A service that does not hold its answer back is asked so often.
LEAST_POLL_S = 0.5

# No try is begun so shortly before the end: the caller is to get the error, not that time is up.
LONGEST_RESERVE_S = 1.0

TRIES = 4
FIRST_PAUSE_S = 0.1
# How often a service that is about to start is looked for.
LOOK_AGAIN_S = 0.1

LONGEST_TEXT = 400

# With these statuses the same request may succeed a little later.
_MAY_PASS = frozenset({429, 500, 502, 503, 504})

_ADVICE = {
    401: "its token comes from `token_file`, or else from NVRX_SLURM_ATTRSVC_TOKEN",
    404: "no attribution service answers at this URL",
    413: "the inquiry is longer than the service takes",
}


class ServiceEndpoint(Wire, frozen=True, kw_only=True):
    """A service's URL, without a slash at its end, and its bearer token."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"ServiceEndpoint({self.url!r})"  # a token never comes into a log


# Says where the service is now. Raises RetryableError, SourceError, and ConfigError for a token file.
Locate = Callable[[], ServiceEndpoint]


def fixed_endpoint(url: str, token_file: str | None) -> Locate:
    """A service at a URL; its token from the file, or else from NVRX_SLURM_ATTRSVC_TOKEN, or else, at a loopback
    address, from this user's own service there."""

    def locate() -> ServiceEndpoint:
        token = token_of(token_file, env.get(env.ATTRSVC_TOKEN), key="fault_tolerance.attribution.token_file")
        return ServiceEndpoint(url=url.rstrip("/"), token=token or find_token(url))

    return locate


def managed_endpoint(folder: Path) -> Locate:
    """The service that the job's own batch host runs: it may be started again, on another port."""
    job, path = JobFiles(folder), folder / MANAGED_NAME

    def locate() -> ServiceEndpoint:
        try:
            endpoint = decode_json(ServiceEndpoint, job.read(MANAGED_NAME), MANAGED_NAME)
        except FileNotFoundError:
            raise RetryableError(f"the job's own service has not started yet: there is no {path}") from None
        except (OSError, UnsafePath, MalformedRecord) as error:
            raise SourceError(f"{path} does not say where the job's own service is: {error}") from None
        return ServiceEndpoint(url=endpoint.url.rstrip("/"), token=endpoint.token)

    return locate


class ServiceSource:
    """Asks a service over HTTP: first about logs that are still written; then for its final answer, once they are
    whole, or the failing rank's own lines are conclusive, or `settle_s` is over.

    `managed`: the job runs the service itself. It is waited for while it starts. `local`: it is on this machine, and
    reached without a proxy.
    """

    def __init__(
        self,
        name: str,
        locate: Locate,
        *,
        settle_s: float,
        clock: Clock,
        managed: bool = False,
        local: bool = False,
    ) -> None:
        self.name = name
        self._locate, self._settle_s, self._clock = locate, settle_s, clock
        self._managed = managed
        self._http = HttpClient(proxies=not (managed or local), own_listener=True)

    async def open(self) -> None:
        await self._http.open()

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """The service's final answer. Raises SourceError."""
        deadline, reserve_s = self._clock.monotonic() + timeout_s, min(LONGEST_RESERVE_S, timeout_s / 5)
        asked = ServiceInquiry(self._http, self._locate, inquiry, self._clock, deadline, reserve_s, self._managed)
        if not settled.is_set():
            working, waiting = asyncio.create_task(asked.follow("progressive")), asyncio.create_task(settled.wait())
            try:
                await asyncio.wait({working, waiting}, timeout=self._settle_s, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    early = await working  # raises what it raised
                    if early.is_final:
                        return verdict_of(early)
            finally:
                working.cancel()
                waiting.cancel()
        return verdict_of(await asked.follow("terminal", settled=settled.is_set()))

    async def close(self) -> None:
        await self._http.close()


@dataclass(frozen=True, slots=True)
class ServiceInquiry:
    """With one service about one inquiry, until `deadline`; no try is begun in the last `reserve_s`.

    A request that was lost or refused for now is sent again, `TRIES` times in all: a service has one answer to one
    key, however often it is asked. One that `waits_for_start` looks for the service as long as there is time. No
    redirect is followed: the token is for this service alone.
    """

    http: HttpClient
    locate: Locate
    inquiry: Inquiry
    clock: Clock
    deadline: float
    reserve_s: float
    waits_for_start: bool

    async def follow(self, intent: Intent, *, settled: bool = False) -> SourceAnswer:
        """The service's final answer; `progressive`: or one that later lines of the logs would not change. Raises
        SourceError."""
        key = self.inquiry.key
        body = msgspec.json.encode({"inquiry": self.inquiry, "intent": intent, "settled": settled})
        answer: SourceAnswer | None = None
        polled_at = -math.inf
        while True:
            if answer is not None:
                # A service that has held its answer back was slow enough: the pause is negative then, and none.
                await asyncio.sleep(LEAST_POLL_S - (self.clock.monotonic() - polled_at))
                polled_at = self.clock.monotonic()
                query = f"wait={self._wait_s}&after={answer.revision}"
                reply = await self._request("GET", f"/v1/inquiries/{id_of(key)}?{query}")
            if answer is None or reply.status == 404:  # at first, and where the service has forgotten the inquiry
                reply = await self._request("POST", "/v1/inquiries", body)
            answer = read_answer(reply.body, key)
            if answer.is_final or (intent == "progressive" and is_conclusive(answer.attribution, self.inquiry)):
                return answer

    async def _request(self, method: str, path: str, body: bytes | None = None) -> HttpReply:
        tried, problem = 0, ""
        while True:
            tried += 1
            pause_s = FIRST_PAUSE_S * 2 ** min(tried, TRIES) * random.uniform(0.5, 1.0)
            try:
                # What is known of a service that fails again and again is told before the time of the caller is up.
                left_s = self.deadline - self.clock.monotonic() - self.reserve_s / 2
                async with asyncio.timeout(left_s if problem else None):
                    reply = await self._sent(method, path, body)
                if reply.status in (200, 202) or (method == "GET" and reply.status == 404):
                    return reply
                problem = problem_of(reply)
                if tried >= TRIES or reply.status not in _MAY_PASS:
                    raise SourceError(problem)
                asked_s = reply.retry_after_s(self.clock.wall())
                pause_s = pause_s if asked_s is None else asked_s
            except TimeoutError:
                raise SourceError(f"{problem}; the try after it was not over in time") from None
            except RetryableError as error:
                problem = str(error)
                if self.waits_for_start:
                    pause_s = LOOK_AGAIN_S
                elif tried >= TRIES:
                    raise
            if pause_s + self.reserve_s > self.deadline - self.clock.monotonic():
                raise SourceError(f"{problem}: another try, {pause_s:.1f} s from now, would be too late")
            await asyncio.sleep(pause_s)

    async def _sent(self, method: str, path: str, body: bytes | None) -> HttpReply:
        # At each try: a service that was started again has another port, and another token.
        endpoint = await asyncio.to_thread(self.locate)  # it reads files, on a file system that may hang
        wait_s = self._wait_s
        # Made at each try: a token is for its own endpoint alone.
        headers = {"Accept": "application/json"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Prefer": f"wait={wait_s}"}
        if endpoint.token is not None:
            headers["Authorization"] = f"Bearer {endpoint.token}"
        return await self.http.send(
            method,
            endpoint.url + path,
            body=body,
            headers=headers,
            connect_s=CONNECT_S,
            read_s=wait_s + SPARE_S,
        )

    @property
    def _wait_s(self) -> int:
        return max(0, min(POLL_S, int(self.deadline - self.clock.monotonic())))


def problem_of(reply: HttpReply) -> str:
    """One sentence about a reply that is no answer."""
    if 300 <= reply.status < 400:
        location = reply.headers.get("location", "nowhere")
        return f"the service redirects to {location[:LONGEST_TEXT]}: give that URL itself, redirects are not followed"
    # Its own words: of `{"error": …}`, or else the start of what it sent.
    try:
        error = decode_json(dict[str, object], reply.body, "the reply").get("error")
    except MalformedRecord:
        error = None
    text = error if isinstance(error, str) else reply.body[:LONGEST_TEXT].decode(errors="replace")
    words = " ".join(text.split())[:LONGEST_TEXT]
    parts = [f"the service says {reply.status}", words, _ADVICE.get(reply.status, "")]
    return ": ".join(part for part in parts if part)
