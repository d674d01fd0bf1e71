"""Mutated and random frames at each stage of a conversation, on either side, over real sockets. They cause nothing
but TransportErrors, no memory is allocated for sizes that a peer claims, and other peers are still served."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.transport import PayloadRef, PayloadServer, ServerLimits, SharedRing, TransportError, protocol
from nvrx_slurm.transport.protocol import PeerLink, acknowledge, greet, host_and_port, receive, request, settle
from nvrx_slurm.transport.slots import State
from nvrx_slurm.transport.tcp import TcpBackend, TcpLink
from tests.transport.harness import TOKEN, Async, pattern, soon
from tests.transport.nodes import client_of
from tests.waiting import until

SIZE = 50_000
BOUND_BYTES = 2 << 20
"""The memory that either side may allocate for a conversation, beyond the payload that was requested."""
MANY = settings(settings.get_profile("shared fixtures"), max_examples=150)


# ------------------------------------------------------------------------------------------------- bytes to send

garbage = st.binary(max_size=300)
numbers = st.one_of(
    st.integers(0, (1 << 64) - 1), st.sampled_from([0, 1, SIZE, 1 << 31, 1 << 40, (1 << 63), (1 << 64) - 1])
)
small = st.integers(0, (1 << 32) - 1)
octets = st.integers(0, 255)


@st.composite
def mutated(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """A frame with some bytes changed, missing, or added."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(0, 3))):
        if frame:
            frame[draw(st.integers(0, len(frame) - 1))] = draw(octets)
    cut = draw(st.one_of(st.none(), st.integers(0, len(frame))))
    return bytes(frame[:cut]) + draw(st.one_of(st.just(b""), garbage))


def requests_for(ring: str) -> st.SearchStrategy[bytes]:
    return st.builds(
        lambda call, slot, budget, generation, name: protocol.PayloadRequest(
            call, slot, budget, generation, name
        ).pack(),
        st.sampled_from(protocol.RequestKind),
        st.one_of(st.integers(0, 5), small),
        small,
        numbers,
        st.sampled_from([ring, "nvrx-ring-1-2-3", ""]),
    )


acks = st.builds(
    lambda verdict, slot, generation: protocol.Ack(verdict, slot, generation).pack(),
    st.sampled_from(protocol.AckVerdict),
    small,
    numbers,
)
answers = st.builds(
    lambda status, size, checksum, generation: protocol.Response(status, size, checksum, generation).pack(),
    st.sampled_from(protocol.ResponseStatus),
    numbers,
    numbers,
    numbers,
)
challenges = st.builds(
    lambda version, status, eviction, nonce, proof: protocol.Challenge(
        version, status, eviction, nonce, proof
    ).pack(),
    st.integers(0, 3),
    st.sampled_from(protocol.ResponseStatus),
    small,
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
)
hellos = st.builds(
    lambda version, nonce: protocol.ClientHello(version, nonce).pack(),
    st.integers(0, 3),
    st.binary(min_size=32, max_size=32),
)


@contextlib.contextmanager
def allocating_at_most(bound: int) -> Iterator[None]:
    """Bounds the peak of Python's memory, in all threads of this process."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= bound, f"{peak} bytes at the peak"


# --------------------------------------------------------------------------------------------------- the server


class Served:
    """A real server of a real ring, in this process, where its memory can be measured. `uncaught`: uncaught
    exceptions of its threads."""

    def __init__(self, uncaught: list[object]) -> None:
        self.ring = SharedRing.create(4, 1 << 16, overwrite=True, lease_s=30.0)
        limits = ServerLimits(hello_s=0.5, read_s=0.5, eviction_s=5.0)
        self.server = PayloadServer(self.ring, host="127.0.0.1", ports=1, token=TOKEN, node="n1", limits=limits)
        self.client = client_of("tcp")
        self.uncaught = uncaught

    def write(self, seed: int = 1) -> PayloadRef:
        return self.server.refer(self.ring.write_raw(pattern(SIZE, seed)))

    def raw(self) -> socket.socket:
        return socket.create_connection(host_and_port(self.server.ports[0]), timeout=5.0)

    @contextlib.contextmanager
    def greeted(self) -> Iterator[TcpLink]:
        """A connection whose client has proved that it has the token."""
        link = TcpBackend().connect(self.server.ports[0], soon())
        try:
            link.send(greet(link, TOKEN, soon()).proof, None, soon())
            yield link
        finally:
            link.close()

    def is_well(self) -> None:
        """Assert that another client is served, no slot is stuck, and no thread has raised."""
        until(lambda: State.READING not in self.states(), "no slot is stuck")
        ref = self.write(7)
        assert self.client.read(ref, deadline=5.0) == pattern(SIZE, 7)
        assert not self.uncaught

    def states(self) -> list[State]:
        return [slot.state for slot in self.ring.slot_states()]

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.ring.close()
        self.ring.unlink()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    served = Served(uncaught)
    yield served
    served.close()
    assert not uncaught


def says(connection: socket.socket, data: bytes) -> None:
    """Send the data, close the sending side, and read all that the server answers."""
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def test_a_server_that_gets_no_hello(served: Served) -> None:
    """Random and mutated first bytes, and bytes after them."""

    @MANY
    @given(data=st.one_of(garbage, mutated(hellos)), more=st.one_of(garbage, mutated(requests_for(served.ring.name))))
    def holds(data: bytes, more: bytes) -> None:
        with allocating_at_most(BOUND_BYTES), served.raw() as connection:
            says(connection, data + more)
        assert not served.uncaught

    holds()
    served.is_well()


def test_a_server_that_gets_no_request(served: Served) -> None:
    """After the hello, random and mutated requests: they lose no payload in the ring."""
    ref = served.write()

    @MANY
    @given(data=st.lists(st.one_of(garbage, mutated(requests_for(served.ring.name)), mutated(acks)), max_size=3))
    def holds(data: list[bytes]) -> None:
        with served.greeted() as link, allocating_at_most(BOUND_BYTES):
            says(link._socket, b"".join(data))
        assert not served.uncaught

    holds()
    until(lambda: State.READING not in served.states(), "no slot is stuck")
    held = served.ring.slot_states()[ref.slot]
    assert held.state is State.READY or held.counts.consumed
    served.is_well()


def is_taken(data: bytes, ref: PayloadRef) -> bool:
    try:
        ack = protocol.Ack.unpack(data[: protocol.ACK_BYTES].ljust(protocol.ACK_BYTES, b"?"))
    except TransportError:
        return False
    return len(data) >= protocol.ACK_BYTES and ack == (protocol.AckVerdict.TAKEN, ref.slot, ref.generation)


def test_a_server_that_gets_no_ack(served: Served) -> None:
    """After a request, any bytes in place of the ack: only TAKEN for this payload frees its slot."""

    @MANY
    @given(draw=st.data())
    def holds(draw: st.DataObject) -> None:
        ref = served.write()
        right = protocol.Ack(protocol.AckVerdict.TAKEN, ref.slot, ref.generation).pack()
        data = draw.draw(st.one_of(garbage, mutated(acks), mutated(st.just(right))))
        with served.greeted() as link:
            request(link, ref, budget_s=5.0, deadline=soon())
            says(link._socket, data)
        expected = State.FREE if is_taken(data, ref) else State.READY
        until(lambda: served.states()[ref.slot] is expected, f"the slot is {expected.name}")
        assert not served.uncaught

    holds()
    served.is_well()


# --------------------------------------------------------------------------------------------------- the client


@contextlib.contextmanager
def a_server_that(says_: Callable[[PeerLink], None]) -> Iterator[str]:
    """Run a server that calls `says_` with each link; yields its address."""

    def serve(link: PeerLink) -> None:
        with contextlib.suppress(TransportError):
            says_(link)

    listener = TcpBackend().listen("127.0.0.1", 0, serve)
    try:
        yield listener.address
    finally:
        listener.close()


def heard(link: PeerLink, size: int) -> bytes:
    frame = bytearray(size)
    link.receive_into(memoryview(frame), soon(2.0))
    return bytes(frame)


@MANY
@given(data=st.one_of(garbage, mutated(challenges)))
def test_a_client_that_gets_no_challenge(data: bytes) -> None:
    """Any answer to the hello is a TransportError, since this server does not have the token."""

    def lie(link: PeerLink) -> None:
        heard(link, protocol.HELLO_BYTES)
        link.send(data, None, soon())

    with a_server_that(lie) as address, allocating_at_most(BOUND_BYTES):
        link = TcpBackend().connect(address, soon())
        try:
            with pytest.raises(TransportError):
                greet(link, TOKEN, soon(2.0))
        finally:
            link.close()


ref_of_nothing = PayloadRef(
    node="n1", ring="nvrx-ring-1-2-3", slot=1, generation=5, size=SIZE, checksum="0" * 16, ports=()
)


@MANY
@given(
    data=st.one_of(
        garbage,
        mutated(answers),
        st.builds(lambda size: protocol.Response(protocol.ResponseStatus.OK, size, 0, 5).pack(), numbers),
        st.just(protocol.Response(protocol.ResponseStatus.OK, SIZE, 0, 5).pack()),
    ),
    payload=st.one_of(garbage, st.integers(0, SIZE + 10).map(bytes)),
)
def test_a_client_that_gets_no_answer(data: bytes, payload: bytes) -> None:
    """The result is an answer without a payload, or TransportError. Bytes that are not the ref's are never accepted,
    and no memory is allocated for a size that is not the ref's."""

    def lie(link: PeerLink) -> None:
        heard(link, protocol.REQUEST_BYTES)
        link.send(data, memoryview(payload), soon())

    buffer = memoryview(bytearray(SIZE))
    with a_server_that(lie) as address, allocating_at_most(BOUND_BYTES):
        link = TcpBackend().connect(address, soon())
        try:
            with contextlib.suppress(TransportError):
                answer = request(link, ref_of_nothing, budget_s=1.0, deadline=soon(2.0))
                if answer.status is protocol.ResponseStatus.OK:
                    assert (answer.size, answer.generation) == (SIZE, 5)
                    with pytest.raises(TransportError):
                        receive(link, ref_of_nothing, answer, buffer, soon(2.0))
                    acknowledge(link, ref_of_nothing, protocol.AckVerdict.BAD, soon(2.0))
        finally:
            link.close()


@MANY
@given(data=st.one_of(garbage, mutated(answers)))
def test_a_client_that_settles_with_a_liar(data: bytes) -> None:
    """The result is a status, or TransportError."""

    def lie(link: PeerLink) -> None:
        heard(link, protocol.REQUEST_BYTES)
        link.send(data, None, soon())

    with a_server_that(lie) as address, allocating_at_most(BOUND_BYTES):
        link = TcpBackend().connect(address, soon())
        try:
            with contextlib.suppress(TransportError):
                assert settle(link, "nvrx-ring-1-2-3", 1, 5, soon(2.0)) in protocol.ResponseStatus
        finally:
            link.close()


@settings(MANY, max_examples=40)
@given(data=st.lists(st.one_of(garbage, mutated(challenges), mutated(answers)), min_size=1, max_size=4))
def test_a_whole_client_and_a_liar(data: list[bytes]) -> None:
    """The complete client ends with TransportError, by its deadline."""

    def lie(link: PeerLink) -> None:
        for part in data:
            link.send(part, None, soon())
        heard(link, 1 << 20)

    with a_server_that(lie) as address, client_of("tcp") as client:
        ref = PayloadRef(node="n1", ring="nvrx-ring-1-2-3", slot=1, generation=5, size=SIZE, ports=(address,))
        reading = Async(lambda: client.read(ref, deadline=0.4))
        with pytest.raises(TransportError):
            reading.result(5.0)


texts = st.text(max_size=20)
refs = st.fixed_dictionaries(
    {
        "node": texts,
        "ring": st.one_of(texts, st.just("nvrx-ring-1-2-3")),
        "slot": numbers,
        "generation": numbers,
        "size": st.one_of(st.integers(0, 1000), numbers),
        "checksum": st.one_of(st.just(""), st.just("0" * 16), texts),
        "schema": st.one_of(st.just(""), texts),
        "ports": st.lists(st.one_of(texts, st.sampled_from(["tcp://127.0.0.1:1", "tcp://", "shm://x"])), max_size=3),
    }
)


@settings(MANY, max_examples=100)
@given(record=refs)
def test_a_ref_that_was_made_up(record: dict[str, object]) -> None:
    """A made-up record is no ref, or reading it is a TransportError that allocates no more memory than the client's
    limit."""
    with allocating_at_most(BOUND_BYTES), client_of("shm", "tcp", most_bytes=1000) as client:
        try:
            ref = PayloadRef.from_json(json.dumps(record))
        except TransportError:
            return
        with pytest.raises(TransportError):
            client.read(ref, deadline=0.3)
