"""What every transport promises of a connection, with a peer in another process that stops, dies or misbehaves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.lab.faults.sick_ports import SickPort
from nvrx_slurm.transport import PayloadRef, SharedRing, protocol
from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.errors import (
    PayloadTimeout,
    PayloadTruncated,
    PeerReset,
    RingError,
    TransportError,
)
from nvrx_slurm.transport.protocol import PeerLink, acknowledge, host_and_port, request
from nvrx_slurm.transport.shm import ShmBackend
from nvrx_slurm.transport.slots import State
from tests.transport.harness import (
    TOKEN,
    WAIT_S,
    Async,
    Strike,
    assert_idle,
    bounded,
    digest_of,
    on_deadline,
    pattern,
    signals_every,
    soon,
    stopped,
)
from tests.transport.links import Far, receive, receive_payload, send
from tests.waiting import until

SIZES = [1, 7, 4096, (1 << 20) + 1, 64 << 20]
SHORT_S = 0.4
TOO_MUCH = 64 << 20
"""More bytes than can be sent while the peer reads none."""
FRAME = b"a frame of 32 bytes, neither more"[:32]


@pytest.fixture
def near(scheme: str, far: Far) -> Iterator[PeerLink]:
    """Our end of the far end's link 0."""
    link = by_scheme(scheme).connect(far.address, soon())
    try:
        assert far.accepted() == 0
        yield link
    finally:
        link.close()


# ------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("size", [1, 20, 88, 4096])
def test_a_frame_arrives_as_it_is(near: PeerLink, far: Far, size: int) -> None:
    """In both directions frames arrive in order, each as a message of its own."""
    frames = [bytes(pattern(size, seed)) for seed in range(5)]
    for frame in frames:
        far.tell(0, "receive", size)
        send(near, frame)
    assert [far.hear(0) for _ in frames] == frames
    for frame in frames:
        far.tell(0, "send", frame)
    assert [receive(near, size) for _ in frames] == frames


@pytest.mark.parametrize("size", SIZES)
def test_a_payload_arrives_whole(near: PeerLink, far: Far, size: int) -> None:
    """In both directions a payload arrives after its frame; `seen` gets each byte once, in order."""
    pieces: list[bytes] = []
    buffer = bytearray(size)
    far.tell(0, "send", FRAME, (size, 3))
    assert receive(near, len(FRAME)) == FRAME
    near.receive_payload_into(memoryview(buffer), soon(), lambda piece: pieces.append(bytes(piece)))
    assert buffer == pattern(size, 3) == b"".join(pieces)
    far.hear(0)
    far.tell(0, "receive", len(FRAME))
    far.tell(0, "receive_payload", size)
    send(near, FRAME, (size, 4))
    assert far.hear(0) == FRAME
    assert far.hear(0) == digest_of(pattern(size, 4))


def test_an_empty_payload_is_none(near: PeerLink, far: Far) -> None:
    """An empty payload is not sent: the next message is the next frame."""
    near.send(FRAME, memoryview(b""), soon())
    near.send(FRAME[::-1], None, soon())
    assert far.do(0, "receive", len(FRAME)) == FRAME
    assert far.do(0, "receive", len(FRAME)) == FRAME[::-1]


def test_a_payload_that_is_read_only_and_not_of_bytes(near: PeerLink, far: Far) -> None:
    """Memory of any format is sent as its raw bytes."""
    numbers = memoryview(bytes(pattern(4096))).cast("d").toreadonly()
    near.send(FRAME, numbers, soon())
    far.do(0, "receive", len(FRAME))
    assert far.do(0, "receive_payload", 4096) == digest_of(pattern(4096))


def test_only_the_buffer_is_written(near: PeerLink, far: Far) -> None:
    """A slice of a larger buffer is filled, and no byte outside of it is written."""
    buffer = bytearray(b"\xee" * 3000)
    far.tell(0, "send", FRAME, (1000, 2))
    receive(near, len(FRAME))
    near.receive_payload_into(memoryview(buffer)[1000:2000], soon(), None)
    assert buffer == b"\xee" * 1000 + pattern(1000, 2) + b"\xee" * 1000


def test_what_was_sent_before_the_close_arrives(near: PeerLink, far: Far) -> None:
    """A close loses nothing that was sent before, as an ack often is just before the close."""
    send(near, FRAME, (1 << 20, 6))
    near.close()
    assert far.do(0, "receive", len(FRAME)) == FRAME
    assert far.do(0, "receive_payload", 1 << 20) == digest_of(pattern(1 << 20, 6))


def test_links_do_not_mix(scheme: str, far: Far) -> None:
    """Of eight links between the same two processes, each carries only its own messages."""
    backend = by_scheme(scheme)
    with contextlib.ExitStack() as open_ones:
        links = []
        for _ in range(8):
            link = backend.connect(far.address, soon())
            open_ones.callback(link.close)
            links.append((far.accepted(), link))

        def use(number: int, link: PeerLink) -> list[int]:
            receive(link, len(FRAME))
            return [receive_payload(link, 1 << 20), number]

        for number, _ in links:
            far.tell(number, "send", FRAME, (1 << 20, number))
        reads = [Async(use, number, link) for number, link in links]
        for read in reads:
            got, number = read.result()
            assert got == digest_of(pattern(1 << 20, number))


# ---------------------------------------------------------------------------------------------------- deadlines


def test_a_frame_that_does_not_come(near: PeerLink) -> None:
    """PayloadTimeout, at the deadline."""
    with on_deadline(SHORT_S) as deadline:
        near.receive_into(memoryview(bytearray(8)), deadline)


def test_a_payload_that_does_not_come(near: PeerLink, far: Far) -> None:
    """PayloadTimeout, at the deadline."""
    far.do(0, "send", FRAME)
    receive(near, len(FRAME))
    with on_deadline(SHORT_S) as deadline:
        near.receive_payload_into(memoryview(bytearray(1 << 20)), deadline, None)


def test_a_deadline_that_has_passed(near: PeerLink) -> None:
    """PayloadTimeout at once, without a wait."""
    with on_deadline(0.0):
        near.receive_into(memoryview(bytearray(8)), time.monotonic() - 1.0)


def test_a_peer_that_stops_in_the_middle_of_a_payload(near: PeerLink, far: Far) -> None:
    """PayloadTimeout at the deadline. Afterwards the buffer is not written any more."""
    size = 256 << 20
    buffer = bytearray(size)
    far.tell(0, "send", FRAME, (size, 7))
    receive(near, len(FRAME))
    strike = Strike(far.pid, signal.SIGSTOP, buffer)
    try:
        with pytest.raises(PayloadTimeout), bounded(2.0) as deadline:
            near.receive_payload_into(memoryview(buffer), deadline, strike.seen)
        strike.watching.result()
        before = digest_of(buffer)
    finally:
        os.kill(far.pid, signal.SIGCONT)
    near.close()
    with pytest.raises(TransportError):
        far.hear(0)
    assert digest_of(buffer) == before


def test_a_peer_that_takes_nothing(near: PeerLink, far: Far) -> None:
    """Sending to a stopped process ends by the deadline."""
    payload = pattern(TOO_MUCH)
    with stopped(far.pid), bounded(SHORT_S) as deadline, contextlib.suppress(PayloadTimeout):
        near.send(FRAME, payload, deadline)


def test_signals_do_not_extend_a_deadline(near: PeerLink) -> None:
    """A handler that runs every 10 ms does not change when a read times out."""
    count = [0]

    def handle() -> None:
        count[0] += 1

    with signals_every(0.01, handle), on_deadline(SHORT_S) as deadline:
        near.receive_into(memoryview(bytearray(8)), deadline)
    assert count[0] >= 5


def test_signals_do_not_break_a_payload(near: PeerLink, far: Far) -> None:
    """A payload arrives whole although signals interrupt the reader all the time."""
    with signals_every(0.002):
        far.tell(0, "send", FRAME, (64 << 20, 8))
        receive(near, len(FRAME))
        assert receive_payload(near, 64 << 20) == digest_of(pattern(64 << 20, 8))


def test_a_handler_that_raises_in_a_wait(near: PeerLink, far: Far) -> None:
    """The exception is raised at once, the link can be closed, and the peer sees the close."""

    class Struck(Exception):
        pass

    strikes = iter([Struck()])

    def strike() -> None:
        if (error := next(strikes, None)) is not None:  # only once, or it would be raised in later calls too
            raise error

    with bounded(WAIT_S / 2), pytest.raises(Struck), signals_every(0.05, strike):
        near.receive_into(memoryview(bytearray(8)), soon())
    near.close()
    with pytest.raises(PeerReset):
        far.do(0, "receive", 8)


# ------------------------------------------------------------------------------------------------ peers that leave


def test_a_peer_that_closes_while_we_wait_for_a_frame(near: PeerLink, far: Far) -> None:
    """PeerReset, without waiting for the deadline."""
    wait = Async(receive, near, 8)
    assert wait.began.wait(WAIT_S)
    far.do(0, "close")
    with bounded(1.0), pytest.raises(PeerReset):
        wait.result()


def test_a_peer_that_closes_before_its_payload(near: PeerLink, far: Far) -> None:
    """PayloadTruncated or PeerReset: an announced payload does not arrive."""
    far.do(0, "send", FRAME)
    receive(near, len(FRAME))
    far.do(0, "close")
    with bounded(1.0), pytest.raises((PayloadTruncated, PeerReset)):
        receive_payload(near, 1 << 20)


def test_a_peer_that_is_killed_while_we_wait(near: PeerLink, far: Far) -> None:
    """PeerReset at once, since the peer's kernel closes the connection."""
    wait = Async(receive, near, 8)
    assert wait.began.wait(WAIT_S)
    far.kill()
    with bounded(1.0), pytest.raises(PeerReset):
        wait.result()


def test_a_peer_that_is_killed_in_the_middle_of_a_payload(near: PeerLink, far: Far) -> None:
    """PayloadTruncated or PeerReset, at once."""
    size = 256 << 20
    buffer = bytearray(size)
    far.tell(0, "send", FRAME, (size, 9))
    receive(near, len(FRAME))
    strike = Strike(far.pid, signal.SIGKILL, buffer)
    with pytest.raises((PayloadTruncated, PeerReset)):
        near.receive_payload_into(memoryview(buffer), soon(), strike.seen)
    strike.watching.result()
    far.kill()  # it may still be dying, and must not serve the next test


def test_a_peer_that_is_killed_while_we_send(near: PeerLink, far: Far) -> None:
    """The send, or the wait for an answer after it, ends at once, and every later use fails."""
    payload = pattern(TOO_MUCH)
    os.kill(far.pid, signal.SIGSTOP)
    sending = Async(near.send, FRAME, payload, soon())
    assert sending.began.wait(WAIT_S)
    far.kill()
    with bounded(2.0), pytest.raises(PeerReset):
        sending.result()
        receive(near, 8)
    with pytest.raises(TransportError):
        send(near, FRAME)
        receive(near, 8)


def test_a_port_without_a_listener(scheme: str) -> None:
    """PeerReset, at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with bounded(1.0), pytest.raises(PeerReset):
        by_scheme(scheme).connect(f"{scheme}://127.0.0.1:{port}", soon())


@pytest.mark.parametrize("rest", ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", ":1", "127.0.0.1:http"])
def test_an_invalid_address(scheme: str, rest: str) -> None:
    """PeerReset: refs come from other processes, and an invalid one must not end the reader."""
    with pytest.raises(PeerReset):
        by_scheme(scheme).connect(f"{scheme}://{rest}", soon())


def test_a_port_that_accepts_and_sends_nothing(scheme: str) -> None:
    """PayloadTimeout by the deadline of the connect, or of the first answer."""
    with SickPort(None) as port, on_deadline(1.0) as deadline:
        link = by_scheme(scheme).connect(port.address_as(scheme), deadline)
        try:
            receive(link, 8, deadline - time.monotonic())
        finally:
            link.close()


def test_a_port_that_does_not_even_accept(scheme: str) -> None:
    """Connecting ends at its deadline where no connection is made, as behind a firewall that drops packets."""
    with contextlib.ExitStack() as open_ones:
        wall = open_ones.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # more than its queue takes
            filler = open_ones.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(wall.getsockname())
        with on_deadline(SHORT_S) as deadline:
            by_scheme(scheme).connect(f"{scheme}://127.0.0.1:{wall.getsockname()[1]}", deadline)


def test_there_is_no_time_to_connect(scheme: str, far: Far) -> None:
    """PayloadTimeout where the deadline has passed already."""
    with on_deadline(0.0) as deadline:
        by_scheme(scheme).connect(far.address, deadline)


def test_a_port_with_another_protocol(scheme: str) -> None:
    """The handshake with a server of another protocol is a TransportError, by the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as other, bounded(1.5) as deadline:

        def talk() -> None:
            connection, _ = other.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + os.urandom(512))
                connection.recv(1 << 16)

        talking = Async(talk)
        with pytest.raises(TransportError):
            link = by_scheme(scheme).connect(f"{scheme}://127.0.0.1:{other.getsockname()[1]}", deadline)
            try:
                protocol.greet(link, TOKEN, deadline)
            finally:
                link.close()
        talking.result()


# ------------------------------------------------------------------------------------------- cut, close, is_stale


@pytest.mark.parametrize("wait", ["frame", "payload", "send"])
def test_a_cut_wakes_a_waiting_thread(near: PeerLink, far: Far, wait: str) -> None:
    """A thread that waits for a frame, for a payload or in a send gets PeerReset at once. A second cut does
    nothing."""
    works = {
        "frame": lambda: receive(near, 8),
        "payload": lambda: receive_payload(near, 1 << 20),
        "send": lambda: (near.send(FRAME, payload, soon()), receive(near, 8)),
    }
    payload = pattern(TOO_MUCH)
    context = stopped(far.pid) if wait == "send" else contextlib.nullcontext()
    with context:
        waiting = Async(works[wait])
        assert waiting.began.wait(WAIT_S)
        threading.Event().wait(0.05)  # it probably waits by now; if not, it must still see the cut
        near.cut()
        near.cut()
        with bounded(1.0), pytest.raises(PeerReset):
            waiting.result()


def test_a_link_that_was_cut_before_is_of_no_use(near: PeerLink) -> None:
    """A call after the cut fails with PeerReset, without a wait."""
    near.cut()
    with bounded(1.0), pytest.raises(PeerReset):
        receive(near, 8)


def test_the_peer_sees_a_cut(near: PeerLink, far: Far) -> None:
    """The peer gets PeerReset before its deadline."""
    far.tell(0, "receive", 8)
    near.cut()
    with pytest.raises(PeerReset):
        far.hear(0)


def test_close_and_cut_in_any_number_and_order(near: PeerLink, far: Far) -> None:
    """Neither raises or waits, and the peer sees the end."""
    with bounded(1.0):
        for _ in range(2):
            near.close()
            near.cut()
    with pytest.raises(PeerReset):
        far.do(0, "receive", 8)


def test_is_stale(near: PeerLink, far: Far) -> None:
    """An idle connection is not stale. One with unexpected data is."""
    assert not near.is_stale()
    far.do(0, "send", FRAME)
    receive(near, len(FRAME))
    assert not near.is_stale()
    far.do(0, "send", FRAME)
    until(near.is_stale, "it is seen to be stale")


@pytest.mark.parametrize("how", ["closes", "dies"])
def test_is_stale_once_the_peer_has_gone(near: PeerLink, far: Far, how: str) -> None:
    """Whether the peer has closed the connection or has died."""
    assert not near.is_stale()
    far.do(0, "close") if how == "closes" else far.kill()
    until(near.is_stale, "it is seen to be stale")


def test_a_forked_child_drops_a_link(scheme: str, far: Far) -> None:
    """The parent's link still works after the child has dropped it, and ends when the parent closes it, although the
    child lives."""
    parent = Far(scheme)
    child = 0
    try:
        link = parent.connect(far.address)
        number = far.accepted()
        child = parent.do(link, "fork_and_drop")
        far.tell(number, "send", FRAME, (1 << 20, 2))
        assert parent.do(link, "receive", len(FRAME)) == FRAME
        assert parent.do(link, "receive_payload", 1 << 20) == digest_of(pattern(1 << 20, 2))
        far.hear(number)
        parent.do(link, "close")
        with bounded(2.0), pytest.raises(PeerReset):
            far.do(number, "receive", 8)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        parent.close()


def test_nothing_is_left_open(scheme: str, far: Far) -> None:
    """After a hundred connections this process has no more descriptors and threads than before."""
    backend = by_scheme(scheme)

    def once() -> None:
        link = backend.connect(far.address, soon())
        far.accepted()
        link.close()

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for _ in range(5):
        once()
    descriptors, threads = held()
    for _ in range(100):
        once()
    until(lambda: held()[0] <= descriptors + 2 and held()[1] <= threads, f"as before: {descriptors}, {threads}")


# -------------------------------------------------------------------------------------------------- listeners


def test_a_port_that_is_taken(scheme: str, far: Far) -> None:
    """RingError, which names the port."""
    _, port = host_and_port(far.address)
    with pytest.raises(RingError, match=str(port)):
        by_scheme(scheme).listen("127.0.0.1", port, lambda link: None)


def test_a_listener_that_has_closed(near: PeerLink, scheme: str, far: Far) -> None:
    """New connections are refused; open links still work."""
    far.close_listener()
    with bounded(1.0), pytest.raises(PeerReset):
        by_scheme(scheme).connect(far.address, soon()).close()
    far.tell(0, "send", FRAME)
    assert receive(near, len(FRAME)) == FRAME


def test_a_listener_comes_back_on_its_port(near: PeerLink, scheme: str, far: Far) -> None:
    """After a process was killed with open links, another one can listen on its port at once, and new links work."""
    _, port = host_and_port(far.address)
    far.kill()
    successor = Far(scheme, port=port)
    try:
        assert successor.address == far.address
        link = by_scheme(scheme).connect(far.address, soon())
        try:
            successor.tell(successor.accepted(), "send", FRAME)
            assert receive(link, len(FRAME)) == FRAME
        finally:
            link.close()
    finally:
        successor.close()


# ------------------------------------------------------------------------------- the ring itself, on the same node


@pytest.fixture
def ring() -> Iterator[SharedRing]:
    with SharedRing.create(2, 1 << 20) as ring:
        yield ring


@contextlib.contextmanager
def shm_link(ring: SharedRing) -> Iterator[PeerLink]:
    """A link to the ring, which is attached a second time."""
    attached = SharedRing.attach(ring.name)
    link = ShmBackend({ring.name: attached}).connect(f"shm://{ring.name}", soon())
    try:
        yield link
    finally:
        link.close()
        attached.close()


def read_over(link: PeerLink, ref: PayloadRef, budget_s: float = WAIT_S) -> bytes:
    """Read the payload, without sending the ack."""
    assert request(link, ref, budget_s=budget_s, deadline=soon()).status is protocol.ResponseStatus.OK
    buffer = bytearray(ref.size)
    link.receive_payload_into(memoryview(buffer), soon(), None)
    return bytes(buffer)


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (protocol.AckVerdict.TAKEN, State.FREE),
        (protocol.AckVerdict.KEPT, State.READY),
        (protocol.AckVerdict.BAD, State.READY),
    ],
)
def test_a_payload_is_read_from_the_ring(ring: SharedRing, verdict: protocol.AckVerdict, state: State) -> None:
    """The same conversation without a server: the ack frees the slot, or leaves the payload for other readers."""
    ref = ring.write_raw(pattern(500_000, 2))
    with shm_link(ring) as link:
        assert read_over(link, ref) == pattern(500_000, 2)
        assert ring.slot_states()[ref.slot].state is State.READING
        acknowledge(link, ref, verdict, soon())
        assert ring.slot_states()[ref.slot].state is state
        assert not link.is_stale()


def test_without_an_ack_the_payload_stays_in_the_ring(ring: SharedRing) -> None:
    """A link that is closed before its ack releases its claim; closing twice does no harm."""
    ref = ring.write_raw(pattern(1000, 2))
    with shm_link(ring) as link:
        read_over(link, ref)
        link.close()
        link.close()
        assert ring.slot_states()[ref.slot].state is State.READY


def test_a_copy_that_took_too_long(ring: SharedRing) -> None:
    """PeerReset, since the lease ended during the copy and another process may have written to the slot."""
    first, _ = ring.write_raw(pattern(1000, 2)), ring.write_raw(pattern(1000, 3))
    with shm_link(ring) as link:
        assert request(link, first, budget_s=0.0, deadline=soon()).status is protocol.ResponseStatus.OK
        until(lambda: ring.get_ready_count() == 2, "its lease has lapsed")
        ring.write_raw(pattern(1000, 4))
        with pytest.raises(PeerReset):
            link.receive_payload_into(memoryview(bytearray(1000)), soon(), None)
            acknowledge(link, first, protocol.AckVerdict.TAKEN, soon())


def test_what_the_ring_has_no_more(ring: SharedRing) -> None:
    """STALE for an overwritten or consumed payload, BUSY while another reader has it, UNKNOWN_RING for another
    ring."""
    ref = ring.write_raw(pattern(1000, 2))
    with shm_link(ring) as link, shm_link(ring) as other:
        read_over(link, ref)

        def status(ref: PayloadRef) -> protocol.ResponseStatus:
            return request(other, ref, budget_s=1.0, deadline=soon()).status

        assert status(ref) is protocol.ResponseStatus.BUSY
        acknowledge(link, ref, protocol.AckVerdict.TAKEN, soon())
        assert status(ref) is protocol.ResponseStatus.STALE
        assert status(msgspec.structs.replace(ref, slot=99)) is protocol.ResponseStatus.STALE
        assert status(msgspec.structs.replace(ref, ring="nvrx-ring-1-2-3")) is protocol.ResponseStatus.UNKNOWN_RING


# --------------------------------------------------------------------------------------------------------- idle


def test_waiting_costs_nothing(near: PeerLink, far: Far) -> None:
    """A process that listens, and waits for a frame, uses almost no processor time."""
    far.tell(0, "receive", 8, 60.0)
    assert_idle(far.pid)
