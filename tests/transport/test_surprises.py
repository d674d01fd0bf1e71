"""Faults at the worst moment: a lease that ends midway, a lost ack, a client that closes, a read that is cancelled or
interrupted. No payload is lost, and a read returns nothing but its payload."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from nvrx_slurm.lab.faults.sick_ports import SickPort
from nvrx_slurm.transport import (
    AsyncPayloadClient,
    PayloadClient,
    PayloadRef,
    PayloadServer,
    PayloadTimeout,
    PeerReset,
    RingError,
    RingFull,
    SharedRing,
    StaleSlotError,
    TransportError,
    protocol,
    ring_access,
    tcp,
)
from nvrx_slurm.transport.client import END_S, _Round
from nvrx_slurm.transport.fetching import ReadCancellation
from nvrx_slurm.transport.pool import UnconfirmedAck
from nvrx_slurm.transport.protocol import host_and_port
from nvrx_slurm.transport.retrying import Limits
from nvrx_slurm.transport.ring import Claim
from nvrx_slurm.transport.server import offer
from nvrx_slurm.transport.shm import MOST_RINGS
from nvrx_slurm.transport.slots import State
from nvrx_slurm.transport.tcp import TcpBackend
from nvrx_slurm.util.threads import ThreadPool
from tests.transport.harness import TOKEN, WAIT_S, Async, bounded, on_deadline, soon
from tests.transport.nodes import StandingRing, asked, client_of
from tests.waiting import until


class Served:
    """A ring and its server, in this process."""

    def __init__(self, *, ports: int = 2, slot_bytes: int = 1 << 20, checksum: bool = True) -> None:
        self.ring = SharedRing.create(4, slot_bytes, overwrite=False, allow_pickle=True, checksum=checksum)
        self.server = PayloadServer(self.ring, ports=ports, host="127.0.0.1", node="n1", token=TOKEN)

    def write(self, size: int = 1000) -> PayloadRef:
        return self.server.write(bytes(size))

    def state(self, ref: PayloadRef) -> State:
        return self.ring.slot_states()[ref.slot].state

    def close(self) -> None:
        self.server.close()
        self.ring.close()
        self.ring.unlink()


@pytest.fixture
def serving() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def serve(**how: object) -> Served:
        made.append(Served(**how))  # type: ignore[arg-type]  # the test's own keywords
        return made[-1]

    yield serve
    for each in made:
        each.close()


@pytest.fixture
def served(serving: Callable[..., Served]) -> Served:
    return serving()


def through(ref: PayloadRef, *ports: str) -> PayloadRef:
    return msgspec.structs.replace(ref, ports=ports)


class Gate:
    """Building the object of this payload blocks, the first time, until the test opens the gate."""

    entered = threading.Event()
    opened = threading.Event()

    @classmethod
    def shut(cls) -> None:
        cls.entered, cls.opened = threading.Event(), threading.Event()

    @classmethod
    def pass_(cls) -> str:
        cls.entered.set()
        assert cls.opened.wait(WAIT_S)
        return "built"

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return Gate.pass_, ()


@contextlib.contextmanager
def stopped_in_a_step(ring: SharedRing) -> Iterator[None]:
    """A process is stopped while it holds the lock of slot 0."""
    with subprocess.Popen([sys.executable, "-m", "tests.transport.ring_frozen", ring.name]) as process:
        state = Path(f"/proc/{process.pid}/stat")
        try:
            until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the stop")
            yield
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def shut_gate() -> None:
    Gate.shut()


# ------------------------------------------------------------------------------------------------- on the same node


def test_a_read_in_place_that_took_too_long_is_no_consumption(served: Served) -> None:
    """The lease ends while the object is built: the payload is ready again, and the next attempt gets it."""
    ref = served.ring.write(Gate())
    limits = Limits(answer_s=0.05)
    with PayloadClient(transports=("shm",), allow_pickle=True, limits=limits) as client:
        reading = Async(lambda: client.read(ref, deadline=WAIT_S))
        assert Gate.entered.wait(WAIT_S)
        until(lambda: served.ring.get_ready_count() == 1, "its lease has lapsed")
        Gate.opened.set()
        assert reading.result() == "built"
    assert served.ring.metrics().consumed == 1


def test_a_stopped_process_has_the_slots_lock_when_a_read_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be checked then whether the bytes were the payload's: the read still ends at its deadline."""
    monkeypatch.setattr(ring_access, "END_PATIENCE_S", WAIT_S)
    ref = served.ring.write(Gate())
    with PayloadClient(transports=("shm",), allow_pickle=True) as client:
        reading = Async(lambda: client.read(ref, deadline=0.5))
        assert Gate.entered.wait(WAIT_S)
        with stopped_in_a_step(served.ring):
            Gate.opened.set()
            with bounded(0.5), pytest.raises(PayloadTimeout):
                reading.result()
    until(lambda: served.ring.get_ready_count() == 1, "the payload that was not read is ready again")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_ring_is_detached_while_it_is_read(is_known: bool) -> None:
    """A client attaches to more rings than it keeps: a read from the ring that is detached still gets its payload."""
    with contextlib.ExitStack() as open_ones:
        rings = [
            open_ones.enter_context(SharedRing.create(2, 4096, allow_pickle=True)) for _ in range(MOST_RINGS + 1)
        ]
        client = open_ones.enter_context(PayloadClient(transports=("shm",), allow_pickle=True))
        if is_known:
            client.read(rings[0].write(b"before"))
        ref = rings[0].write(Gate())
        reading = Async(lambda: client.read(ref, deadline=WAIT_S))
        assert Gate.entered.wait(WAIT_S)
        for ring in rings[1:]:
            client.read(ring.write(b"another"))
        Gate.opened.set()
        assert reading.result() == "built"
        gc.collect()
        assert f"/{rings[0].name}" not in Path("/proc/self/maps").read_text(), "the ring is still mapped"


def test_rings_are_attached_to_while_others_are_read() -> None:
    """A read reorders the list of attached rings, and an attach iterates over it: both may run at the same time."""
    with contextlib.ExitStack() as open_ones, PayloadClient() as client:
        rings = [open_ones.enter_context(SharedRing.create(1, 4096)) for _ in range(16)]
        refs = [ring.write(b"payload") for ring in rings]
        for ref in refs[:2]:
            client.read(ref, keep=True)
        is_over = threading.Event()

        def read() -> None:
            while not is_over.is_set():
                for ref in refs[:2]:
                    client.read(ref, keep=True)

        reading = Async(read)
        try:
            for ref in refs[2:]:
                assert client.read(ref) == b"payload"
        finally:
            is_over.set()
            reading.result()


def test_the_least_recently_used_ring_is_detached() -> None:
    """A ring that is read all the time stays attached."""
    with contextlib.ExitStack() as open_ones:
        rings = [open_ones.enter_context(SharedRing.create(1, 4096)) for _ in range(MOST_RINGS + 1)]
        client = open_ones.enter_context(PayloadClient(transports=("shm",)))
        for ring in rings:
            client.read(rings[0].write(b"often"))
            client.read(ring.write(b"once"))
        assert client._fetcher._rings.attached(rings[0].name) is not None


def test_too_many_open_files_do_not_make_a_payload_stale(served: Served) -> None:
    """Without a descriptor the ring cannot be attached: that is a RingError, and the next read gets the payload."""
    ref = served.ring.write(b"still here")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with PayloadClient() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(RingError):
                client.read(ref, deadline=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert client.read(ref, deadline=WAIT_S) == b"still here"


def test_too_many_open_files_are_no_fault_of_a_port(served: Served) -> None:
    """The error names this process's limit. Once descriptors are free again, the port is used at once."""
    ref = served.write(b"over the network")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with PayloadClient(token=TOKEN, transports=("tcp",)) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(PayloadTimeout, match="ulimit -n"):
                client.read(ref, deadline=0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not client._fetcher._health
        assert client.read(ref, deadline=WAIT_S) == b"over the network"


def test_too_many_open_files_lose_no_payload_that_was_read(served: Served) -> None:
    """Without a descriptor a client cannot check whether the process that holds a slot still lives: the other
    payloads are delivered, and a write to that slot waits."""
    code = "import sys; from nvrx_slurm.transport import SharedRing\n"
    code += "claim = SharedRing.attach(sys.argv[1]).claim(3); print(claim, flush=True); sys.stdin.read()"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with PayloadClient() as client:
        client.read(served.ring.write(b"the ring is attached"))
        refs = sorted((served.ring.write(b"%d" % number) for number in range(4)), key=lambda ref: ref.slot)
        command = [sys.executable, "-c", code, served.ring.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline()
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                found = client.fetch_all(refs, deadline=3.0, on_missing="skip")
                for number in range(3):
                    served.ring.write(b"%d" % number)
                with pytest.raises(RingFull):
                    served.ring.write(b"waits", timeout_s=0.2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert list(found) == refs[:3]
        assert list(found.missing) == refs[3:]


FEW_THREADS = """
import asyncio, resource, sys, threading
from nvrx_slurm.transport import AsyncPayloadClient, PayloadClient, PayloadRef, TransportError

room, is_async, token = float(sys.argv[1]), sys.argv[2] == "async", bytes.fromhex(sys.argv[3])
refs = [PayloadRef.from_json(line) for line in sys.stdin]
threading.stack_size(1 << 30)
with PayloadClient(token=token, transports=("tcp",)) as client:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(room * (1 << 30)),) * 2)
    try:
        if is_async:
            asyncio.run(AsyncPayloadClient(client).read(refs[0], deadline=1.0))
        print(len(client.fetch_all(refs, deadline=20.0, on_missing="skip")))
    except TransportError as error:
        print(0, type(error).__name__)
"""


@pytest.mark.parametrize(
    ("room", "how", "said"),
    [(2.6, "all", "8"), (0.6, "all", "8"), (0.6, "async", "0 RingError")],
    ids=["for two threads", "for none", "for none of an async read"],
)
def test_no_more_threads_lose_no_payload(room: float, how: str, said: str) -> None:
    """Where no further thread can be started, as at the limit of a cgroup, the running threads read all payloads, or
    the caller does. An async read needs a thread: it ends with a TransportError, and nothing is read."""
    with SharedRing.create(8, 1000) as ring, PayloadServer(ring, host="127.0.0.1", token=TOKEN) as server:
        refs = "\n".join(server.write(b"x").to_json().decode() for _ in range(8))
        command = [sys.executable, "-c", FEW_THREADS, str(room), how, TOKEN.hex()]
        done = subprocess.run(command, input=refs, capture_output=True, text=True, timeout=3 * WAIT_S)
        assert (done.stdout.strip(), done.returncode) == (said, 0), done.stderr
        assert int(said.split()[0]) + ring.get_ready_count() == 8


def test_a_ring_that_was_removed(served: Served) -> None:
    """A ref without ports is stale, one with ports ends with PeerReset. A client that was attached can still read."""
    before, ref = served.write(), served.write()
    attached, other = PayloadClient(token=TOKEN), PayloadClient(token=TOKEN)
    attached.read(before)
    served.close()
    with pytest.raises(PeerReset):
        other.read(ref, deadline=WAIT_S)
    with pytest.raises(StaleSlotError):
        other.read(msgspec.structs.replace(ref, ports=()), deadline=WAIT_S)
    assert bytes(attached.read(ref)) == bytes(1000)
    attached.close()
    other.close()


def test_a_closed_client_reads_nothing(served: Served) -> None:
    """Every read is PeerReset, with and without ports, also in a forked child, and no ring is attached."""
    client = PayloadClient(token=TOKEN)
    client.close()
    for ref in (served.write(), served.ring.write(b"without a port")):
        for _ in range(2):
            with pytest.raises(PeerReset):
                client.read(ref, deadline=WAIT_S)
            client._fetcher.drop()  # as a forked child does
    assert served.ring.get_ready_count() == 2
    assert not len(client._fetcher._rings)


def test_a_client_closes_while_it_reads_in_place(served: Served) -> None:
    """The read fails with PeerReset, and its payload stays."""
    before, ref = served.ring.write(b"before"), served.ring.write(Gate())
    client = PayloadClient(transports=("shm",), allow_pickle=True)
    client.read(before)  # attaches the ring
    reading = Async(lambda: client.read(ref, deadline=WAIT_S))
    assert Gate.entered.wait(WAIT_S)
    client.close()
    Gate.opened.set()
    with pytest.raises(PeerReset):
        reading.result()
    assert served.state(ref) is State.READY


def test_a_client_closes_while_it_connects(served: Served) -> None:
    """The read ends with this attempt, long before its deadline."""
    connecting = threading.Event()
    client = client_of(limits=Limits(answer_s=0.5))
    backend = client._fetcher._pool._backends["tcp"]
    connect = backend.connect

    def connected(address: str, deadline: float) -> protocol.PeerLink:
        connecting.set()
        return connect(address, deadline)

    backend.connect = connected  # type: ignore[method-assign]
    with full_port("127.0.0.1", 0) as number:
        ref = msgspec.structs.replace(served.write(), ports=(f"tcp://127.0.0.1:{number}",))
        reading = Async(lambda: client.read(ref, deadline=10 * WAIT_S))
        assert connecting.wait(WAIT_S)
        client.close()
        with pytest.raises(PeerReset, match="the client was closed") as raised:
            reading.result()
    assert len(raised.value.attempts) == 1


MIXED: list[set[int]] = []


def look(payload: bytes) -> None:
    """Called by the pickle: records which payloads its bytes belong to."""
    MIXED.append(set(np.frombuffer(payload, np.uint8)[:: 1 << 12].tolist()))


class Looked:
    def __init__(self, seed: int, size: int) -> None:
        self._payload = bytes([seed]) * size

    def __reduce__(self) -> tuple[Callable[[bytes], None], tuple[bytes]]:
        return look, (self._payload,)


@pytest.mark.parametrize("transports", [("shm",), ("tcp", "shm")])
def test_no_torn_pickle_is_run(transports: tuple[str, ...]) -> None:
    """A writer overwrites the slot during every other read, whose lease is too short for the copy: no bytes of two
    payloads are unpickled."""
    MIXED.clear()
    with SharedRing.create(1, 9 << 20, allow_pickle=True, lease_s=1e-6) as ring:
        refs: list[PayloadRef] = [ring.write(Looked(0, 8 << 20))]
        reading = threading.Semaphore(0)
        laps = range(1, 21)

        def lap() -> None:
            with SharedRing.attach(ring.handle, allow_pickle=True) as writer:
                for seed in laps:
                    assert reading.acquire(timeout=WAIT_S)
                    refs.append(writer.write(Looked(seed, 8 << 20), timeout_s=WAIT_S))

        lapping = Async(lap)
        with PayloadClient(token=TOKEN, transports=transports, allow_pickle=True) as client:
            for lapped in laps:
                client.read(refs[-1], deadline=WAIT_S, keep=True)
                reading.release()
                while len(refs) == lapped:
                    with contextlib.suppress(TransportError):
                        client.read(refs[-1], deadline=1.0, keep=True)
        lapping.result()
    assert len(MIXED) >= len(laps)
    assert all(len(seeds) == 1 for seeds in MIXED), MIXED


def test_a_buffer_without_a_single_element(served: Served) -> None:
    """An empty buffer of any shape accepts an empty payload."""
    with PayloadClient() as client:
        ref = served.ring.write(b"")
        assert client.read(ref, into=memoryview(np.zeros((0, 4)))) == b""  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- on the wire


def test_a_checksum_is_never_made_of_another_payload() -> None:
    """Where the ring has no checksum, the server computes it, but never of bytes that were written after its own
    lease had ended."""
    with SharedRing.create(1, 4096, checksum=False) as ring:
        ref = ring.write_raw(b"asked for")
        standing = StandingRing(ring, lambda: ring.write_raw(b"something", timeout_s=WAIT_S))
        wanted = protocol.PayloadRequest(protocol.RequestKind.READ, ref.slot, 0, ref.generation, ring.name)
        answer, claim = offer({ring.name: standing}, wanted, keep_s=0.0)  # type: ignore[dict-item]
        assert answer.status is protocol.ResponseStatus.BUSY and claim is None


def test_a_lost_ack_is_settled_again_until_its_read_has_ended(served: Served) -> None:
    """While the server still waits for the lost ack it cannot settle the payload, and the client asks again later."""
    lost, second, third = served.write(), served.write(), served.write()
    link = asked(lost)
    link.receive_payload_into(memoryview(bytearray(1000)), soon(), None)
    with client_of("tcp") as client:
        client._fetcher._pool.keep_unconfirmed([UnconfirmedAck(lost.ring, lost.slot, lost.generation)])
        client.read(second, deadline=WAIT_S)
        assert served.state(lost) is State.READING
        link.close()
        until(lambda: served.state(lost) is State.READY, "the server sees that the reader has left")
        client.read(third, deadline=WAIT_S)
    until(lambda: served.state(lost) is State.FREE, "the lost ack is settled")
    until(lambda: served.ring.metrics().consumed == 3, "the last ack has arrived too")


def test_a_silent_port_does_not_take_the_time_of_a_large_payload(serving: Callable[..., Served]) -> None:
    """`answer_s` limits how long a port may be silent, however large the payload is."""
    served = serving(ports=1)
    ref = served.write(1 << 20)
    with SickPort(None) as silent, client_of("tcp", limits=Limits(answer_s=0.3, bytes_per_s=1e5)) as client:
        for _ in range(2):  # one of two reads begins with the silent port
            again = through(ref, silent.address, *ref.ports)
            with bounded(3.0):
                assert client.read(again, deadline=WAIT_S, keep=True) == bytes(1 << 20)
        assert silent.injected


def test_a_wait_for_a_connection_ends_only_at_the_deadline(serving: Callable[..., Served]) -> None:
    """All connections are in use for longer than all attempts may take: that is no fault of the port, and the read
    waits until its deadline."""
    served = serving(ports=1)
    large, small = served.write(), served.write(1)
    limits = Limits(answer_s=1.0, calls=1, bytes_per_s=1000 / WAIT_S)
    with SickPort(large.ports[0]) as port, client_of("tcp", connections_per_port=1, limits=limits) as client:
        port.make_sick("silent-in-payload")
        holds = ReadCancellation()
        holding = Async(lambda: client._fetcher.read(through(large, port.address), soon(), holds))
        until(lambda: port.injected, "it has the only connection")
        port.heal()
        with on_deadline(2.5):
            client.read(through(small, port.address), deadline=2.5)
        waiting = Async(lambda: client.read(through(small, port.address), deadline=WAIT_S))
        holds.abort()
        with pytest.raises(PeerReset):
            holding.result()
        assert waiting.result() == bytes(1)


class _CancelsItsRead:
    """Unpickling this object cancels the read that does it."""

    read: ReadCancellation

    def __reduce__(self) -> tuple[object, ...]:
        return _cancel, ()


def _cancel() -> _CancelsItsRead:
    _CancelsItsRead.read.abort()
    return _CancelsItsRead()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_read_that_is_cancelled_once_its_payload_has_arrived_leaves_it_there(
    served: Served, transport: str
) -> None:
    """A cancelled read does not return its payload, which another read gets."""
    ref = served.server.write(_CancelsItsRead())
    _CancelsItsRead.read = ReadCancellation()
    with client_of(transport, allow_pickle=True) as client:
        with pytest.raises(PeerReset, match="it was cancelled"):
            client._fetcher.read(ref, soon(), _CancelsItsRead.read)
        until(lambda: served.state(ref) is State.READY, "its slot is ready again")
        assert isinstance(client.read(ref, deadline=WAIT_S), _CancelsItsRead)


def test_a_batch_has_the_payload_that_was_acknowledged_as_its_time_ended(served: Served) -> None:
    """The reading thread stores the payload a moment after the batch was cancelled, and it is in the result."""
    reads: list[PayloadRef] = []

    def acknowledged(ref: PayloadRef, deadline: float, abort: ReadCancellation) -> object:
        reads.append(ref)
        abort.pause(soon())
        return "payload"

    batch = _Round(acknowledged, [served.write()], time.monotonic() - END_S + 0.3)
    batch.run(ReadCancellation(), ThreadPool("test"), 1)
    assert list(batch.got) == reads, "a thread that has not begun by then reads nothing"


async def test_a_cancelled_read_does_not_count_against_its_port(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does asyncio log an exception that was never retrieved."""
    ref = served.write(100_000)
    with SickPort(ref.ports[0]) as port:
        port.make_sick("silent-in-payload")
        async with AsyncPayloadClient(client_of("tcp", limits=Limits())) as client:
            task = asyncio.create_task(client.read(through(ref, port.address), deadline=WAIT_S))
            await asyncio.to_thread(until, lambda: port.injected, "it waits for its payload")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not client._client._fetcher._health
            del task
            gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_read_is_cancelled_while_it_waits_for_a_connection(served: Served) -> None:
    """Such a read ends at once too."""
    ref, other = served.write(100_000), served.write()
    with SickPort(ref.ports[0]) as port:
        port.make_sick("silent-in-payload")
        limits = Limits(answer_s=WAIT_S)
        async with AsyncPayloadClient(client_of("tcp", connections_per_port=1, limits=limits)) as client:
            first = asyncio.create_task(client.read(through(ref, port.address), deadline=WAIT_S))
            await asyncio.to_thread(until, lambda: port.injected, "the only connection is in use")
            second = asyncio.create_task(client.read(through(other, port.address), deadline=WAIT_S))
            pool = client._client._fetcher._pool
            await asyncio.to_thread(until, lambda: pool._ports[port.address].waiting, "it waits")
            for task in (second, first):
                task.cancel()
                with bounded(0.1), pytest.raises(asyncio.CancelledError):
                    await task


def test_interrupted_reads_keep_no_connection(served: Served) -> None:
    """Signal handlers raise at any point of a read: the only connection is free for the next read."""
    command = [sys.executable, "-m", "tests.transport.interrupted", served.write().to_json().decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * WAIT_S)
    assert done.returncode == 0, done.stderr


async def test_a_read_that_gets_no_place_ends_by_its_deadline(served: Served) -> None:
    """Other reads may hold all places of the client for long: a read that waits for one ends with an error that says
    so, alone and in a batch."""
    held, free = served.write(), served.write()
    claim = served.ring.claim_ref(held, lease_s=60.0)
    assert isinstance(claim, Claim)
    async with AsyncPayloadClient(client_of("tcp"), most_reads=1) as client:
        slow = asyncio.create_task(client.read(held, deadline=WAIT_S))
        await asyncio.sleep(0)
        with bounded(0.3), pytest.raises(PayloadTimeout, match="most_reads=1"):
            await client.read(free, deadline=0.3)
        with bounded(0.3):
            fetched = await client.fetch_all([free], deadline=0.3, on_missing="skip")
        assert isinstance(fetched.missing[free], PayloadTimeout)
        slow.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slow
        assert bytes(await client.read(free, deadline=WAIT_S)) == bytes(1000)
    claim.drop()


@contextlib.contextmanager
def full_port(host: str, number: int) -> Iterator[int]:
    """A port that accepts no connection; yields its number."""
    with contextlib.ExitStack() as open_ones:
        full = open_ones.enter_context(socket.create_server((host, number), backlog=0))
        for _ in range(3):
            each = open_ones.enter_context(socket.socket())
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def test_a_silent_address_of_a_host_leaves_time_for_its_others() -> None:
    """Of a host's two addresses the first accepts no connection: the second is tried in time."""
    with contextlib.ExitStack() as open_ones:
        # Opened first: a port that is free at this address is free at the other one too.
        listener = TcpBackend().listen("127.0.0.1", 0, lambda link: None)
        open_ones.callback(listener.close)
        number = host_and_port(listener.address)[1]
        open_ones.enter_context(full_port("127.0.0.2", number))
        key = ("two.addresses.invalid", number)
        tcp._known[key] = soon(), [(socket.AF_INET, (host, number)) for host in ("127.0.0.2", "127.0.0.1")]
        open_ones.callback(tcp._known.pop, key, None)
        TcpBackend().connect(f"tcp://{key[0]}:{number}", soon(5.0)).close()


def test_a_peer_that_resets_at_once_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is reset before it can be used is closed, and not left to the garbage collector."""
    made: list[socket.socket] = []
    connected = tcp._connected
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connected_and_reset(*where: Any) -> socket.socket:
            made.append(connected(*where))
            theirs, _ = server.accept()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            return made[0]

        monkeypatch.setattr(tcp, "_connected", connected_and_reset)
        with pytest.raises(PeerReset, match="no connection"):
            TcpBackend().connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", soon())
    assert made[0].fileno() == -1


# ------------------------------------------------------------------------------------------------------ batches


def test_a_batch_that_is_complete_ends_at_once(served: Served) -> None:
    """There is no pause before a round without requests."""
    with PayloadClient(token=TOKEN, limits=Limits(pause_s=WAIT_S)) as client, bounded(0.2):
        assert len(client.fetch_all([served.write()], deadline=WAIT_S)) == 1
