"""The process: listens, serves until it is told to end, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nvrx_slurm.attribution.local_service import announced
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.service import app, results
from nvrx_slurm.attribution.service.confinement import Roots, existing
from nvrx_slurm.attribution.service.jobs import Setup
from nvrx_slurm.attribution.service.limits import RateLimit
from nvrx_slurm.attribution.service.listening import Server, configuration, listening
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.results import Results
from nvrx_slurm.attribution.service.service import Service
from nvrx_slurm.attribution.service.settings import Settings
from nvrx_slurm.attribution.service.workers import Worker
from nvrx_slurm.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import die_with, raise_descriptor_limit

log = get_logger("attrsvc")


def run(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; `say` gets one line as soon as it listens. Returns the exit code.

    Raises UsageError.
    """
    if settings.managed:
        die_with(os.getppid(), signal.SIGKILL)
    raise_descriptor_limit()
    roots = existing(settings.roots)
    load_catalogue(settings.rules)  # a mistake in them is told here, not at the first failure
    with contextlib.ExitStack() as stack:
        kept = where = None
        if settings.state_dir is not None:
            kept = stack.enter_context(results.opened(settings.state_dir, SystemClock()))
        listener = stack.enter_context(listening(settings.bind))
        if settings.makes_token:
            token = new_secret()
            where = stack.enter_context(announced(settings.bind.host, listener.getsockname()[1], token))
            settings = replace(settings, token=token)
        return asyncio.run(Serving(settings, roots, kept, listener, where).serve(say))


class Serving:
    """One run of the server."""

    def __init__(
        self,
        settings: Settings,
        roots: Roots,
        kept: Results | None,
        listener: socket.socket,
        token_path: Path | None = None,
    ) -> None:
        self._settings, self._roots, self._listener, self._token_path = settings, roots, listener, token_path
        clock, metrics = SystemClock(), Metrics()
        setup = Setup(
            roots=tuple(map(str, roots.paths)),
            rules=tuple(str(path.absolute()) for path in settings.rules),
            memory_bytes=settings.worker_memory_bytes,
        )
        workers = [Worker(setup, timeout_s=settings.timeout_s, clock=clock) for _ in range(settings.workers)]
        self._service = Service(roots, workers, clock=clock, metrics=metrics, results=kept, bounds=settings.bounds)
        self._app = app.build(
            self._service,
            metrics,
            clock=clock,
            token=settings.token,
            limit=RateLimit(settings.requests_per_s, max(1, int(4 * settings.requests_per_s))),
            longest_wait_s=settings.longest_wait_s,
        )
        self._server = Server(configuration(self._app, settings))
        self._told: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def serve(self, say: Callable[[str], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told.put_nowait, number)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        serving.add_done_callback(self._server_ended)
        try:
            await self._started()
            say(self._greeting())
            return await self._until_told()
        finally:
            await self._service.close()
            self._server.should_exit = True
            await serving

    async def _started(self) -> None:
        try:
            self._service.start()
        except OSError as error:
            raise UsageError(f"--state-dir {self._settings.state_dir}: cannot be read: {error}") from None
        await self._server.listens.wait()
        if self._settings.port_file is not None:
            _write_port(self._settings.port_file, self._port)

    async def _until_told(self) -> int:
        """Drain when told to end; end at once when an interrupt comes on top."""
        first = await self._told.get()
        log.info("%s: finishing what runs, for up to %g s", first.name, self._settings.drain_s)
        draining = asyncio.create_task(self._service.drain(self._settings.drain_s))
        interrupted = asyncio.create_task(self._interrupted())
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

    def _server_ended(self, _: asyncio.Task[None]) -> None:
        """Of itself, so something is wrong; or because it was told to, and nobody waits for this any more."""
        self._server.listens.set()
        self._told.put_nowait(signal.SIGTERM)

    async def _interrupted(self) -> None:
        """Ctrl-C twice, or once after SIGTERM."""
        while await self._told.get() is not signal.SIGINT:
            pass

    @property
    def _port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _greeting(self) -> str:
        settings = self._settings
        host = f"[{settings.bind.host}]" if ":" in settings.bind.host else settings.bind.host
        url = f"{'https' if settings.tls_cert else 'http'}://{host}:{self._port}"
        auth = "bearer token required" if settings.token else "no token: every user of this machine may ask"
        if self._token_path is not None:
            auth += f", which your own tools find in {self._token_path}"
        return f"nvrx-slurm attrsvc: {url}: reads below {', '.join(map(str, self._roots.paths))}; {auth}"


def _write_port(file: Path, port: int) -> None:
    try:
        write_private(file, f"{port}\n".encode())
    except OSError as error:
        raise UsageError(f"--port-file {file}: cannot be written: {error.strerror}") from None
