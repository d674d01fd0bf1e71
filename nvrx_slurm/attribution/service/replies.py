"""Responses: JSON of our own types, and one form for all that goes wrong."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from nvrx_slurm.attribution.service.wire import Failure, Wire


def reply(status: int, body: Wire, headers: dict[str, str] | None = None) -> Response:
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
    return reply(status, Failure(error=message), headers)
