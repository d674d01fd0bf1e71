"""The small parts: rate limits, threads for file systems, results on disk, options of the command line."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from nvrx_slurm.attribution.local_service import is_loopback
from nvrx_slurm.attribution.service import auth, storage
from nvrx_slurm.attribution.service.auth import ProofDeadlineProtocol
from nvrx_slurm.attribution.service.lifecycle import accept
from nvrx_slurm.attribution.service.server import listening
from nvrx_slurm.attribution.service.settings import BindAddress, parse_bind, read_token
from nvrx_slurm.attribution.service.storage import FileSystemThreads, FileSystemTimeout, StateFolder
from nvrx_slurm.attribution.service.wire import Submission, id_of
from nvrx_slurm.errors import UnsafePath, UsageError
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry
from nvrx_slurm.util.clock import SystemClock

KEY = FailureKey(job="/jobs/1", generation=0, replica="main-0", cycle=2)
RECORD = accept(None, Submission(inquiry=Inquiry(key=KEY, paths=("/logs",)), intent="terminal"), 1.0)


@given(gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60))
def test_rate(gaps: list[float]) -> None:
    """However a client times its requests, no more get through than burst and rate together allow, and one that waits
    as long as the reply says gets through."""
    limit, now, passed = auth.RateLimit(per_s=2.0, burst=5), 0.0, 0
    for gap in gaps:
        now += gap
        passed += limit.take("n1", now) == 0.0
        assert passed <= 5 + 2.0 * now + 1e-6
    while not (wait_s := limit.take("n1", now)):
        passed += 1
        assert passed <= 5 + 2.0 * now + 1e-6
    assert limit.take("n1", now + wait_s + 1e-6) == 0.0
    assert limit.take("n2", now) == 0.0


def test_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of remembered clients is bounded, and the client that asks now is among them."""
    monkeypatch.setattr(auth, "CLIENTS_AT_MOST", 10)
    limit = auth.RateLimit(per_s=1.0, burst=1)
    assert all(limit.take(f"n{client}", 0.0) == 0.0 for client in range(100))
    assert limit.take("n99", 0.0) > 0.0


async def test_stalled(tmp_path: Path) -> None:
    """Work that hangs is given up and keeps its thread; once it returns, other work goes on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    aside = FileSystemThreads(timeout_s=0.05, at_once=2)
    for _ in range(3):
        with pytest.raises(FileSystemTimeout, match=r"has not answered for 0\.05 s"):
            await aside.run(fifo.read_bytes)
    patient = FileSystemThreads(timeout_s=20.0)
    await patient.run(lambda: fifo.write_bytes(b"x"))
    async with asyncio.timeout(20.0):
        while True:
            try:
                assert await aside.run(lambda: 1) == 1
                break
            except FileSystemTimeout:
                pass


async def test_aside_raises() -> None:
    """An exception of the work is raised unchanged, even if it is a timeout."""
    with pytest.raises(TimeoutError, match="of its own"):
        await FileSystemThreads(timeout_s=20.0).run(_raises)


def _raises() -> None:
    raise TimeoutError("of its own")


async def test_silent_connection() -> None:
    """A connection on which no whole request arrives is closed; one that has had a request is not."""

    class Hasty(ProofDeadlineProtocol):
        proof_s = 0.2

    async def hello(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config, state = uvicorn.Config(hello, lifespan="off", log_config=None), ServerState()
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Hasty(config, state, {}), "127.0.0.1", 0)
    async with server, asyncio.timeout(20.0):
        port = server.sockets[0].getsockname()[1]
        used, silent, slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        used[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        slow[1].write(b"GET / HTTP/1.1\r\nHost: ")
        assert await silent[0].read() == b"" and await slow[0].read() == b""
        used[1].write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await used[0].read()).count(b"204 No Content") == 2
        for _, writer in (used, silent, slow):
            writer.close()


def test_results(tmp_path: Path) -> None:
    """What was saved is loaded; a torn file is ignored, half a file is removed, and a file of another kind stays."""
    identity = id_of(KEY)
    kept = StateFolder(tmp_path)
    kept.save(identity, RECORD)
    (tmp_path / f"{'0' * 32}.json").write_text('{"inquiry": {"key"')
    (tmp_path / f".{identity}.json.123").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    assert kept.load() == {identity: RECORD}
    assert not list(tmp_path.glob(".*")) and (tmp_path / "notes.txt").exists()
    assert (tmp_path / f"{identity}.json").stat().st_mode & 0o777 == 0o600
    kept.drop([identity, "1" * 32])
    assert kept.load() == {}


def test_one_service_each(tmp_path: Path) -> None:
    """Only one service at a time uses a state folder, which no other user may be able to write to."""

    def opened() -> AbstractContextManager[StateFolder]:
        return storage.opened(tmp_path / "state", SystemClock())

    with opened(), pytest.raises(UsageError, match="another service uses it"), opened():
        pass
    with opened():
        pass
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(UnsafePath, match="every user can write to it"), opened():
        pass


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:8443", BindAddress("127.0.0.1", 8443), True),
        ("[::1]:0", BindAddress("::1", 0), True),
        ("localhost:1", BindAddress("localhost", 1), True),
        (":80", BindAddress("0.0.0.0", 80), False),
        ("node7:80", BindAddress("node7", 80), False),
    ],
)
def test_bind(text: str, address: BindAddress, loopback: bool) -> None:
    """An address is parsed from its text, and known to be reachable from other hosts or not."""
    assert parse_bind(text) == address and is_loopback(address.host) is loopback


@pytest.mark.parametrize("text", ["8443", "host:", "host:x", "host:70000", "host:²", "::1:80", ""])
def test_bad_bind(text: str) -> None:
    """The error for a wrong address shows the form of a right one."""
    with pytest.raises(UsageError, match=r"HOST:PORT|brackets"):
        parse_bind(text)


@pytest.mark.parametrize("host", ["log..example", "x" * 70, "no.such.host.invalid"])
def test_bind_to_no_host(host: str) -> None:
    """An invalid name, or one that the resolver does not know, is an error of the option."""
    with pytest.raises(UsageError, match=f"^--bind {host}:0: "), listening(BindAddress(host, 0)):
        pass


def test_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token comes from a file that no other user can read, or from the environment; only loopback needs none."""
    here, anywhere, file = BindAddress("127.0.0.1", 0), BindAddress("0.0.0.0", 0), tmp_path / "token"
    monkeypatch.delenv("NVRX_SLURM_ATTRSVC_TOKEN", raising=False)
    assert read_token(None, here) is None
    with pytest.raises(UsageError, match="a token is needed"):
        read_token(None, anywhere)
    file.write_text("a-token-of-some-length\n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match=rf"{file}: --token-file: can be read by others \(mode 0640\); `chmod 600`"):
        read_token(file, anywhere)
    file.chmod(0o600)
    assert read_token(file, anywhere) == "a-token-of-some-length"
    file.write_text("short")
    with pytest.raises(UsageError, match="16 or more"):
        read_token(file, anywhere)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none", anywhere)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="is no plain file"):
        read_token(tmp_path / "pipe", anywhere)
    monkeypatch.setenv("NVRX_SLURM_ATTRSVC_TOKEN", "another-token-from-the-environment")
    assert read_token(None, anywhere) == "another-token-from-the-environment"
