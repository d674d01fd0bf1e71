"""What only the ucxx transport promises: one thread that owns UCX, its end, and the memory that UCX works on."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.transport import PayloadClient, PayloadServer, SharedRing
from nvrx_slurm.transport.errors import (
    PayloadTruncated,
    PeerReset,
    RingError,
    TransportError,
)
from nvrx_slurm.transport.protocol import Backend, PeerLink, PortListener
from tests.transport.harness import (
    TOKEN,
    WAIT_S,
    Async,
    assert_idle,
    bounded,
    digest_of,
    pattern,
    soon,
    without_ucx,
)
from tests.transport.links import Far, receive, receive_payload, send
from tests.waiting import until

FRAME = b"a frame of 32 bytes, neither more"[:32]

PRELUDE = """
import os, sys, threading, time
from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.errors import PeerRefused, TransportError
def soon(): return time.monotonic() + 30
def echo(link):
    frame = memoryview(bytearray(32))
    try:
        while True:
            link.receive_into(frame, soon())
            link.send(bytes(frame), None, soon())
    except TransportError:
        pass
backend = by_scheme("ucxx")
listener = backend.listen("127.0.0.1", 0, echo)
link = backend.connect(listener.address, soon())
"""

FAR = """
import signal
from tests.transport.harness import soon
from tests.waiting import until
from tests.transport.links import Far
"""


@pytest.fixture
def near(backend: Backend, far: Far) -> Iterator[PeerLink]:
    """Our end of the far end's link 0."""
    link = backend.connect(far.address, soon())
    try:
        assert far.accepted() == 0
        yield link
    finally:
        link.close()


def run(script: str, *, prelude: str = PRELUDE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own; returns its output and exit code. Fails after WAIT_S."""
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script)],
        env=without_ucx() | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


# ------------------------------------------------------------------------------------------------ a process ends

ENDS = {
    "with all left open": "",
    "with a reader that waits": """
        threading.Thread(target=echo, args=(link,), daemon=True).start()
    """,
    "with a payload under way": """
        link.send(b"x" * 32, memoryview(bytes(4 << 20)), soon())
    """,
    "by an exception": "raise SystemExit(0)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_by_itself(backend: Backend, how: str) -> None:
    """The process ends soon, with exit code 0 and without output, with links open or payloads under way."""
    with bounded(10.0):
        ended = run(ENDS[how])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_process_that_fails_ends_by_itself(backend: Backend) -> None:
    """The process ends with the traceback of its uncaught exception."""
    ended = run("raise ValueError('of the user')")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ValueError: of the user")


def test_an_ack_arrives_though_its_process_ends(far: Far) -> None:
    """The ack is the last message of a process that ends without closing its link."""
    ended = run(
        f"link = backend.connect({far.address!r}, soon()); link.send({FRAME!r}, None, soon())",
    )
    assert ended.returncode == 0
    assert far.do(far.accepted(), "receive", len(FRAME)) == FRAME


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_gets_an_error(backend: Backend, ending: str) -> None:
    """UCX does not work in a child of a process that has used it: the child gets an error that says so. The parent's
    connections still work, however the child ends."""
    ended = run(
        f"""
        child = os.fork()
        if not child:
            link.drop()
            listener.drop()
            try:
                by_scheme("ucxx").connect(listener.address, soon())
            except PeerRefused as error:
                print(error, flush=True)
            link.close()
            listener.close()
            {ending}
        assert os.waitpid(child, 0)[1] == 0
        link.send(b"x" * 32, None, soon())
        link.receive_into(memoryview(bytearray(32)), soon())
        assert not link.is_stale()
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "fork" in ended.stdout


def test_a_child_that_was_forked_before_the_first_use(backend: Backend) -> None:
    """Parent and child can both use UCX if it was only loaded before the fork."""
    ended = run(
        """
        import ucxx
        child = os.fork()
        backend = by_scheme("ucxx")
        listener = backend.listen("127.0.0.1", 0, echo)
        link = backend.connect(listener.address, soon())
        link.send(b"x" * 32, None, soon())
        link.receive_into(memoryview(bytearray(32)), soon())
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """,
        prelude=PRELUDE.partition("backend =")[0],
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------- the library


def test_it_is_not_installed() -> None:
    """The error says what to install."""
    ended = run(
        """
        sys.modules["ucxx"] = None
        try:
            by_scheme("ucxx")
        except PeerRefused as error:
            print(error)
        """,
        prelude=PRELUDE.partition("backend =")[0],
    )
    assert "pip install 'nvrx-slurm[ucxx-cu12]'" in ended.stdout


def test_the_users_settings_are_kept(backend: Backend) -> None:
    """UCX variables that the environment sets are kept; only others are set."""
    ended = run(
        "print(os.environ['UCX_HANDLE_ERRORS'], os.environ['UCX_RNDV_FRAG_MEM_TYPE'])",
        UCX_HANDLE_ERRORS="bt",
    )
    assert ended.stdout.split() == ["bt", "host"]


# ------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("sent", [(40, 0), (20, 0), (40, 1 << 20)], ids=["longer", "shorter", "long"])
def test_a_message_of_another_length(near: PeerLink, far: Far, sent: tuple[int, int]) -> None:
    """PayloadTruncated: nothing is written into the buffer, and the link cannot be used any more."""
    size, payload = sent
    far.tell(0, "send", bytes(size), (payload, 1) if payload else None)
    buffer = bytearray(b"\xee" * 32)
    if payload:
        receive(near, size)
    with pytest.raises(PayloadTruncated, match="32"):
        near.receive_into(memoryview(buffer), soon())
    assert buffer == b"\xee" * 32
    with pytest.raises(TransportError):
        send(near, FRAME)
        receive(near, 32)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_peer_that_is_killed_with_a_payload_announced(near: PeerLink, far: Far, is_known: bool) -> None:
    """The announced payload never arrives: PayloadTruncated or PeerReset at once, whether or not the death is known
    before the read."""
    far.tell(0, "send", FRAME, (64 << 20, 1))
    receive(near, len(FRAME))
    until(near.is_stale, "the payload is announced")
    far.kill()
    until(lambda: not is_known or near._peer.broken, "its end is known")
    with bounded(2.0), pytest.raises((PayloadTruncated, PeerReset)):
        receive_payload(near, 64 << 20)


@pytest.mark.parametrize(
    ("fate", "is_known"), [("SIGSTOP", "True"), ("SIGKILL", "True"), ("SIGKILL", "link._peer.broken")]
)
def test_a_peer_that_stops_within_a_short_message(backend: Backend, fate: str, is_known: str) -> None:
    """UCX would wait forever for the rest of the message. The reader gets PayloadTimeout at its deadline where the
    peer is stopped, and PayloadTruncated at once where it is dead, whether or not that is known before the read. UCX
    never writes into the reader's own buffer."""
    deadline_s = 1.0 if fate == "SIGSTOP" else 60.0
    ended = run(
        f"""
        for _ in range(50):  # on a busy machine all of it may have come before its sender is struck
            far = Far("ucxx")
            link = by_scheme("ucxx").connect(far.address, soon())
            far.tell(far.accepted(), "send", b"frame", (60_000, 1))
            link.receive_into(memoryview(bytearray(5)), soon())
            until(link.is_stale, "its first piece has come")
            os.kill(far.pid, signal.{fate})
            until(lambda: {is_known}, "its end is known")
            buffer, began = bytearray(b"." * 60_000), time.monotonic()
            try:
                link.receive_payload_into(memoryview(buffer), began + {deadline_s}, None)
            except TransportError as error:
                print(type(error).__name__, time.monotonic() - began, set(buffer) == set(b"."))
                break
            finally:
                far.kill()
        """,
        prelude=PRELUDE.partition("def soon")[0] + FAR,
        UCX_TLS="tcp,self",
        UCX_TCP_SNDBUF="4k",  # one piece, and the next one when the first was taken
        UCX_TCP_RCVBUF="4k",
        UCX_RNDV_THRESH="inf",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    error, took_s, is_untouched = ended.stdout.split()
    assert is_untouched == "True"
    if fate == "SIGSTOP":
        assert error == "PayloadTimeout" and deadline_s <= float(took_s) < deadline_s + 10.0
    else:
        assert error == "PayloadTruncated" and float(took_s) < deadline_s / 2


def test_a_peer_that_sends_and_sends(near: PeerLink, far: Far) -> None:
    """Messages that are not read are not queued without limit: the connection ends."""
    for _ in range(40):
        far.tell(0, "send", FRAME)
    until(lambda: near._peer.broken, "too many have arrived")  # a reader that keeps up never has too many
    with bounded(2.0), pytest.raises(TransportError):
        while True:
            receive(near, len(FRAME))


def test_memory_is_held_for_as_long_as_ucx_works_at_it(near: PeerLink, far: Far) -> None:
    """The payload of a ring that is closed and unlinked during the send still arrives."""
    with SharedRing.create(1, 64 << 20) as ring:
        ref = ring.write_raw(pattern(64 << 20, 3))
        claim = ring.claim(ref.slot, ref.generation)
        sending = Async(near.send, FRAME, claim.payload, soon())  # type: ignore[union-attr]
        far.do(0, "receive", len(FRAME))
        far.tell(0, "receive_payload", 64 << 20)
        del claim
    sending.result()
    assert far.hear(0) == digest_of(pattern(64 << 20, 3))


# ------------------------------------------------------------------------------------------------ the whole protocol


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 64 << 20])
def test_a_payload_is_read(backend: Backend, size: int) -> None:
    """A payload in a ring is read over UCX by its ref, and its slot is free afterwards."""
    with (
        SharedRing.create(2, 64 << 20) as ring,
        PayloadServer(ring, transport="ucxx", host="127.0.0.1", token=TOKEN) as server,
        PayloadClient(transports=("ucxx",), token=TOKEN) as client,
    ):
        for seed in range(4):  # twice the number of slots
            ref = server.refer(ring.write_raw(pattern(size, seed), timeout_s=WAIT_S))
            assert client.read(ref, deadline=WAIT_S) == pattern(size, seed)


def test_a_server_closes_with_reads_in_flight(backend: Backend) -> None:
    """The server closes within a second although 200 reads are in flight, and each reader gets an error at once."""
    with SharedRing.create(2, 1 << 20) as ring:
        ended: list[float] = []
        greeted = threading.Barrier(201)
        begun = threading.Semaphore(0)

        def serve(link: PeerLink) -> None:
            links.append(link)
            with contextlib.suppress(TransportError):  # a server's links end so too
                receive(link, 32)
                begun.release()
                link.send(FRAME, payload, soon())
                receive(link, 32)

        def read() -> None:
            link = backend.connect(listener.address, soon())
            try:
                greeted.wait(WAIT_S)
                send(link, FRAME)
                receive(link, 32)
                with pytest.raises((PeerReset, PayloadTruncated)):
                    receive_payload(link, len(payload))
                    receive(link, 32)
                ended.append(time.monotonic())
            finally:
                link.close()

        ref = ring.write_raw(pattern(1 << 20, 1))
        claim = ring.claim(ref.slot, ref.generation)
        payload = claim.payload  # type: ignore[union-attr]
        links: list[PeerLink] = []
        listener = backend.listen("127.0.0.1", 0, serve)
        readers = [Async(read) for _ in range(200)]
        greeted.wait(WAIT_S)
        for _ in readers:
            assert begun.acquire(timeout=WAIT_S)
        began = time.monotonic()
        with bounded(1.0):
            listener.close()
            for link in links:
                link.cut()
            for reader in readers:
                reader.result()
        assert len(ended) == 200 and min(ended) >= began
        until(lambda: _listen(backend, listener.address), "its port is free again").close()  # type: ignore[union-attr]


def test_connections_that_break_at_any_moment_leave_nothing(backend: Backend) -> None:
    """Connections are given up while they connect, or cut during a payload. UCX has released all of them, or the port
    would not be free again."""
    payload = pattern(1 << 20).toreadonly()

    def serve(link: PeerLink) -> None:
        with contextlib.suppress(TransportError):
            receive(link, 32)
            link.send(FRAME, payload, soon())
            receive(link, 32)

    def break_one(chance: random.Random) -> None:
        with contextlib.suppress(TransportError):
            link = backend.connect(listener.address, soon(chance.choice([0.002, 0.005, 0.01, 1.0])))
            cut = threading.Timer(chance.uniform(0.0, 0.005), link.cut)
            cut.start()
            try:
                send(link, FRAME)
                receive(link, 32)
                receive_payload(link, len(payload))
            finally:
                link.close()
                cut.join()

    def break_many(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            break_one(chance)

    listener = backend.listen("127.0.0.1", 0, serve)
    for work in [Async(break_many, seed) for seed in range(8)]:
        work.result()
    listener.close()
    until(lambda: _listen(backend, listener.address), "its port is free again").close()  # type: ignore[union-attr]


def _listen(backend: Backend, address: str) -> PortListener | None:
    try:
        return backend.listen("127.0.0.1", int(address.rpartition(":")[2]), lambda link: None)
    except RingError:
        return None


def test_an_idle_client_costs_nothing(backend: Backend, far: Far) -> None:
    """A process with idle links, and one that waits on each of them, use almost no processor time."""
    parent = Far("ucxx")
    try:
        for _ in range(8):
            link = parent.connect(far.address)
            far.tell(far.accepted(), "receive", 8, 60.0)
            assert link >= 0
        assert_idle(parent.pid, far.pid)
    finally:
        parent.close()


def test_descriptors_do_not_grow(backend: Backend) -> None:
    """Connections that fail, or whose peer dies, leave no descriptor behind."""

    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def once() -> None:
        far = Far("ucxx")
        link = backend.connect(far.address, soon())
        far.kill()
        with pytest.raises(PeerReset):
            receive(link, 8)
        link.close()
        with pytest.raises(PeerReset):
            backend.connect(far.address, soon())
        far.close()

    once()
    before = held()
    for _ in range(3):
        once()
    until(lambda: held() <= before + 1, f"descriptors as before: {before}")
