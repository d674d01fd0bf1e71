"""What the API refuses, and with which replies."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import msgspec
import pytest

from nvrx_slurm.attribution.service.app import BODY_AT_MOST_BYTES
from nvrx_slurm.attribution.service.auth import RateLimit
from tests.unit.attribution.service.conftest import Fleet, ask

TOKEN = "correct-horse-battery-staple"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", TOKEN])
async def test_token(fleet: Fleet, given: str | None) -> None:
    """Without the token only health and the OpenAPI document are available."""
    client = fleet.start(token=TOKEN)
    headers = {"Authorization": given} if given else {}
    for path in ("/v1/inquiries", "/v1/stats", "/metrics", "/nowhere"):
        refused = await client.get(path, headers=headers)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert (await client.get("/healthz", headers=headers)).json() == {"status": "ok"}
    assert (await client.get("/openapi.json", headers=headers)).status_code == 200


async def test_known_token(fleet: Fleet) -> None:
    """With the token requests are allowed, however the scheme is written."""
    client = fleet.start(token=TOKEN)
    for scheme in ("Bearer", "bearer", "BEARER "):
        assert (await client.get("/v1/stats", headers={"Authorization": f"{scheme} {TOKEN}"})).status_code == 200


async def test_rate(fleet: Fleet) -> None:
    """A client that asks too often gets 429 and Retry-After; a health check is still answered."""
    client = fleet.start(limit=RateLimit(0.5, 3))
    statuses = [(await client.get("/v1/stats")).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    refused = await client.get("/v1/stats")
    assert refused.headers["Retry-After"] == "2" and "slow down" in refused.json()["error"]
    assert (await client.get("/healthz")).status_code == 200


async def _post(client: httpx2.AsyncClient, body: bytes, headers: dict[str, str] = JSON) -> tuple[int, str]:
    answer = await client.post("/v1/inquiries", content=body, headers=headers)
    return answer.status_code, answer.json()["error"]


async def test_bad_bodies(fleet: Fleet) -> None:
    """A body that is no submission is refused, with the place of the error."""
    client = fleet.start()
    good = msgspec.to_builtins({"inquiry": fleet.inquiry("STOP"), "intent": "terminal"})
    assert (await _post(client, b"{"))[0] == 400
    assert (await _post(client, b"\xff\xfe"))[0] == 400
    assert (await _post(client, b"7w}"))[0] == 400
    assert await _post(client, b"[]") == (422, "Expected `object`, got `array`")
    status, error = await _post(client, msgspec.json.encode({**good, "intent": "now"}))
    assert status == 422 and "$.intent" in error
    for change, place in (
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"workers_per_node": 10**15}, "workers_per_node"),
        ({"workers_per_node": (1 << 18) + 1}, "workers_per_node"),
        ({"nodes": ["n"] * ((1 << 16) + 1)}, "nodes"),
        ({"paths": ["/x"] * 1001}, "paths"),
        ({"pids": {"1": 1 << 70}}, "pids"),
        ({"key": {**good["inquiry"]["key"], "cycle": 1 << 70}}, "key"),
    ):
        status, error = await _post(client, json.dumps({**good, "inquiry": {**good["inquiry"], **change}}).encode())
        assert status == 422 and error.endswith(f"`$.inquiry.{place}`")
    assert (await _post(client, msgspec.json.encode(good), {"Content-Type": "text/plain"}))[0] == 415


async def test_unknown_keys(fleet: Fleet) -> None:
    """Unknown keys are accepted, since two versions may meet, and the reply names them."""
    client = fleet.start()
    inquiry = msgspec.to_builtins(fleet.inquiry("STOP"))
    inquiry |= {"started": 3, "key": {**inquiry["key"], "cycel": 1}}
    body = msgspec.json.encode({"inquiry": inquiry, "intent": "terminal", "setled": True})
    answer = (await client.post("/v1/inquiries", content=body, headers=JSON)).json()
    assert sorted(answer["ignored"]) == ["inquiry.key.cycel", "inquiry.started", "setled"]


async def test_long_body(fleet: Fleet) -> None:
    """A body over the bound is refused, whether or not it announces its length."""
    client = fleet.start()

    async def parts() -> object:  # chunked
        for _ in range(BODY_AT_MOST_BYTES // 1024 + 2):
            yield b" " * 1024

    assert (await _post(client, b" " * (BODY_AT_MOST_BYTES + 1)))[0] == 413
    answer = await client.post("/v1/inquiries", content=parts(), headers=JSON)  # type: ignore[arg-type]
    assert answer.status_code == 413


async def test_outside(fleet: Fleet, tmp_path: Path) -> None:
    """A path that leads out of the roots is refused, by `..`, by a symlink, or directly, and for earlier cycles
    too."""
    client = fleet.start()
    (tmp_path / "secret").write_text("STOP")
    (fleet.logs / "link").symlink_to(tmp_path / "secret")
    inquiry = fleet.inquiry("STOP")
    outside = ("/etc/passwd", f"{fleet.logs}/../secret", f"{fleet.logs}/link", "logs", "", f"{fleet.logs}\0")
    for path in outside:
        for asked in ({"paths": [path]}, {"earlier": [path]}):
            refused = await ask(client, {**msgspec.to_builtins(inquiry), **asked})
            assert refused.status_code == 403, path
    assert (await client.get("/v1/stats")).json()["analyses"] == 0


@pytest.mark.parametrize("query", ["wait=-1", "wait=x", "wait=nan", "wait=inf", "after=-1", "after=1.5"])
async def test_bad_query(fleet: Fleet, query: str) -> None:
    """An invalid wait or revision is refused."""
    client = fleet.start()
    answer = (await ask(client, fleet.inquiry("STOP"))).json()
    assert (await client.get(f"/v1/inquiries/{answer['id']}?{query}")).status_code == 422


async def test_unknown(fleet: Fleet) -> None:
    """An unknown path and an unknown method are answered in the same form as all other errors."""
    client = fleet.start()
    for path in ("/", "/v1", "/v1/inquiries/0", "/v1/inquiries/../stats/x"):
        missing = await client.get(path)
        assert (missing.status_code, list(missing.json())) == (404, ["error"])
    refused = await client.delete("/v1/stats")
    assert refused.status_code == 405 and "GET" in refused.headers["Allow"] and list(refused.json()) == ["error"]


async def test_access_log(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """The access log has one line for each request, with neither a token nor a query nor a line break in it."""
    client = fleet.start(token=TOKEN)
    caplog.set_level("INFO", "nvrx.attrsvc.access")
    await client.get("/v1/stats?token=hunter2", headers={"Authorization": f"Bearer {TOKEN}"})
    await client.get("/a%0Ab")
    stats, strange = caplog.messages
    assert "GET /v1/stats 200" in stats and "GET /a%0Ab 401" in strange
    assert "hunter2" not in caplog.text and TOKEN not in caplog.text and "\n" not in strange


async def test_metrics(fleet: Fleet) -> None:
    """Prometheus sees requests by route and status, analyses by verdict, and inquiries by state."""
    client = fleet.start()
    await ask(client, fleet.inquiry("STOP"))
    metrics = await client.get("/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in (
        'nvrx_attrsvc_requests_total{method="POST",route="/v1/inquiries",status="200"} 1.0',
        'nvrx_attrsvc_analyses_total{outcome="STOP"} 1.0',
        'nvrx_attrsvc_inquiries{state="done"} 1.0',
        "nvrx_attrsvc_analysis_seconds_count 1.0",
    ):
        assert line in metrics.text.splitlines()
