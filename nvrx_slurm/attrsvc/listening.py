"""The socket and what speaks HTTP on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from nvrx_slurm.attrsvc.impatience import Impatient
from nvrx_slurm.attrsvc.settings import Address, Settings
from nvrx_slurm.errors import UsageError

CONNECTIONS_END_S = 3
KEEP_ALIVE_S = 75
BACKLOG = 1024


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
            http=Impatient,
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()
