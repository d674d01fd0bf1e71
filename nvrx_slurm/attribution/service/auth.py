"""Which clients may ask, and how often: bearer token, rate limit, a deadline for new connections."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.wire import ErrorReply, ServiceMessage
from nvrx_slurm.util.admission import PROOF_S, Admission, RateLimitedLog
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

access = get_logger("attrsvc.access")

OPEN_TO_ALL = frozenset({"/healthz", "/openapi.json"})
# A monitor of the service must not be refused for asking too often.
UNLIMITED = frozenset({"/healthz"})


class AuthMiddleware:
    """ASGI middleware. `token`: what a client must bring, or None."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        limit: RateLimit,
        routes: Sequence[Route],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._app, self._limit, self._metrics, self._clock = app, limit, metrics, clock
        self._routes = tuple(routes)
        self._is_known = token_check(token)
        self._refused = RateLimitedLog(access.warning)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, statuses = self._clock.monotonic(), list[int]()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        # The address. A reverse proxy counts as one client: what it says of those behind it proves nothing.
        client = scope["client"][0] if scope.get("client") else "local"
        is_known, wait_s = self._is_known(scope), 0.0
        if scope["path"] not in UNLIMITED:
            # Apart: requests without the token cannot use up what a client at the same address may send.
            wait_s = self._limit.take(client if is_known else f"{client} ?", began)
        handler = self._app
        if wait_s > 0.0:
            handler = failure(429, "too many requests; slow down", retry_in_s=wait_s)
        elif not is_known and scope["path"] not in OPEN_TO_ALL:
            handler = failure(401, "a bearer token is needed, and this is none that is known here")
        try:
            await handler(scope, receive, noting)
        finally:
            status = statuses[0] if statuses else 499  # 499: the client went away
            route = next((each.path for each in self._routes if each.matches(scope)[0] is not Match.NONE), "other")
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            self._metrics.requests.labels(method, route, str(status)).inc()
            # The path without its query, and no header: neither may hold a secret by accident.
            path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "backslashreplace")
            now = self._clock.monotonic()
            line = f"{client} {method} {path:.200s} {status} {(now - began) * 1000.0:.1f} ms"
            if status in (401, 429):  # any client can cause as many of these as it likes
                self._refused.say(line, now)
            else:
                access.info("%s", line)


def token_check(token: str | None) -> Callable[[Scope], bool]:
    """Whether a request has the token; without a token every request has."""
    if token is None:
        return lambda scope: True
    expected = f"Bearer {token}".encode()

    def is_known(scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, found = (given[0] if len(given) == 1 else b"").partition(b" ")
        # In constant time: how long it takes must not show how much of a guess was right.
        # The name of a scheme has no case (RFC 9110, 11.1).
        return hmac.compare_digest(b" ".join((scheme.title(), found.strip())), expected)

    return is_known


CLIENTS_AT_MOST = 10_000


class RateLimit:
    """`per_s` requests a second for each client, and `burst` at once after a silence."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client → tokens left, as of when

    def take(self, client: str, now: float) -> float:
        """0.0 where the client may go on; otherwise in how many seconds it may."""
        left, since = self._buckets.get(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        allowed = left >= 1.0
        self._buckets[client] = (left - allowed, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > CLIENTS_AT_MOST:
            self._buckets.popitem(last=False)  # who has been silent for longest has most likely a full one
        return 0.0 if allowed else (1.0 - left) / self._per_s


log = get_logger("attrsvc")


class ProofDeadlineProtocol(H11Protocol):
    """HTTP/1.1 whose first request must have arrived, headers and token and all, within `proof_s`.

    Of the others at most 64 are open at a time: a newer one takes the place of the oldest. Without a token
    `/healthz` is answered all the same; its connection ends with the time.
    """

    proof_s: ClassVar[float] = PROOF_S
    admission: ClassVar[Admission[ProofDeadlineProtocol]] = Admission()
    dropped: ClassVar[RateLimitedLog] = RateLimitedLog(log.warning)

    @staticmethod
    def is_known(scope: Any) -> bool:
        """Where there is no token, a whole request is proof enough."""
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_proven = False
        now = self.loop.time()
        oldest = self.admission.admit(self, now, self.client[0] if self.client else "")
        if oldest is not None:
            most = self.admission.most
            self.dropped.say(f"more than {most} connections without a token: the oldest is closed", now)
            # Not `close`, which first sends what is buffered, to a client that may read nothing.
            oldest.transport.abort()

        def close_unproven() -> None:
            self.admission.gone(self)
            self.transport.close()

        self._hurry = self.loop.call_later(self.proof_s, close_unproven)

    def handle_events(self) -> None:
        super().handle_events()
        # After `super`, which has set both from the headers of a whole request.
        if not self._is_proven and self.cycle is not None and self.is_known(self.scope):
            self._is_proven = True
            self.admission.proven(self)
            self._hurry.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hurry.cancel()
        self.admission.gone(self)
        super().connection_lost(exc)


def protocol_of(is_known: Callable[[Any], bool]) -> type[ProofDeadlineProtocol]:
    """For one server: what proves a request, and an account of its own."""
    members = {"is_known": staticmethod(is_known), "admission": Admission[ProofDeadlineProtocol]()}
    return type("ImpatientProtocol", (ProofDeadlineProtocol,), members)


def reply(status: int, body: ServiceMessage, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def failure(
    status: int, message: str, *, retry_in_s: float | None = None, headers: dict[str, str] | None = None
) -> Response:
    """`{"error": message}`, with the headers that belong to the status."""
    headers = dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if retry_in_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_in_s)))
    return reply(status, ErrorReply(error=message), headers)
