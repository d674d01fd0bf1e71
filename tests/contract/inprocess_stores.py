"""The stores that must fulfil the contract of a group's store, each with a real server or folder behind it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from nvrx_slurm.inprocess.store import Connection, Store
from nvrx_slurm.inprocess.store_file import FileStore
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.inprocess.store_tcp import TCPStore
from nvrx_slurm.lab.simulation.inprocess.memory_store import MemoryStore
from tests.inprocess import servers

PASSWORD = "hunter2 with a space"
DEADLINE_S = 20.0


class Valkey(servers.Valkey):
    """One server with a password."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PASSWORD)
        self.password_file = folder / "password"
        self.password_file.touch(mode=0o600)
        self.password_file.write_text(f"{PASSWORD}\n")

    def store(self, *, patience_s: float = DEADLINE_S, user: str = "", database: int = 0) -> RedisStore:
        return RedisStore(
            url=f"redis://{user}127.0.0.1:{self.port}/{database}",
            password_file=str(self.password_file),
            patience=datetime.timedelta(seconds=patience_s),
        )


class Shared:
    """A store of one kind, and the connections that a test opens to it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open = contextlib.ExitStack()

    def connect(self, group: str = "group", call: int = 0) -> Connection:
        return self._open.enter_context(contextlib.closing(self._store.connect(group, call)))

    def close(self) -> None:
        self._open.close()


@contextlib.contextmanager
def _memory(folder: Path) -> Iterator[Store]:
    yield MemoryStore()


@contextlib.contextmanager
def _file(folder: Path) -> Iterator[Store]:
    yield FileStore(path=folder / "groups")


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[Store]:
    server = Valkey(folder / "valkey")
    try:
        yield server.store()
    finally:
        server.end()


@contextlib.contextmanager
def _tcp(folder: Path) -> Iterator[Store]:
    host = importlib.import_module("torch.distributed").TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    yield TCPStore(host_name="127.0.0.1", port=host.port)


KINDS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Store]]] = {
    "memory": _memory,
    "file": _file,
    "redis": _redis,
    "tcp": _tcp,
}


class TlsRelay:
    """A TLS endpoint in front of a server that has no TLS. The `with` block gets the port that it listens on."""

    def __init__(self, certificate: Path, key: Path, *, to: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._to = to

    def __enter__(self) -> int:
        self._loop = asyncio.new_event_loop()
        started = asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self._context)
        self._server = self._loop.run_until_complete(started)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return int(self._server.sockets[0].getsockname()[1])

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self._to)
        there = asyncio.create_task(_pump(reader, downstream))
        await _pump(upstream, writer)
        there.cancel()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
