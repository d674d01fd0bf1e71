"""What a payload server takes from the environment: where it listens when its host is not named."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from nvrx_slurm.transport.environment import default_host

STORES = {
    "unix:///jobs/7/store/s0": "127.0.0.1",
    "redis://127.0.0.1:6379": "127.0.0.1",
    "redis://10.0.0.1:6379": socket.gethostname(),
    "rediss://10.0.0.1:6379": socket.gethostname(),
}


@pytest.mark.parametrize(("url", "host"), STORES.items())
def test_in_a_job_on_one_host_it_is_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, host: str
) -> None:
    """Only there: other nodes must reach the server elsewhere."""
    store = tmp_path / "store.json"
    store.write_text(json.dumps({"url": url, "job": "7", "token": "t", "embedded": True}))
    store.chmod(0o600)
    monkeypatch.setenv("NVRX_STORE_FILE", str(store))
    assert default_host() == host


def test_a_sites_store_says_nothing_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run on this host by chance; and without an agent nothing is known."""
    store = tmp_path / "store.json"
    store.write_text(json.dumps({"url": "redis://127.0.0.1:6379", "job": "7", "token": "t"}))
    store.chmod(0o600)
    monkeypatch.setenv("NVRX_STORE_FILE", str(store))
    assert default_host() == socket.gethostname()
    monkeypatch.delenv("NVRX_STORE_FILE")
    assert default_host() == socket.gethostname()
