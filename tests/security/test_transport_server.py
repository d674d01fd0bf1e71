"""Bob at a worker's payload port, to which any user of any host that reaches the node can connect."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # before the process becomes bob, who may not read it
import os
import random
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.transport import PayloadClient, PayloadRef, PayloadServer, PeerRefused, SharedRing, protocol
from nvrx_slurm.util.admission import MOST_UNPROVEN
from tests.waiting import until

WAIT_S = 60.0
FLOOD = 2400
WORKER = """
import os, sys, threading
from nvrx_slurm.util.log import set_up
from nvrx_slurm.transport import PayloadServer, SharedRing
set_up("worker")
with SharedRing.create(8, 4096) as ring, PayloadServer(ring, host="127.0.0.1", ports=1) as server:
    ref = server.write(b"weights").to_json().decode()
    print(server.ports[0].rpartition(":")[2], server.token.hex(), ref, flush=True)
    for line in sys.stdin:
        print(threading.active_count(), len(os.listdir("/proc/self/fd")), flush=True)
"""


# ---- what bob does


def hold_silent_links(port: int, count: int) -> None:
    """Hold this many connections and send nothing; replace those that the server closes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * count), hard))
    links, poll, made = {}, select.poll(), 0
    while True:
        while len(links) < count and made < 4 * count:
            link = socket.create_connection(("127.0.0.1", port))
            links[link.fileno()] = link
            poll.register(link, select.POLLIN)
            made += 1
            if made == count:
                print("flooded", flush=True)
        for descriptor, _ in poll.poll(None):
            poll.unregister(descriptor)
            links.pop(descriptor).close()


def say(port: int, count: int) -> int:
    """Send random messages, and messages that begin as the protocol does. Returns the number of connections."""
    frames = [
        protocol.ClientHello(protocol.VERSION, os.urandom(32)).pack(),
        protocol.ClientHello(99, os.urandom(32)).pack(),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for number in range(count):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(random.choice([*frames, b""]) + os.urandom(random.randrange(300)))
            if number % 3 == 0:
                link.shutdown(socket.SHUT_WR)
                link.settimeout(WAIT_S)
                while link.recv(4096):
                    pass
    return count


def wait_for_the_end(port: int) -> str:
    """Send nothing; returns what is received."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.settimeout(WAIT_S)
        return link.recv(1).hex()


def prove_with(port: int, token: str) -> list[str]:
    """Follow the protocol with a guessed token; returns what is received."""
    heard = []
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.settimeout(WAIT_S)
        link.sendall(protocol.ClientHello(protocol.VERSION, bytes(32)).pack())
        challenge = protocol.Challenge.unpack(link.recv(protocol.CHALLENGE_BYTES, socket.MSG_WAITALL))
        heard.append(challenge.status.name)
        link.sendall(bytes.fromhex(token)[:32].ljust(32, b"\0"))
        answer = protocol.Response.unpack(link.recv(protocol.ANSWER_BYTES, socket.MSG_WAITALL))
        heard.append(answer.status.name)
        heard.append(link.recv(1).hex())
    return heard


# ---- alice


class Worker:
    """A process of alice's that serves payloads."""

    def __init__(self, log: Path, descriptors: int) -> None:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                preexec_fn=limit,
            )
        port, token, ref = self._line().split(" ", 2)
        self.port, self.token, self.ref = int(port), bytes.fromhex(token), PayloadRef.from_json(ref)

    def usage(self) -> tuple[int, int]:
        """The number of its threads and of its descriptors."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        threads, descriptors = map(int, self._line().split())
        return threads, descriptors

    def read(self) -> bytes:
        """Read over the port, as from another node."""
        with PayloadClient(token=self.token, transports=("tcp",)) as client:
            return bytes(client.read(self.ref, deadline=WAIT_S, keep=True))

    def logged(self) -> str:
        return self._log.read_text()

    def end(self) -> int:
        """Let the process end; returns its exit code."""
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    """A worker with 1,024 descriptors, as in a login shell, or as many as the test sets."""
    worker = Worker(tmp_path / "log", getattr(request, "param", 1024))
    with worker.process:
        yield worker
        worker.process.kill()


def test_silent_links_cost_no_threads(bob: Any, worker: Worker) -> None:
    """Bob opens 2,400 connections, more than the worker may have descriptors. 64 are kept, none has a thread, a
    reader that has the token is served meanwhile, and the log has one line."""
    threads, descriptors = worker.usage()
    flood = bob.start(hold_silent_links, worker.port, FLOOD)
    assert flood.line() == "flooded"
    assert worker.read() == b"weights"
    now = worker.usage()
    assert now[0] <= threads + 1  # the thread that serves the reader
    assert now[1] <= descriptors + MOST_UNPROVEN + 2  # those of the reader, and of a connection that is being refused
    assert worker.read() == b"weights"
    assert worker.end() == 0
    assert len(worker.logged().splitlines()) == 1, worker.logged()
    assert (
        "has closed a connection from 127.0.0.1: it was the oldest of 64 that have proven nothing" in worker.logged()
    )


@pytest.mark.parametrize("worker", [48], indirect=True)
def test_a_listener_survives_a_lack_of_descriptors(bob: Any, worker: Worker) -> None:
    """With fewer than 64 descriptors left, accept(2) fails with EMFILE, and the port serves again afterwards."""
    flood = bob.start(hold_silent_links, worker.port, 100)
    until(lambda: "cannot take a connection" in worker.logged(), "EMFILE")
    flood.end()
    assert worker.read() == b"weights"
    assert worker.end() == 0
    lines = worker.logged().splitlines()
    assert sum("cannot take a connection: Too many open files" in line for line in lines) == 1
    assert len(lines) <= 2, lines  # the other one is about a connection that was closed


def test_a_silent_link_has_two_seconds(bob: Any, worker: Worker) -> None:
    """A single silent connection is closed too, after two seconds."""
    assert bob.run(wait_for_the_end, worker.port) == ""
    assert "said nothing that proves it in 2 s" in worker.logged()
    assert worker.end() == 0


def test_ten_thousand_messages_kill_nothing(bob: Any, worker: Worker) -> None:
    """Random messages, truncated ones, and ones that begin as the protocol does: the port serves as before, and the
    log stays short."""
    before = worker.usage()
    assert bob.run(say, worker.port, 10_000) == 10_000
    assert worker.read() == b"weights"
    until(lambda: worker.usage() <= (before[0] + 1, before[1] + 1), "the end of his connections")
    assert worker.end() == 0
    assert len(worker.logged().splitlines()) <= 3, worker.logged()
    assert "Traceback" not in worker.logged()


@pytest.mark.parametrize("guess", ["", "00" * 32, "ff" * 32])
def test_a_guess_is_refused(bob: Any, worker: Worker, guess: str) -> None:
    """A client that follows the protocol with a wrong token gets REFUSED, and then the end of the connection."""
    assert bob.run(prove_with, worker.port, guess) == ["OK", "REFUSED", ""]
    assert worker.read() == b"weights"


def test_a_server_that_is_full_says_so() -> None:
    """Only proven connections count against the server's limit, and a reader beyond it gets an error that says so."""
    with SharedRing.create(2, 100) as ring, PayloadServer(ring, host="127.0.0.1", ports=1, most_links=1) as server:
        ref = server.write(b"weights")
        silent = socket.create_connection(("127.0.0.1", int(server.ports[0].rpartition(":")[2])))
        with silent, PayloadClient(token=server.token, transports=("tcp",)) as first:
            assert bytes(first.read(ref, keep=True)) == b"weights"
            second = PayloadClient(token=server.token, transports=("tcp",))
            with second, pytest.raises(PeerRefused, match="as many connections as it takes"):
                second.read(ref, keep=True, deadline=WAIT_S)
