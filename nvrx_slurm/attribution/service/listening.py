"""The socket and what speaks HTTP on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from nvrx_slurm.attribution.service.gate import brings
from nvrx_slurm.attribution.service.impatience import impatient
from nvrx_slurm.attribution.service.settings import Address, Settings
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.admission import MOST_UNPROVEN, RateLimitedLog
from nvrx_slurm.util.log import get_logger

CONNECTIONS_END_S = 3
KEEP_ALIVE_S = 75
BACKLOG = 1024
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = get_logger("attrsvc")


@contextlib.contextmanager
def listening(bind: Address) -> Iterator[socket.socket]:
    """A socket that listens there. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--bind {bind.host}:{bind.port}: {error.strerror or error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            hint = "; name another port, or 0 for any" if error.errno == errno.EADDRINUSE else ""
            raise UsageError(f"--bind {bind.host}:{bind.port}: {error.strerror}{hint}") from None
        yield listener


def configuration(app: Starlette, settings: Settings) -> uvicorn.Config:
    """Raises UsageError for a certificate or key that is none."""
    try:
        found = uvicorn.Config(
            app,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            http=impatient(brings(settings.token)),
            backlog=MOST_UNPROVEN,  # asyncio accepts so many before any of them is counted
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,  # the gate's own leaves queries out
            server_header=False,
            proxy_headers=False,  # a client could call itself whatever it likes, and so get around its limit
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CONNECTIONS_END_S,
        )
        found.load()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert {settings.tls_cert}, --tls-key {settings.tls_key}: {error}") from None
    return found


class Server(uvicorn.Server):
    """Leaves signals to us, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self._exhausted = RateLimitedLog(log.error)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._not_accepted)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # uvicorn has made the kernel's queue as short as its own
        self.listens.set()

    def _not_accepted(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio tells of each accept(2) that finds no descriptor left with a traceback, and tries again."""
        if isinstance(error := context.get("exception"), OSError) and error.errno in _EXHAUSTED:
            self._exhausted.say(f"no connection can be accepted: {error.strerror}", loop.time())
        else:
            loop.default_exception_handler(context)
