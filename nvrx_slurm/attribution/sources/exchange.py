"""One HTTP request and its reply, bounded in time and size; on connections that are kept for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvrx_slurm.attribution.local_service import check_listener
from nvrx_slurm.attribution.sources.answers import MOST_BYTES
from nvrx_slurm.attribution.sources.base import Unanswered, need
from nvrx_slurm.attribution.sources.places import Place
from nvrx_slurm.errors import SourceError

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 5.0
WRITE_S = 5.0
MOST_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """An HTTP client that is made when it is first needed.

    `proxies`: whether HTTP_PROXY and its like of the environment count.
    """

    def __init__(self, *, proxies: bool = True) -> None:
        self._proxies = proxies
        self._starting: asyncio.Future[httpx2.AsyncClient] | None = None

    async def send(
        self, place: Place, method: str, path: str, *, body: bytes | None = None, prefer_s: int = 0, read_s: float
    ) -> Reply:
        """Send one request; `read_s` bounds each silence of the service. Raises Unanswered, SourceError."""
        await asyncio.to_thread(check_listener, place.url)
        client = await self._client()
        import httpx2

        url = place.url + path
        try:
            request = client.build_request(method, url, content=body, headers=_headers(place, body, prefer_s))
            request.extensions["timeout"] = httpx2.Timeout(
                connect=CONNECT_S, read=read_s, write=WRITE_S, pool=read_s
            ).as_dict()
            reply = await client.send(request, stream=True)
            try:
                return Reply(reply.status_code, reply.headers, await _body(reply, url))
            finally:
                await reply.aclose()
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as error:
            raise SourceError(f"{url}: {error}") from None
        except httpx2.TransportError as error:
            raise Unanswered(f"{url}: {str(error) or 'no reply'} ({type(error).__name__})") from None

    async def open(self) -> None:
        await self._client()

    async def close(self) -> None:
        if self._starting is not None and self._starting.done() and not self._starting.exception():
            await self._starting.result().aclose()

    async def _client(self) -> httpx2.AsyncClient:
        """Made once, in a thread: the import and the certificates take a while. One that failed is made anew."""
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        return await asyncio.shield(self._starting)

    def _start(self) -> httpx2.AsyncClient:
        need("httpx2")
        import httpx2

        limits = httpx2.Limits(max_connections=MOST_CONNECTIONS)
        return httpx2.AsyncClient(limits=limits, follow_redirects=False, trust_env=self._proxies)


def _headers(place: Place, body: bytes | None, prefer_s: int) -> dict[str, str]:
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}  # so that its size is what arrives
    if body is not None:
        headers["Content-Type"] = "application/json"
    if prefer_s:
        headers["Prefer"] = f"wait={prefer_s}"
    if place.token is not None:
        headers["Authorization"] = f"Bearer {place.token}"
    return headers


async def _body(reply: httpx2.Response, url: str) -> bytes:
    found = bytearray()
    async for part in reply.aiter_raw():
        found += part
        if len(found) > MOST_BYTES:
            raise SourceError(f"{url}: the answer is longer than {MOST_BYTES} bytes")
    return bytes(found)
