"""The OpenAPI document: generated from the very types that decode and encode, with what else is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from nvrx_slurm.attribution.service.wire import Answer, ErrorReply, Health, InFlight, Stats, Submission
from nvrx_slurm.journal.verdicts import MOST_NODES, MOST_PATHS, MOST_WORKERS

_WAIT = {
    "name": "wait",
    "in": "query",
    "description": "Wait so many seconds, or as long as is allowed, for an answer, or for one that differs.",
    "schema": {"type": "number", "minimum": 0, "default": 0},
}
_AFTER = {
    "name": "after",
    "in": "query",
    "description": "The revision that the client has: a later one ends the wait at once. Default: the present one.",
    "schema": {"type": "integer", "minimum": 0},
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}}
_PREFER = {
    "name": "Prefer",
    "in": "header",
    "description": "`wait=8`: wait so many seconds for an answer, or as long as is allowed (RFC 7240).",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_PROBLEMS = {
    400: "The request is not one.",
    401: "No bearer token, or not the one.",
    403: "A path does not lie below an allowed root.",
    404: "No such inquiry: never asked, or forgotten since.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "A value is not what it should be.",
    429: "Too many requests of one client.",
    503: "Too much is queued, the service is about to end, or a file system does not answer.",
}


def document(*, needs_token: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `needs_token`: whether this service asks for one."""
    secured = (401,) if needs_token else ()
    types = (Submission, Answer, InFlight, Stats, Health, ErrorReply)
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    _tighten(schemas)
    answers = {200: (_json("Answer"), "Answered."), 202: (_json("Answer"), "Not yet; what there is so far.")}
    health = _asked("Health") | {503: (_json("Health"), "It ends.")}
    metrics = {200: ({"text/plain": {"schema": {"type": "string"}}}, "Prometheus' text format.")}
    itself = {200: ({"application/json": {"schema": {"type": "object"}}}, "OpenAPI 3.1.")}
    limited = (429, *secured)
    submit = _operation(
        "submit",
        "Ask about a failure. The same key again joins what there is.",
        answers,
        (400, 403, 408, 413, 415, 422, 429, 503, *secured),
        parameters=[_PREFER],
        requestBody={"required": True, "content": _json("Submission")},
    )
    poll = _operation(
        "poll", "How far an inquiry has come.", answers, (404, 422, *limited), parameters=[_ID, _WAIT, _AFTER]
    )
    in_flight = _operation("inFlight", "What is not answered yet.", _asked("InFlight"), limited)
    paths = {
        "/v1/inquiries": {"post": submit, "get": in_flight},
        "/v1/inquiries/{id}": {"get": poll},
        "/v1/stats": {"get": _operation("stats", "What the service does.", _asked("Stats"), limited)},
        "/healthz": {"get": _operation("health", "Whether it takes work.", health, security=[])},
        "/metrics": {"get": _operation("metrics", "Counters, for Prometheus.", metrics, limited)},
        "/openapi.json": {"get": _operation("openapi", "This document.", itself, (429,), security=[])},
    }
    components: dict[str, Any] = {"schemas": schemas}
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nvrx-slurm attrsvc", "version": version("nvrx-slurm")},
        "paths": paths,
        "components": components,
        "security": [{"token": []}] if needs_token else [],
    }


def _operation(
    name: str,
    summary: str,
    answers: Mapping[int, tuple[dict[str, Any], str]],
    problems: Iterable[int] = (),
    **more: Any,
) -> dict[str, Any]:
    """`answers`: status → content and description."""
    responses = {str(status): {"description": about, "content": what} for status, (what, about) in answers.items()}
    for status in problems:
        responses[str(status)] = {"description": _PROBLEMS[status], "content": _json("ErrorReply")}
        if status in (429, 503):
            responses[str(status)]["headers"] = _RETRY_AFTER
    return {"operationId": name, "summary": summary, "responses": responses, **more}


def _asked(schema: str) -> dict[int, tuple[dict[str, Any], str]]:
    return {200: (_json(schema), "What was asked for.")}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _tighten(schemas: dict[str, Any]) -> None:
    """What `Api.submit` asks for beyond the types."""
    inquiry = schemas["Inquiry"]["properties"]
    inquiry["workers_per_node"] |= {"minimum": 1, "maximum": MOST_WORKERS}
    inquiry["nodes"]["maxItems"] = MOST_NODES
    inquiry["pids"]["propertyNames"] = {"pattern": "^(0|-?[1-9][0-9]{0,17})$"}
    for name in ("paths", "earlier"):
        inquiry[name]["maxItems"] = MOST_PATHS
    for schema in ("Inquiry", "FailureKey", "Failed"):
        for kind in schemas[schema]["properties"].values():
            _bound(kind)


def _bound(kind: dict[str, Any]) -> None:
    """Integers are of 64 bits, signed or not."""
    if kind.get("type") == "integer":
        kind.setdefault("minimum", -(2**63))
        kind.setdefault("maximum", 2**64 - 1)
    for part in (*kind.get("anyOf", ()), kind.get("items"), kind.get("additionalProperties")):
        if isinstance(part, dict):
            _bound(part)
