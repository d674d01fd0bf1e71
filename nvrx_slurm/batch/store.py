"""Keeps the job's embedded store going, and `store.json` in step with it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from asyncio.subprocess import Process
from pathlib import Path

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.files import RUNTIME_ROOTS
from nvrx_slurm.folder import LOOPBACK, JobFolder, JobInfo, StoreAddress
from nvrx_slurm.ids import new_secret
from nvrx_slurm.log import get_logger
from nvrx_slurm.processes import dies_with_parent
from nvrx_slurm.store.certificate import Certificate, make_certificate
from nvrx_slurm.store.embedded import READY_S, EmbeddedStore, new_socket_path
from nvrx_slurm.store.servers import Server, find_server

log = get_logger("batch")

STORE_RESTARTS = 20
ANNOUNCE_RETRY_S = 0.25


class StoreKeeper:
    """One job's store. Each start of the server has a new port (or socket), a new password and a new mark.

    A client that still knows the old ones sends its password to whatever process has taken the old port; with that
    password nobody can log in anywhere. Clients find the new ones in `store.json`.
    """

    def __init__(self, folder: JobFolder, info: JobInfo, *, asked: str, job: str, token: str) -> None:
        self._folder, self._info = folder, info
        self._asked, self._job, self._token = asked, job, token
        self._server: Server | None = None
        self._sockets: Path | None = None
        self._path: Path | None = None
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
        if is_on_one_host:
            self._sockets = _folder_for_sockets(self._folder)
        elif self._server.has_tls:
            made = await asyncio.to_thread(make_certificate, self._folder.store_dir)
            if isinstance(made, Certificate):
                self._certificate = made
            else:
                log.warning("the store goes without TLS: %s", made)
        else:
            log.info("the store goes without TLS, which %s does not have", self._server)
        await self._start_server()

    async def keep(self) -> None:
        """Start it again whenever it ends. Raises StoreUnreachable where that fails, or happens too often."""
        for _ in range(STORE_RESTARTS):
            assert self.process is not None
            code = await self.process.wait()
            log.warning("the store ended (%s); starting it again", code)
            await self._start_server()
        raise StoreUnreachable(
            f"the embedded store ended {STORE_RESTARTS} times; see {self._folder.store_dir}/server.log"
        )

    def clear_away(self) -> None:
        """Remove its files, once it has ended."""
        self._folder.remove_tree(self._folder.store_dir.name)
        if self._sockets is not None and self._sockets != self._folder.store_dir:
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def _start_server(self) -> None:
        assert self._server is not None
        password, path = new_secret(), None
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._sockets is not None:
            # A new name each time: a client with the old password must not find the new server, which refuses it.
            self._path = path = new_socket_path(self._sockets)
        # A client proves a server on a port without TLS by its mark. The other two ways need none.
        mark = new_secret() if path is None and self._certificate is None else None
        store = EmbeddedStore(
            self._folder.store_dir,
            password=password,
            bind=self._info.bind,
            path=path,
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
        await self._announce(address)

    async def _announce(self, address: StoreAddress) -> None:
        """Where the disk is full it is tried again for as long as a start may take. Raises StoreUnreachable."""
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


def _folder_for_sockets(job: JobFolder) -> Path | None:
    """A folder that only this user can enter and that can hold a unix socket; None where there is none.

    The store's own folder, unless its path is too long for a socket's address (107 bytes) or its file system holds no
    sockets.
    """
    if new_socket_path(job.store_dir):
        return job.store_dir
    for root in RUNTIME_ROOTS:
        try:
            # 0700, with a name that cannot be foreseen. If this process is killed, the job's next batch host here
            # finds it by the beginning of the name (`clear_runtime_folders`). No node's name begins with a dot.
            folder = Path(tempfile.mkdtemp(prefix=f"{job.runtime_name}-.store-", dir=root))
        except OSError:
            continue
        if new_socket_path(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    log.warning("no folder here can hold a unix socket: the store listens on a port of 127.0.0.1")
    return None
