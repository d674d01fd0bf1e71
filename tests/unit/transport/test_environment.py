"""The environment of a payload server: the address on which it listens if none is given."""

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
    """In any other job, other nodes must be able to reach the server."""
    store = tmp_path / "store.json"
    store.write_text(json.dumps({"url": url, "job": "7", "token": "t", "embedded": True}))
    store.chmod(0o600)
    monkeypatch.setenv("NVRX_STORE_FILE", str(store))
    assert default_host() == host


def test_a_sites_store_says_nothing_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a store may be on this host by chance; without an agent nothing is known about the nodes."""
    store = tmp_path / "store.json"
    store.write_text(json.dumps({"url": "redis://127.0.0.1:6379", "job": "7", "token": "t"}))
    store.chmod(0o600)
    monkeypatch.setenv("NVRX_STORE_FILE", str(store))
    assert default_host() == socket.gethostname()
    monkeypatch.delenv("NVRX_STORE_FILE")
    assert default_host() == socket.gethostname()
