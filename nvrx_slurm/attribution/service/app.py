"""The HTTP side: requests in, answers out. What they mean is the service's business."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeVar

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nvrx_slurm.attribution.service import openapi
from nvrx_slurm.attribution.service.auth import AuthMiddleware, RateLimit, failure, reply
from nvrx_slurm.attribution.service.confinement import OutsideRoots
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.service import AttributionService, Busy
from nvrx_slurm.attribution.service.storage import FileSystemTimeout, TrackedInquiry
from nvrx_slurm.attribution.service.wire import Health, Submission, id_of
from nvrx_slurm.journal.verdicts import excess, unknown_keys
from nvrx_slurm.util.clock import Clock

BODY_AT_MOST_BYTES = 1 << 20
LONGEST_WAIT_S = 60.0
# How long a client may take to send its body.
BODY_S = 10.0

_N = TypeVar("_N", int, float)
_PREFER_WAIT = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?(\d{1,6}(?:\.\d+)?)"?\s*(?:[,;]|$)', re.IGNORECASE | re.ASCII)
_submission = msgspec.json.Decoder(Submission)


class Api:
    """One method for each operation of docs/attrsvc.md."""

    def __init__(
        self, service: AttributionService, metrics: Metrics, *, needs_token: bool, longest_wait_s: float
    ) -> None:
        self._service, self._metrics, self._longest_wait_s = service, metrics, longest_wait_s
        self._document = msgspec.json.encode(openapi.document(needs_token=needs_token))

    def routes(self) -> list[Route]:
        return [
            Route("/v1/inquiries", self.inquiries, methods=["GET", "POST"]),
            Route("/v1/inquiries/{id}", self.poll),
            Route("/v1/stats", self.stats),
            Route("/healthz", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.document),
        ]

    async def inquiries(self, request: Request) -> Response:
        """One route for both, so that the reply to another method names both."""
        return await (self.submit(request) if request.method == "POST" else self.in_flight(request))

    async def submit(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body must be application/json")
        body = await _body(request)
        asked = decoded(body)
        # What types cannot say; `openapi._tighten` says it to others.
        if (out := excess(asked.inquiry)) is not None:
            raise HTTPException(422, f"{out[0]} - at `$.inquiry.{out[1]}`")
        # Decoded again, as plain values: the typed decoder has dropped the keys that it does not know.
        ignored = tuple(unknown_keys(msgspec.json.decode(body), Submission))
        # The revision of before `submit`: one that comes after it ends the wait.
        known = self._service.find(id_of(asked.inquiry.key))
        after = known.record.revision if known is not None else 0
        entry = await self._service.submit(asked)
        preferred = _PREFER_WAIT.search(", ".join(request.headers.getlist("prefer")))
        return await self._when_answered(entry, float(preferred[1]) if preferred else 0.0, after, ignored)

    async def poll(self, request: Request) -> Response:
        entry = self._service.find(request.path_params["id"])
        if entry is None:
            raise HTTPException(404, "no such inquiry: it was never asked here, or was forgotten since")
        wait_s = _number(request, "wait", float, 0.0)
        after = _number(request, "after", int, entry.record.revision)
        return await self._when_answered(entry, wait_s, after)

    async def _when_answered(
        self, entry: TrackedInquiry, wait_s: float, after: int, ignored: tuple[str, ...] = ()
    ) -> Response:
        record = await self._service.wait(entry, min(wait_s, self._longest_wait_s), after)
        return reply(202 if record.is_open else 200, msgspec.structs.replace(record.answer(), ignored=ignored))

    async def in_flight(self, _: Request) -> Response:
        return reply(200, self._service.in_flight())

    async def stats(self, _: Request) -> Response:
        return reply(200, self._service.stats())

    async def health(self, _: Request) -> Response:
        if self._service.draining:
            return reply(503, Health(status="draining"), {"Retry-After": "5"})
        return reply(200, Health(status="ok"))

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def document(self, _: Request) -> Response:
        return Response(self._document, media_type="application/json")


def build(
    service: AttributionService,
    metrics: Metrics,
    *,
    clock: Clock,
    token: str | None = None,
    limit: RateLimit | None = None,
    longest_wait_s: float = LONGEST_WAIT_S,
) -> Starlette:
    """The ASGI application."""
    api = Api(service, metrics, needs_token=token is not None, longest_wait_s=longest_wait_s)
    routes = api.routes()
    gate = Middleware(
        AuthMiddleware, token=token, limit=limit or RateLimit(100.0, 400), routes=routes, metrics=metrics, clock=clock
    )
    handlers = {
        HTTPException: _refused,
        Busy: _try_later,
        FileSystemTimeout: _try_later,
        OutsideRoots: _outside,
        Exception: _broken,
    }
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)  # type: ignore[arg-type]


def decoded(body: bytes) -> Submission:
    """Raises HTTPException: 400 for what is no JSON, 422 for what is no submission."""
    try:
        try:
            return _submission.decode(body)
        except msgspec.ValidationError:
            # To JSON 1.0 is an integer, and to a decoder that knows what it wants it is none.
            return msgspec.convert(_whole(msgspec.json.decode(body)), Submission, str_keys=True)
    except msgspec.ValidationError as error:
        raise HTTPException(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, str(error)) from None


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def _body(request: Request) -> bytes:
    """The whole body, bounded in size and time. Raises HTTPException."""
    too_large = HTTPException(413, f"the body may have {BODY_AT_MOST_BYTES} bytes at most")
    # Before the first part is read: a client that announces too much is refused at once.
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > BODY_AT_MOST_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_AT_MOST_BYTES:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended half way") from None
    return bytes(body)


def _number(request: Request, name: str, kind: type[_N], default: _N) -> _N:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        value = kind(-1)
    if not 0 <= value < math.inf:  # nan is not, either
        raise HTTPException(422, f"Expected `{kind.__name__}` of 0 or more - at `{name}`")
    return value


async def _refused(_: Request, error: HTTPException) -> Response:
    return failure(error.status_code, error.detail, headers=dict(error.headers or {}))


async def _try_later(_: Request, error: Busy | FileSystemTimeout) -> Response:
    return failure(503, str(error), retry_in_s=error.retry_in_s)


async def _outside(_: Request, error: OutsideRoots) -> Response:
    return failure(403, str(error))


async def _broken(_: Request, error: Exception) -> Response:
    """A defect of the service; the traceback is in the log."""
    return failure(500, f"the service failed at this request: {type(error).__name__}")
