"""What UCX itself would not survive or not report: strangers, failed connections, forks, last messages.

Tests that could kill their process run in a process of their own.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.errors import PeerRefused, PeerReset, RingError, TransportError
from nvrx_slurm.transport.protocol import Backend, PeerLink, host_and_port
from nvrx_slurm.transport.ucxx import REFUSAL, UcxxLink, WorkerHello
from tests.transport.harness import WAIT_S, Async, on_deadline, soon, without_ucx
from tests.transport.links import Far, receive, send
from tests.waiting import until

FRAME = b"a frame of 32 bytes, neither more"[:32]

PRELUDE = """
import os, socket, sys, threading, time
from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.protocol import host_and_port
from nvrx_slurm.transport.errors import PeerRefused, PeerReset, TransportError

def until(holds):
    by = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < by, holds
        os.sched_yield()

def soon(): return time.monotonic() + 20

def serve(link): pass
"""

LISTEN = """
backend = by_scheme("ucxx")
listener = backend.listen("127.0.0.1", 0, serve)
port = host_and_port(listener.address)[1]
"""


def begin(*scripts: str) -> subprocess.Popen[str]:
    """Start a process of its own with these scripts."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + "".join(textwrap.dedent(script) for script in scripts)],
        env=without_ucx(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*scripts: str) -> tuple[int, str, str]:
    """Run the scripts in a process; returns its exit code, output and errors. Fails after WAIT_S."""
    with begin(*scripts) as process:
        try:
            said, complained = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    return process.returncode, said, complained


# ------------------------------------------------------------------------------------------------------ strangers


@pytest.fixture
def hello(backend: Backend) -> bytes:
    """A real hello, as a server receives it."""
    with socket.create_server(("127.0.0.1", 0)) as spy:
        calling = Async(backend.connect, f"ucxx://127.0.0.1:{spy.getsockname()[1]}", soon())
        with spy.accept()[0] as theirs:
            said = theirs.recv(1 << 16)
        with pytest.raises(TransportError):
            calling.result()
    assert len(said) > 64
    return said


def flipped(hello: bytes) -> bytes:
    at = random.randrange(len(hello) * 8)
    return hello[: at // 8] + bytes([hello[at // 8] ^ 1 << at % 8]) + hello[at // 8 + 1 :]


def relengthed(hello: bytes) -> bytes:
    """The same hello with another value in its length field."""
    field = int.from_bytes(hello[52:54]) ^ random.randrange(1, 1 << 16)
    return hello[:52] + field.to_bytes(2) + hello[54:]


SAID: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda hello: random.randbytes(random.randrange(1, 4096)),
    "a flipped bit": flipped,
    "a part of it": lambda hello: hello[: random.randrange(len(hello))],
    "another length": relengthed,
    "another address": lambda hello: hello[:54] + random.randbytes(len(hello) - 54),
}


@pytest.mark.parametrize("what", SAID)
def test_messages_of_a_stranger(backend: Backend, far: Far, hello: bytes, what: str) -> None:
    """The server's process lives and serves others. The stranger gets nothing, or a refusal."""
    _, port = host_and_port(far.address)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(SAID[what](hello))
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(4096) in (b"", REFUSAL)
    link = backend.connect(far.address, soon())
    far.tell(far.accepted(), "send", FRAME)
    assert receive(link, len(FRAME)) == FRAME
    link.close()


def test_a_client_without_the_token(backend: Backend, far: Far) -> None:
    """UCX is not called for a valid hello without the token, here with an invalid address; the client gets the
    reason."""
    _, port = host_and_port(far.address)
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(WorkerHello(1, 0, random.randbytes(200)).pack(b"another token"))
            assert stranger.recv(4096) == REFUSAL
    with pytest.raises(PeerRefused, match="does not take this token"):
        by_scheme("ucxx", b"another token").connect(far.address, soon())
    backend.connect(far.address, soon()).close()
    assert far.accepted() == 0


def test_a_server_without_the_token(backend: Backend) -> None:
    """The client's UCX is not called for such a server."""
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        connecting = Async(lambda: backend.connect(f"ucxx://127.0.0.1:{theirs.getsockname()[1]}", soon()))
        with theirs.accept()[0] as client:
            client.sendall(WorkerHello(1, 0, random.randbytes(200)).pack(b"another token"))
            with pytest.raises(PeerRefused, match="another token"):
                connecting.result()


def test_a_copied_hello_from_a_stranger_that_leaves(backend: Backend, far: Far, hello: bytes) -> None:
    """A stranger sends the client's hello and closes: the client's own connections are still paired correctly."""
    _, port = host_and_port(far.address)
    link = backend.connect(far.address, soon())
    far.accepted()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(1)
        far.accepted()
    later = backend.connect(far.address, soon())
    number = far.accepted()
    far.tell(number, "send", FRAME, (64 << 20, 1))
    receive(later, len(FRAME))
    with on_deadline(0.0) as deadline:  # only its own endpoint can end it while the payload is under way
        later.receive_payload_into(memoryview(bytearray(64 << 20)), deadline, None)
    later.close()
    with pytest.raises(PeerReset):
        far.hear(number)
    far.do(0, "send", FRAME)
    assert receive(link, len(FRAME)) == FRAME
    link.close()


def test_more_connections_than_ucx_can_count(backend: Backend) -> None:
    """A new UCX worker takes over when one has made its maximum of connections."""
    ended = run(
        """
        from nvrx_slurm.transport import ucxx_engine
        from nvrx_slurm.transport.ucxx_engine import engine
        ucxx_engine.MOST_MADE = 3

        def serve(link):
            frame = memoryview(bytearray(32))
            link.receive_into(frame, soon())
            link.send(bytes(frame), None, soon())
        """,
        LISTEN,
        """
        first = engine().calling
        links = [backend.connect(listener.address, soon()) for _ in range(10)]
        for link in links:
            link.send(b"x" * 32, None, soon())
        for link in links:
            link.receive_into(memoryview(bytearray(32)), soon())
            link.close()
        print(engine().calling is not first)
        """,
    )
    assert ended == (0, "True\n", "")


# --------------------------------------------------------------------------------------------------------- listeners


@pytest.mark.parametrize("said", [0, 20, 60], ids=["nothing", "a part", "more"])
def test_a_listener_closes_though_peers_are_silent(backend: Backend, hello: bytes, said: int) -> None:
    """The listener closes long before the peers' handshakes time out, and its port is free again."""
    listener = backend.listen("127.0.0.1", 0, lambda link: None)
    _, port = host_and_port(listener.address)
    with contextlib.ExitStack() as open_ones:
        for _ in range(20):
            peer = open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.sendall(hello[:said])
        began = time.monotonic()
        listener.close()
        backend.listen("127.0.0.1", port, lambda link: None).close()
        assert time.monotonic() - began < WAIT_S / 3


def test_a_port_is_taken_while_connections_come_and_go(backend: Backend, far: Far) -> None:
    """RingError with the system's reason each time, and the process that has the port still works."""
    _, port = host_and_port(far.address)
    for number in range(20):
        link = backend.connect(far.address, soon())
        assert far.accepted() == number
        for _ in range(5):
            with pytest.raises(RingError, match=f"ucxx://127.0.0.1:{port}: Address already in use"):
                backend.listen("127.0.0.1", port, lambda link: None)
        link.close()


# ---------------------------------------------------------------------------------------------------------- a fork


def test_a_fork_while_ucx_is_being_loaded(backend: Backend) -> None:
    """A forked child has locks of a thread that it does not have: it gets an error, and does not wait for them."""
    ended = run(
        """
        loading = threading.Thread(target=by_scheme, args=("ucxx",))
        loading.start()
        until(lambda: "ucxx" in sys.modules)
        child = os.fork()
        if not child:
            try:
                by_scheme("ucxx")
            except PeerRefused as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        loading.join()
        """,
    )
    assert ended[0] == 0 and not ended[2]
    assert "fork" in ended[1]


# ----------------------------------------------------------------------------------------------------- last messages


def test_a_last_message_is_read_after_a_failed_send(backend: Backend, far: Far) -> None:
    """The last message of a peer that has closed is read even by a side that sends before it reads. Only then is the
    connection reset."""
    link = backend.connect(far.address, soon())
    assert isinstance(link, UcxxLink) and far.accepted() == 0
    far.do(0, "send", FRAME)
    far.do(0, "close")
    until(lambda: link._peer.broken is not None, "the peer has gone")
    send(link, FRAME)
    assert receive(link, len(FRAME)) == FRAME
    with pytest.raises(PeerReset):
        send(link, FRAME)
    link.close()


def test_a_message_of_a_server_that_sends_first(backend: Backend) -> None:
    """A server sends before it receives, and closes at once: its client still gets the message on the right link."""

    def serve(link: PeerLink) -> None:
        send(link, FRAME)
        link.close()
        link.close()

    listener = backend.listen("127.0.0.1", 0, serve)
    for _ in range(100):
        link = backend.connect(listener.address, soon())
        assert receive(link, len(FRAME)) == FRAME
        with pytest.raises(PeerReset):
            receive(link, len(FRAME))
        link.close()
    listener.close()


def test_listeners_leave_nothing(backend: Backend) -> None:
    """After all have closed, the process has no more descriptors than before."""

    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    for _ in range(5):
        for listener in [backend.listen("127.0.0.1", 0, lambda link: None) for _ in range(10)]:
            listener.close()
    until(lambda: held() <= before, f"descriptors as before: {before}")
