"""How HTTP replies and the places of services are interpreted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.attribution.http_client import HttpClient, HttpReply, RetryableError
from nvrx_slurm.attribution.sources.service import (
    MANAGED_NAME,
    ServiceEndpoint,
    ServiceInquiry,
    fixed_endpoint,
    managed_endpoint,
    problem_of,
)
from nvrx_slurm.errors import ConfigError, SourceError
from nvrx_slurm.jobspec import env
from tests.still_clock import StillClock
from tests.unit.attribution.sources.scripted import inquiry_of, key_of, said

NOW = 1_800_000_000.0  # Fri, 15 Jan 2027 08:00:00 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("", None),
        ("٣", None),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    """Retry-After has seconds or an HTTP date; a past date means now, and any other text is ignored."""
    assert HttpReply(429, {"retry-after": value}, b"").retry_after_s(NOW) == seconds


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (
            HttpReply(401, {}, b'{"error": "a bearer token is required"}'),
            "401: a bearer token is required: its",
        ),
        (HttpReply(404, {}, b"<h1>Not Found</h1>"), "404: <h1>Not Found</h1>: no attribution service answers"),
        (HttpReply(500, {}, b'{"error": 3}'), '500: {"error": 3}'),
        (HttpReply(502, {}, b"\xff" * 9000), "502: \ufffd"),
        (
            HttpReply(302, {"location": "https://elsewhere/"}, b""),
            "redirects to https://elsewhere/: give that URL itself",
        ),
        (HttpReply(500, {}, b"[1]"), "500: [1]"),
    ],
)
def test_a_problem_is_one_short_sentence(reply: HttpReply, says: str) -> None:
    """It has the status, the service's own message within bounds, and what to do about it."""
    assert says in problem_of(reply)
    assert len(problem_of(reply)) < 600


def test_a_token_comes_from_its_file_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file wins over the environment, and is read again at each request."""
    monkeypatch.setenv(env.ATTRSVC_TOKEN, "from-environment")
    file = tmp_path / "token"
    file.write_text("first\n")
    file.chmod(0o600)
    locate = fixed_endpoint("https://x/", str(file))
    assert locate() == ServiceEndpoint(url="https://x", token="first")
    file.write_text("second\n")
    assert locate().token == "second"
    assert fixed_endpoint("https://x", None)().token == "from-environment"


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The message says what to do, and never shows the file's content."""
    file = tmp_path / "token"
    file.write_text("s3cret")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        fixed_endpoint("https://x", str(file))()
    assert "s3cret" not in str(caught.value)


def test_a_place_does_not_show_its_token() -> None:
    """An endpoint may be logged; its token may not."""
    assert "s3cret" not in repr(ServiceEndpoint(url="https://x", token="s3cret"))


def test_the_jobs_own_service_may_move(tmp_path: Path) -> None:
    """The address is read at each request; before the service has started, the error is retryable."""
    locate = managed_endpoint(tmp_path)
    with pytest.raises(RetryableError):
        locate()
    for port in (1, 2):
        (tmp_path / MANAGED_NAME).write_text(f'{{"url": "http://127.0.0.1:{port}", "token": "t"}}')
        assert locate() == ServiceEndpoint(url=f"http://127.0.0.1:{port}", token="t")
    (tmp_path / MANAGED_NAME).write_text("{")
    with pytest.raises(SourceError) as caught:
        locate()
    assert not isinstance(caught.value, RetryableError)


class RecordedClient(HttpClient):
    """Keeps the headers of each request. The first reply is 503, the second one an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, str]] = []

    async def send(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        connect_s: float,
        read_s: float,
        total_s: float | None = None,
    ) -> HttpReply:
        self.sent.append(dict(headers or {}))
        if len(self.sent) == 1:
            return HttpReply(503, {"retry-after": "0"}, b"")
        answer = {"key": str(key_of()), "state": "done", "attribution": msgspec.to_builtins(said())}
        return HttpReply(200, {}, msgspec.json.encode(answer))


async def test_a_token_is_sent_to_its_own_endpoint_alone() -> None:
    """A retry at an endpoint without a token carries none."""
    endpoints = iter([ServiceEndpoint(url="http://a", token="s3cret"), ServiceEndpoint(url="http://b")])
    http, clock = RecordedClient(), StillClock(NOW)
    asked = ServiceInquiry(http, lambda: next(endpoints), inquiry_of(), clock, NOW + 60.0, 1.0, waits_for_start=False)
    assert (await asked.follow("terminal")).is_final
    assert [each.get("Authorization") for each in http.sent] == ["Bearer s3cret", None]
    assert {each["Content-Type"] for each in http.sent} == {"application/json"}
