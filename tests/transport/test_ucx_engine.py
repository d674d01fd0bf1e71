"""What UCX itself would not survive, or not tell: listeners that close at any moment, forks, last words.

What could kill its process is done in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.backends.port import Backend, host_and_port
from nvrx_slurm.transport.backends.ucx.link import UcxxLink
from nvrx_slurm.transport.errors import PeerRefused, PeerReset, RingError
from tests.transport.harness import WAIT_S, soon, until
from tests.transport.links import Far, receive, send

FRAME = b"a frame of 32 bytes, neither more"[:32]

PRELUDE = """
import os, socket, sys, threading, time
from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.backends.port import host_and_port
from nvrx_slurm.transport.backends.ucx import sockets
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

HALF_OPEN = """
half = socket.create_connection(("127.0.0.1", port))
until(lambda: sockets.has_connections(port))
"""


@pytest.fixture
def backend() -> Backend:
    """The transport; missing, it fails in CI, and is skipped elsewhere."""
    try:
        return by_scheme("ucxx")
    except PeerRefused as error:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(str(error))


@pytest.fixture
def far(backend: Backend) -> Iterator[Far]:
    far = Far("ucxx")
    try:
        yield far
    finally:
        far.close()


def begin(*scripts: str) -> subprocess.Popen[str]:
    """A process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + "".join(textwrap.dedent(script) for script in scripts)],
        env={name: value for name, value in os.environ.items() if not name.startswith("UCX")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*scripts: str) -> tuple[int, str, str]:
    """How it ends, within WAIT_S, and what it has said."""
    with begin(*scripts) as process:
        try:
            said, complained = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    return process.returncode, said, complained


# ------------------------------------------------------------------------------------------------ a listener closes


def test_who_has_not_said_who_it_is_when_a_listener_closes(backend: Backend) -> None:
    """UCX has accepted it, and keeps a pointer to its listener: whatever it says later, this process lives on."""
    ended = run(
        LISTEN,
        """
        with socket.create_server(("127.0.0.1", 0)) as spy:
            def fail():
                try:
                    backend.connect(f"ucxx://127.0.0.1:{spy.getsockname()[1]}", soon())
                except TransportError:
                    pass
            client = threading.Thread(target=fail)
            client.start()
            with spy.accept()[0] as theirs:
                hello = theirs.recv(4096)
            client.join()
        """,
        HALF_OPEN,
        """
        listener.close()
        half.sendall(hello)
        half.settimeout(20)
        half.recv(4096)
        print(len(hello) > 32)
        """,
    )
    assert ended == (0, "True\n", "")


def test_a_closed_listener_is_gone_once_its_last_connection_is(backend: Backend) -> None:
    """Also one that never said a word: no descriptor is left."""
    ended = run(
        LISTEN,
        """
        held = lambda: len(os.listdir("/proc/self/fd"))
        before = held()
        """,
        HALF_OPEN,
        """
        listener.close()
        half.close()
        until(lambda: held() < before)
        """,
    )
    assert ended == (0, "", "")


def test_a_port_is_taken_while_connections_come_and_go(backend: Backend, far: Far) -> None:
    """RingError each time, and whoever has the port works on."""
    _, port = host_and_port(far.address)
    for number in range(20):
        link = backend.connect(far.address, soon())
        assert far.accepted() == number
        for _ in range(5):
            with pytest.raises(RingError, match=str(port)):
                backend.listen("127.0.0.1", port, lambda link: None)
        link.close()


def test_the_users_sockets_are_left_as_they_are(backend: Backend) -> None:
    """Looking for its own among them, a listener that closes changes none: they still block, and their port is
    theirs, where it has the same number in IPv6 or UDP."""
    ended = run(
        LISTEN,
        """
        socket.setdefaulttimeout(5)
        same = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_INET6, socket.SOCK_STREAM)]
        same[1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        same[0].bind(("127.0.0.1", port))
        same[1].bind(("::1", port))
        same[1].listen()
        for each in same:
            os.set_blocking(each.fileno(), True)
        listener.close()
        assert all(os.get_blocking(each.fileno()) for each in same)
        socket.create_connection(("::1", port)).close()
        """,
    )
    assert ended[0] == 0, ended[2]


# ---------------------------------------------------------------------------------------------------------- a fork


def test_a_fork_while_ucx_is_being_loaded(backend: Backend) -> None:
    """The child has its locks, held by a thread that is not there: it is told so, and does not wait for them."""
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


# ----------------------------------------------------------------------------------------------------- a last word


def test_a_last_word_is_read_though_one_says_more(backend: Backend, far: Far) -> None:
    """A peer that says why and closes is heard, also by who sends something more before it listens: only then is the
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


def test_listeners_leave_nothing(backend: Backend) -> None:
    """Once all have closed there are as many descriptors as before."""

    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    for _ in range(5):
        for listener in [backend.listen("127.0.0.1", 0, lambda link: None) for _ in range(10)]:
            listener.close()
    until(lambda: held() <= before, f"as before: {before}")
