"""The start of an embedded store. The servers here are scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.store import embedded
from nvrx_slurm.store.embedded import EmbeddedStore
from tests.harness import wait_gone


async def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """The folder's path is quoted in the server's configuration."""
    folder = tmp_path / 'it\'s "a" \\ # \\x41'
    process = await EmbeddedStore(folder, password="secret").start()
    try:
        assert (folder / "appendonlydir").is_dir()
    finally:
        process.kill()
        await process.wait()


async def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its keeper, which is still running, would keep the server alive."""
    monkeypatch.setattr(embedded, "READY_S", 2.0)
    server, pid = tmp_path / "server", tmp_path / "pid"
    server.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    server.chmod(0o755)
    with pytest.raises(StoreUnreachable):
        await EmbeddedStore(tmp_path / "store", password="secret", name="socket", binary=server).start()
    wait_gone([int(pid.read_text())], timeout=20.0)
