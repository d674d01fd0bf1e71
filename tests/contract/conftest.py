"""Servers for the store's contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.clock import SystemClock
from tests.contract.servers import SERVERS, RealServer, Server


@pytest.fixture(params=SERVERS)
async def server(request, tmp_path) -> AsyncIterator[Server]:
    """Each kind of server that must fulfil the contract, running."""
    server = SERVERS[request.param](tmp_path / "server")
    await server.start()
    yield server
    await server.end()


@pytest.fixture
async def address(tmp_path) -> AsyncIterator[StoreAddress]:
    """Where an embedded store listens."""
    server = RealServer(tmp_path / "store")
    await server.start()
    yield server.address()
    await server.end()


@pytest.fixture
async def store(address) -> AsyncIterator[StoreClient]:
    """A client of that store."""
    client = StoreClient(address, clock=SystemClock(), patience_s=5.0)
    yield client
    await client.close()
