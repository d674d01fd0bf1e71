"""The two servers that must fulfil the store's contract: the real one, and the one in memory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from nvrx_slurm.batch import children
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.lab.simulation.valkey_client import DirectLink, MemoryClient, StoreRequest
from nvrx_slurm.lab.simulation.valkey_server import MemoryServer
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.embedded import EmbeddedStore
from nvrx_slurm.store.heartbeat_reader import HeartbeatReader
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.util.clock import Clock, SystemClock

PASSWORD = "secret"
TOKEN = "the job's own"
BEATS = Keys("j").beats


class RealServer:
    """An embedded Valkey in a folder, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._server = folder, EmbeddedStore(folder, bind="127.0.0.1", password=PASSWORD)

    def address(self, password: str = PASSWORD) -> StoreAddress:
        return StoreAddress(url=f"redis://127.0.0.1:{self._server.port}", password=password, job="j", token=TOKEN)

    def store(self, *, password: str = PASSWORD, patience_s: float = 5.0, generation: int = 0) -> StoreClient:
        return StoreClient(self.address(password), clock=SystemClock(), patience_s=patience_s, generation=generation)

    def heartbeat_reader(self, *, password: str = PASSWORD, clock: Clock | None = None) -> HeartbeatReader:
        return HeartbeatReader(self.address(password), BEATS, clock=clock or SystemClock())

    def raw(self) -> Any:
        """A plain client, to write what no agent would write."""
        return redis.Redis.from_url(self.address().url, password=PASSWORD, protocol=2)

    async def start(self) -> None:
        self._process = await self._server.start()

    async def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def lose_data(self) -> None:
        """Kill the server, and start it without its data."""
        await self.kill()
        shutil.rmtree(self._folder / "appendonlydir")
        await self.start()

    async def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    async def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    async def end(self) -> None:
        await children.end({"the store": self._process}, polite_s=5.0)


class FreezingLink(DirectLink):
    """Queues requests while its server is frozen."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.frozen = False
        self._held: list[Callable[[], object]] = []

    def call(self, request: StoreRequest) -> asyncio.Future[Any]:
        if not self.frozen:
            return super().call(request)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._held.append(lambda: request(lambda reply: future.done() or future.set_result(reply)))
        return future

    def thaw(self) -> None:
        self.frozen = False
        for serve in self._held:
            serve()


class InMemoryServer:
    """The same methods, for a `MemoryServer`."""

    def __init__(self, folder: Path) -> None:
        self._server = MemoryServer(SystemClock(), PASSWORD)
        self._link = FreezingLink(self._server)

    def address(self, password: str = PASSWORD) -> StoreAddress:
        return StoreAddress(url="redis://memory:1", password=password, job="j", token=TOKEN)

    def store(self, *, password: str = PASSWORD, patience_s: float = 5.0, generation: int = 0) -> StoreClient:
        connection = self._client(password)
        return StoreClient(
            self.address(),
            clock=SystemClock(),
            patience_s=patience_s,
            generation=generation,
            connection=connection,
        )

    def heartbeat_reader(self, *, password: str = PASSWORD, clock: Clock | None = None) -> HeartbeatReader:
        return HeartbeatReader(self.address(), BEATS, clock=clock or SystemClock(), connection=self._client(password))

    def raw(self) -> Any:
        """A plain client, to write what no agent would write."""
        return self._client(PASSWORD)

    async def start(self) -> None:
        self._server.start()

    async def kill(self) -> None:
        self._server.stop()

    async def lose_data(self) -> None:
        self._server.stop()
        self._server.lose_data()
        self._server.start()

    async def freeze(self) -> None:
        self._link.frozen = True

    async def thaw(self) -> None:
        self._link.thaw()

    async def end(self) -> None:
        self._server.stop()

    def _client(self, password: str) -> MemoryClient:
        return MemoryClient(self._server, password=password, link=self._link)


Server = RealServer | InMemoryServer
SERVERS: dict[str, type[Server]] = {"valkey": RealServer, "memory": InMemoryServer}
