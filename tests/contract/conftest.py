"""A real Valkey for the store's contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nvrx_slurm.batch import children
from nvrx_slurm.clock import SystemClock
from nvrx_slurm.folder import StoreAddress
from nvrx_slurm.store.client import Store
from nvrx_slurm.store.embedded import EmbeddedStore


@pytest.fixture
async def address(tmp_path) -> AsyncIterator[StoreAddress]:
    """Where an embedded store listens."""
    server = EmbeddedStore(tmp_path / "store", bind="127.0.0.1", password="secret")
    process = await server.start()
    yield StoreAddress(url=f"redis://127.0.0.1:{server.port}", password="secret", job="j", token="t")
    await children.end({"the store": process}, polite_s=5.0)


@pytest.fixture
async def store(address) -> AsyncIterator[Store]:
    """A client of it."""
    client = Store(address, clock=SystemClock(), patience_s=5.0)
    yield client
    await client.close()
