"""The HTTP client of attribution: sources, receivers and the language model use it. One request, bounded, one reply.

No redirect is followed: a token is for the configured host alone. httpx2 is imported with the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import ModuleType
from typing import TYPE_CHECKING

from nvrx_slurm.attribution.local_service import check_listener
from nvrx_slurm.errors import ConfigError, DeliveryError, SourceError, UsageError
from nvrx_slurm.util.secret_file import secret_in

if TYPE_CHECKING:
    import httpx2

LONGEST_REPLY_BYTES = 1 << 20
LONGEST_TOKEN = 8192
MOST_CONNECTIONS = 16
WRITE_S = 5.0


class RetryableError(SourceError, DeliveryError):
    """No connection, no reply in time, or one that asks to come back: the same request may succeed later.

    `after_s`: the pause that the other side asked for.
    """

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class PermanentError(SourceError, DeliveryError):
    """The same request will fail until a person changes something."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole reply. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def retry_after_s(self, now: float) -> float | None:
        """The pause that the reply asks for (RFC 9110, 10.2.3); `now`: seconds since the epoch. None: none valid."""
        value = self.headers.get("retry-after", "").strip()
        # `isdigit` also holds for digits such as "²", which float() refuses.
        if value.isascii() and value.isdigit():
            return float(value)
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - now)
        except (ValueError, OverflowError):
            return None


class HttpClient:
    """Connections that are kept for the next request; made when first needed.

    `proxies`: whether HTTP_PROXY and the like apply. `own_listener`: at a loopback URL, refuse a process of another
    user, for it would get the token.
    """

    def __init__(self, *, proxies: bool = True, own_listener: bool = False) -> None:
        self._proxies, self._own_listener = proxies, own_listener
        self._starting: asyncio.Future[httpx2.AsyncClient] | None = None

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
        """Send one request. `read_s` bounds each silence of the other side, `total_s` everything after the start.

        Raises RetryableError, PermanentError, and UsageError where httpx2 is not installed.
        """
        if self._own_listener:
            # At each request: another user's process may have taken the port since the last one.
            await asyncio.to_thread(check_listener, url)
        client = await self._client()
        import httpx2

        try:
            async with asyncio.timeout(total_s):
                # Uncompressed, so that the checked size is the size that arrives. Some proxies compress anyway.
                sent = {"Accept-Encoding": "identity", **(headers or {})}
                request = client.build_request(method, url, content=body, headers=sent)
                timeout = httpx2.Timeout(connect=connect_s, read=read_s, write=WRITE_S, pool=read_s)
                request.extensions["timeout"] = timeout.as_dict()
                async with contextlib.aclosing(await client.send(request, stream=True)) as reply:
                    found = bytearray()
                    async for part in reply.aiter_raw():
                        found += part
                        if len(found) > LONGEST_REPLY_BYTES:
                            raise PermanentError(f"{url}: the reply is longer than {LONGEST_REPLY_BYTES >> 20} MiB")
                    coding = reply.headers.get("content-encoding", "identity").strip().lower()
                    body = bytes(found) if coding == "identity" or not found else _unpacked(bytes(found), coding, url)
                    return HttpReply(reply.status_code, reply.headers, body)
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, UnicodeError) as error:
            raise PermanentError(f"{url}: {error}") from None
        except TimeoutError:
            raise RetryableError(f"{url}: no reply within {total_s:g} s") from None
        except (httpx2.TransportError, OSError) as error:
            raise RetryableError(f"{url}: {str(error) or 'no reply'} ({type(error).__name__})") from None

    async def open(self) -> None:
        """Import httpx2 and load the certificates now. Raises UsageError, and PermanentError where the environment
        names a proxy or certificates that cannot be used."""
        await self._client()

    async def close(self) -> None:
        starting, self._starting = self._starting, None
        # One that is still starting has opened no connection yet.
        if starting is not None and starting.done() and not starting.exception():
            await starting.result().aclose()

    async def _client(self) -> httpx2.AsyncClient:
        def start() -> httpx2.AsyncClient:
            need("httpx2")
            import httpx2

            limits = httpx2.Limits(max_connections=MOST_CONNECTIONS)
            try:
                return httpx2.AsyncClient(limits=limits, follow_redirects=False, trust_env=self._proxies)
            # ImportError for socks5:// without `socksio`, ValueError or InvalidURL for what is no proxy, OSError for
            # certificates that are not there.
            except Exception as error:
                names = "ALL_PROXY, HTTP_PROXY, HTTPS_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
                raise PermanentError(f"no HTTP client can be made ({error}): check {names}") from None

        # Made once, in a thread: the import and the certificates take a while. A start that failed is repeated.
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.ensure_future(asyncio.to_thread(start))
        # Shielded: a request that is cancelled must not end the start that others wait for.
        return await asyncio.shield(self._starting)


def _unpacked(body: bytes, coding: str, url: str) -> bytes:
    """A reply without the coding that the server chose though none was asked for. Raises PermanentError."""
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise PermanentError(
            f"{url}: the reply is encoded as {coding[:40]!r}, which was not asked for and is not read"
        )
    # Not by httpx2's own decoder: it would unpack a bomb whole before its size can be checked.
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: with gzip's header or zlib's (RFC 9110, 8.4.1)
    try:
        plain = unpack.decompress(body, LONGEST_REPLY_BYTES + 1)
    except zlib.error as error:
        raise PermanentError(f"{url}: the reply is not {coding}, as its header says: {error}") from None
    if len(plain) > LONGEST_REPLY_BYTES:
        raise PermanentError(f"{url}: the reply is longer than {LONGEST_REPLY_BYTES >> 20} MiB")
    if not unpack.eof:
        raise RetryableError(f"{url}: the reply ended before its {coding} data did")
    return plain


def need(module: str) -> ModuleType:
    """A module of the extra `attribution`. Raises UsageError that says how to install it.

    Call it in a thread: the import takes a good part of a second.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(f"{package} is needed: pip install 'nvrx-slurm[attribution]' ({error})") from None


def token_of(file: str | None, variable: str | None, *, key: str) -> str | None:
    """The token in `file`, or else in the variable's value; None where neither is given. It is never in argv or logs.

    `key` is the configuration key that names the file. Raises ConfigError where the file cannot be read, where others
    can read it, and where it holds no token; the message never holds what the file does.
    """
    if file is None and not variable:
        return None
    token = (secret_in(file, key=key) if file is not None else variable or "").strip()
    if not token or not token.isascii() or not token.isprintable() or len(token) > LONGEST_TOKEN:
        raise ConfigError(
            "holds no token: it must be one line of printable ASCII", file=file or "environment", key=key
        )
    return token
