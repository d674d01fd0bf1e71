"""What every request passes before it is looked at: the rate limit, the token; and what is noted of it afterwards."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Match, Route

from nvrx_slurm.attribution.service.limits import RateLimit
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.replies import failure
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

access = get_logger("attrsvc.access")

OPEN_TO_ALL = frozenset({"/healthz", "/openapi.json"})
UNLIMITED = frozenset({"/healthz"})
"""Whoever watches the service over must not be told that it asks too often."""


class Gate:
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
        self._is_known = brings(token)
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

        refusal = self._refusal(scope)
        try:
            await (refusal or self._app)(scope, receive, noting)
        finally:
            self._note(scope, statuses[0] if statuses else 499, began)  # 499: the client went away

    def _refusal(self, scope: Scope) -> Response | None:
        path, is_known = scope["path"], self._is_known(scope)
        if path not in UNLIMITED:
            # Apart: who has no token cannot use up what a client at the same address may send.
            wait_s = self._limit.take(_client(scope) if is_known else f"{_client(scope)} ?", self._clock.monotonic())
            if wait_s > 0.0:
                return failure(429, "too many requests; slow down", retry_in_s=wait_s)
        if is_known or path in OPEN_TO_ALL:
            return None
        return failure(401, "a bearer token is needed, and this is none that is known here")

    def _note(self, scope: Scope, status: int, began: float) -> None:
        """The path without its query, and no header: neither may hold a secret by accident."""
        route = next((each.path for each in self._routes if each.matches(scope)[0] is not Match.NONE), "other")
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
        self._metrics.requests.labels(method, route, str(status)).inc()
        took_ms = (self._clock.monotonic() - began) * 1000.0
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "backslashreplace")
        line = f"{_client(scope)} {method} {path:.200s} {status} {took_ms:.1f} ms"
        if status in (401, 429):  # anybody can cause as many as they like
            self._refused.say(line, self._clock.monotonic())
        else:
            access.info("%s", line)


def brings(token: str | None) -> Callable[[Scope], bool]:
    """Whether a request brings the token; without one every request will do."""
    if token is None:
        return lambda scope: True
    expected = f"Bearer {token}".encode()

    def is_known(scope: Scope) -> bool:
        """In constant time: how long it takes must not tell how much of a guess was right."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, found = (given[0] if len(given) == 1 else b"").partition(b" ")
        return hmac.compare_digest(b" ".join((scheme.title(), found.strip())), expected)

    return is_known


def _client(scope: Scope) -> str:
    """The address. A reverse proxy counts as one client: what it says of those behind it proves nothing."""
    return scope["client"][0] if scope.get("client") else "local"
