"""The process: listens, serves until a signal ends it, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from nvrx_slurm.attribution.local_service import announced
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.service import app, storage
from nvrx_slurm.attribution.service.auth import RateLimit, protocol_of, token_check
from nvrx_slurm.attribution.service.confinement import Roots, existing, has_landlock
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.service import AttributionService
from nvrx_slurm.attribution.service.settings import BindAddress, ServiceSettings
from nvrx_slurm.attribution.service.storage import StateFolder
from nvrx_slurm.attribution.service.workers import AnalysisWorker, WorkerSetup
from nvrx_slurm.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from nvrx_slurm.util.admission import MOST_UNPROVEN, RateLimitedLog
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import die_with, raise_descriptor_limit

log = get_logger("attrsvc")


def run(settings: ServiceSettings, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; `say` gets one line as soon as it listens. Returns the exit code.

    Raises UsageError.
    """
    if settings.managed:
        die_with(os.getppid(), signal.SIGKILL)
    raise_descriptor_limit()
    roots = existing(settings.roots)
    if not has_landlock():
        log.warning("this kernel has no Landlock: workers check only the log files, after opening them")
    load_catalogue(settings.rules)  # so that a mistake in them is reported now, not at the first failure
    with contextlib.ExitStack() as stack:
        kept = where = None
        if settings.state_dir is not None:
            kept = stack.enter_context(storage.opened(settings.state_dir, SystemClock()))
        listener = stack.enter_context(listening(settings.bind))
        if settings.makes_token:
            # After `listening`: while this process holds the port, no process of another user gets the token there.
            token = new_secret()
            where = stack.enter_context(announced(settings.bind.host, listener.getsockname()[1], token))
            settings = replace(settings, token=token)
        return asyncio.run(ServiceRun(settings, roots, kept, listener, where).serve(say))


class ServiceRun:
    """One run of the server."""

    def __init__(
        self,
        settings: ServiceSettings,
        roots: Roots,
        kept: StateFolder | None,
        listener: socket.socket,
        token_path: Path | None = None,
    ) -> None:
        self._settings, self._roots, self._listener, self._token_path = settings, roots, listener, token_path
        clock, metrics = SystemClock(), Metrics()
        setup = WorkerSetup(
            roots=tuple(map(str, roots.paths)),
            rules=tuple(str(path.absolute()) for path in settings.rules),
            memory_bytes=settings.worker_memory_bytes,
        )
        workers = [AnalysisWorker(setup, timeout_s=settings.timeout_s, clock=clock) for _ in range(settings.workers)]
        self._service = AttributionService(
            roots, workers, clock=clock, metrics=metrics, results=kept, bounds=settings.bounds
        )
        self._app = app.build(
            self._service,
            metrics,
            clock=clock,
            token=settings.token,
            limit=RateLimit(settings.requests_per_s, max(1, int(4 * settings.requests_per_s))),
            longest_wait_s=settings.longest_wait_s,
        )
        self._server = HttpServer(configuration(self._app, settings))

    async def serve(self, say: Callable[[str], None]) -> int:
        """Serve until a signal; then drain. Returns the exit code. Raises UsageError for what cannot be started."""
        settings, server, loop = self._settings, self._server, asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        # Before the server starts: a signal that came first would end this process without a drain.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)

        def server_ended(_: object) -> None:
            # By itself, so something is wrong; or by `should_exit` below, when nothing waits for this any more.
            server.listens.set()
            signals.put_nowait(signal.SIGTERM)

        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        serving.add_done_callback(server_ended)
        try:
            try:
                self._service.start()
            except OSError as error:
                raise UsageError(f"--state-dir {settings.state_dir}: cannot be read: {error}") from None
            await server.listens.wait()
            port = int(self._listener.getsockname()[1])
            if settings.port_file is not None:
                try:
                    write_private(settings.port_file, f"{port}\n".encode())
                except OSError as error:
                    message = f"--port-file {settings.port_file}: cannot be written: {error.strerror}"
                    raise UsageError(message) from None
            say(self._greeting(port))
            return await self._drain(signals)
        finally:
            # In this order: waiting requests get their answers before the server closes their connections.
            await self._service.close()
            server.should_exit = True
            await serving

    async def _drain(self, signals: asyncio.Queue[signal.Signals]) -> int:
        """Wait for a signal, then drain; end at once when SIGINT follows: Ctrl-C twice, or once after SIGTERM."""
        first = await signals.get()
        log.info("%s: finishing what runs, for up to %g s", first.name, self._settings.drain_s)

        async def interrupt() -> None:
            while await signals.get() is not signal.SIGINT:
                pass

        draining = asyncio.create_task(self._service.drain(self._settings.drain_s))
        interrupted = asyncio.create_task(interrupt())
        await asyncio.wait([draining, interrupted], return_when=asyncio.FIRST_COMPLETED)
        at_once = interrupted.done()
        interrupted.cancel()
        draining.cancel()
        if at_once:
            self._server.force_exit = True
        elif draining.done() and not draining.result():
            kept = "; it is taken up again at the next start" if self._settings.state_dir is not None else ""
            log.warning("not everything was finished in time%s", kept)
        return EXIT_INTERRUPTED if at_once else EXIT_DONE

    def _greeting(self, port: int) -> str:
        settings = self._settings
        host = f"[{settings.bind.host}]" if ":" in settings.bind.host else settings.bind.host
        url = f"{'https' if settings.tls_cert else 'http'}://{host}:{port}"
        auth = "bearer token required" if settings.token else "no token: every user of this machine may ask"
        if self._token_path is not None:
            auth += f", which your own tools find in {self._token_path}"
        return f"nvrx-slurm attrsvc: {url}: reads below {', '.join(map(str, self._roots.paths))}; {auth}"


CONNECTIONS_END_S = 3
KEEP_ALIVE_S = 75
BACKLOG = 1024
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@contextlib.contextmanager
def listening(bind: BindAddress) -> Iterator[socket.socket]:
    """A socket that listens there. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--bind {bind.host}:{bind.port}: {error.strerror or error}") from None
    except UnicodeError as error:  # of a label that is empty, or too long
        raise UsageError(f"--bind {bind.host}:{bind.port}: is no name of a host: {error}") from None
    with listener:
        # Connections of the service before, in TIME_WAIT, would keep this one from its port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            hint = "; name another port, or 0 for any" if error.errno == errno.EADDRINUSE else ""
            raise UsageError(f"--bind {bind.host}:{bind.port}: {error.strerror}{hint}") from None
        yield listener


def configuration(app: Starlette, settings: ServiceSettings) -> uvicorn.Config:
    """Raises UsageError for a certificate or key that is none."""
    try:
        found = uvicorn.Config(
            app,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            http=protocol_of(token_check(settings.token)),
            backlog=MOST_UNPROVEN,  # asyncio accepts so many before any of them is counted
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,  # the log of AuthMiddleware leaves queries out
            server_header=False,
            proxy_headers=False,  # a client could choose any name, and so get around its limit
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CONNECTIONS_END_S,
        )
        # Now, where the error can name the options: `Server.serve` would load the certificate later.
        found.load()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert {settings.tls_cert}, --tls-key {settings.tls_key}: {error}") from None
    return found


class HttpServer(uvicorn.Server):
    """Leaves signals to `ServiceRun`; `listens` is set once it accepts connections."""

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
        """asyncio logs each accept(2) that finds no descriptor left with a traceback, and tries again."""
        if isinstance(error := context.get("exception"), OSError) and error.errno in _EXHAUSTED:
            self._exhausted.say(f"no connection can be accepted: {error.strerror}", loop.time())
        else:
            loop.default_exception_handler(context)
