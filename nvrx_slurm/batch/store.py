"""Keeps the job's embedded store going, and `store.json` in step with it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from pathlib import Path

from nvrx_slurm.batch.children import restart_pause_s
from nvrx_slurm.errors import NvrxError, StoreUnreachable
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder, JobInfo, StoreAddress
from nvrx_slurm.store.embedded import (
    READY_S,
    Certificate,
    EmbeddedStore,
    kill_server,
    make_certificate,
    new_socket_name,
)
from nvrx_slurm.store.servers import ServerBinary, find_server
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent

log = get_logger("batch")

# So many failures in a row. A job of weeks may lose its store now and then: one that lived this long is no failure.
STORE_RESTARTS, STABLE_S = 20, 60.0
# Tries of one start: the server may be killed once more while it loads its data, and a node be short of processes.
STORE_STARTS = 5
ANNOUNCE_RETRY_S = 0.25


class StoreKeeper:
    """One job's store. Each start of the server has a new port (or socket), a new password and a new mark.

    A client that still knows the old ones sends its password to the process that has taken the old port; with that
    password a process can log in nowhere. Clients find the new ones in `store.json`.
    """

    def __init__(self, folder: JobFolder, info: JobInfo, *, asked: str, job: str, token: str) -> None:
        self._folder, self._info = folder, info
        self._asked, self._job, self._token = asked, job, token
        self._server: ServerBinary | None = None
        self._socket: Path | None = None
        self._certificate: Certificate | None = None
        self.process: Process | None = None

    async def start(self) -> None:
        """Choose a server and how it listens, start it, and write `store.json`.

        Raises ConfigError, MissingProgramError, StoreUnreachable.
        """
        is_on_one_host = self._info.addr == LOOPBACK
        # In a thread: the binaries on PATH are asked what they are.
        self._server = await asyncio.to_thread(find_server, self._asked, with_tls=not is_on_one_host)
        self._folder.store_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.store_dir.chmod(0o700)
        if not is_on_one_host and self._server.has_tls:
            made = await asyncio.to_thread(make_certificate, self._folder.store_dir)
            if isinstance(made, Certificate):
                self._certificate = made
            else:
                log.warning("the store goes without TLS: %s", made)
        elif not is_on_one_host:
            log.info("the store goes without TLS, which %s does not have", self._server)
        await self._start_server()

    async def keep(self) -> None:
        """Start it again whenever it ends. Raises StoreUnreachable where that fails, or happens too often."""
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            assert self.process is not None
            began = loop.time()
            code = await self.process.wait()
            failures = 0 if loop.time() - began > STABLE_S else failures + 1
            if failures > STORE_RESTARTS:
                server_log = self._folder.store_dir / "server.log"
                raise StoreUnreachable(f"the embedded store ended {failures} times in a row; see {server_log}")
            pause = restart_pause_s(failures)
            log.warning("the store ended (%s); starting it again in %.1f s", code, pause)
            await asyncio.sleep(pause)
            for failed in range(1, STORE_STARTS + 1):
                try:
                    await self._start_server()
                    break
                except (NvrxError, OSError, RuntimeError) as error:  # killed once more, or no process can be started
                    if failed == STORE_STARTS:
                        raise
                    log.warning("the store did not start: %s; trying again in %.1f s", error, restart_pause_s(failed))
                    await asyncio.sleep(restart_pause_s(failed))

    def clear_away(self) -> None:
        """Remove its files, once it has ended."""
        self._folder.remove_tree(self._folder.store_dir.name)

    async def _start_server(self) -> None:
        assert self._server is not None
        password, name = new_secret(), None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.unlink()
        if self._info.addr == LOOPBACK:
            # A new name each time: a client with the old password must not find the new server, which refuses it.
            name = new_socket_name(self._folder.store_dir)
            if name is None:
                log.warning("%s holds no sockets: the store listens on a port of this host", self._folder.store_dir)
        self._socket = None if name is None else self._folder.store_dir / name
        # A client knows a server on a port without TLS by its mark. The other two ways need none.
        mark = new_secret() if name is None and self._certificate is None else None
        store = EmbeddedStore(
            self._folder.store_dir,
            password=password,
            bind=self._info.bind,
            name=name,
            certificate=self._certificate,
            mark=mark,
            binary=self._server.path,
            adopt=dies_with_parent(signal.SIGKILL),
        )
        self.process = await store.start()
        address = StoreAddress(
            url=store.url(self._info.addr),
            password=password,
            job=self._job,
            token=self._token,
            embedded=True,
            certificate=self._certificate.pem() if self._certificate else None,
            mark=mark,
        )
        try:
            await self._announce(address)
        except StoreUnreachable:
            await kill_server(self.process)
            raise

    async def _announce(self, address: StoreAddress) -> None:
        """Write `store.json`. On a full disk that is tried again for as long as a start may take. Raises
        StoreUnreachable."""
        loop = asyncio.get_running_loop()
        deadline, has_warned = loop.time() + READY_S, False
        while True:
            try:
                self._folder.write_store(address)
            except OSError as error:
                if loop.time() > deadline:
                    raise StoreUnreachable(f"{self._folder.store_path} cannot be written: {error}") from None
                if not has_warned:
                    log.error("%s cannot be written (%s); trying again", self._folder.store_path, error)
                has_warned = True
                await asyncio.sleep(ANNOUNCE_RETRY_S)
            else:
                return
