"""One HTTP request, bounded in time and in what is read of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from nvrx_slurm.attribution.notify.receiver import Later, Patience, Refused
from nvrx_slurm.util.clock import Clock

LARGEST_ANSWER_BYTES = 1 << 20
_TRY_AGAIN = (408, 425, 429)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes


class Http:
    """Connections to one receiver, which `who` names in messages."""

    def __init__(self, who: str, *, patience: Patience, clock: Clock) -> None:
        self._who, self._patience, self._clock = who, patience, clock
        self._client: Any = None  # httpx2 is loaded when there is something to tell

    async def send(
        self, method: str, url: str, *, content: bytes, content_type: str, authorization: str | None
    ) -> Answer:
        """The answer, if it is about what was sent. Raises Later (no connection, no answer in time, 408, 425, 429,
        5xx; with their Retry-After) and Refused (a URL that is none; a redirect: nobody else gets the token)."""
        headers = {"Content-Type": content_type} | ({"Authorization": authorization} if authorization else {})
        httpx2 = self._library()
        try:
            async with asyncio.timeout(self._patience.connect_s + self._patience.answer_s):
                answer, retry_after = await self._exchange(method, url, content, headers)
        except (TimeoutError, httpx2.TimeoutException):
            raise Later(f"{self._who} does not answer in time") from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as error:
            raise Refused(f"{self._who} cannot be asked ({error})") from None
        except (httpx2.TransportError, OSError) as error:
            raise Later(f"{self._who} does not answer ({error or type(error).__name__})") from None
        if answer.status >= 500 or answer.status in _TRY_AGAIN:
            raise Later(f"{self._who} says {answer.status}", self._seconds(retry_after))
        if 300 <= answer.status < 400:
            raise Refused(f"{self._who} redirects ({answer.status}), which is not followed: set the URL it leads to")
        return answer

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def _exchange(
        self, method: str, url: str, content: bytes, headers: Mapping[str, str]
    ) -> tuple[Answer, str | None]:
        async with self._client.stream(method, url, content=content, headers=headers) as response:
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > LARGEST_ANSWER_BYTES:
                    raise Later(f"{self._who} answers with more than {LARGEST_ANSWER_BYTES} bytes")
            return Answer(response.status_code, body), response.headers.get("Retry-After")

    def _library(self) -> Any:
        try:
            import httpx2
        except ImportError:
            raise Refused("the HTTP client is not installed: pip install 'nvrx-slurm[attribution]'") from None
        if self._client is None:
            timeout = httpx2.Timeout(self._patience.answer_s, connect=self._patience.connect_s)
            self._client = httpx2.AsyncClient(timeout=timeout)
        return httpx2

    def _seconds(self, retry_after: str | None) -> float | None:
        """Of a `Retry-After`: seconds, or a date (RFC 9110, 10.2.3). What is neither says nothing."""
        if retry_after is None:
            return None
        try:
            return float(int(retry_after))
        except ValueError:
            pass
        try:
            return max(0.0, parsedate_to_datetime(retry_after).timestamp() - self._clock.wall())
        except ValueError:
            return None
