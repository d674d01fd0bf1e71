"""Payloads through servers, networks and readers that fail, on real processes and sockets. A read gives the right
bytes or a clear error by its deadline, and a payload that was not read stays for the next reader."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.lab.faults.sick_ports import FAULTS, PortAction, SickPort
from nvrx_slurm.transport import (
    AsyncPayloadClient,
    Limits,
    PayloadClient,
    PayloadRef,
    PayloadsMissing,
    PayloadTruncated,
    PeerRefused,
    PeerReset,
    SharedRing,
    StaleSlotError,
    TransportError,
    sweep,
)
from nvrx_slurm.transport.protocol import AckVerdict, acknowledge
from nvrx_slurm.transport.slots import State
from tests.transport import nodes
from tests.transport.harness import (
    PROMISED_S,
    ROOM_S,
    WAIT_S,
    Async,
    Strike,
    assert_idle,
    bounded,
    digest_of,
    pattern,
    read_threads,
    rings_of,
    soon,
    stopped,
)
from tests.transport.nodes import BRISK, Consumer, Node, Producer, asked, client_of, node
from tests.waiting import async_until, until

PATIENT = replace(BRISK, calls=1000, pause_s=0.02)
"""A client that retries until its deadline."""

KEEPS_IT_FROM_READERS = [name for name in FAULTS if name != "loses-acks"]
AT_THE_ACK = ["resets-at-ack", "loses-acks"]
HARMFUL = [name for name in FAULTS if name not in AT_THE_ACK]
OF_WHOLE_MESSAGES = [name for name in HARMFUL if FAULTS[name].action not in (PortAction.TRICKLE, PortAction.LATE)]


@pytest.fixture
def producer(scheme: str) -> Iterator[Node]:
    with node(Producer, scheme) as producer:
        yield producer


@pytest.fixture
def tcp_producer() -> Iterator[Node]:
    with node(Producer, "tcp") as producer:
        yield producer


@pytest.fixture
def client(scheme: str) -> Iterator[PayloadClient]:
    with client_of(scheme) as client:
        yield client


def through(ref: PayloadRef, *ports: SickPort | str) -> PayloadRef:
    """The ref of the same payload, with these ports."""
    addresses = tuple(port if isinstance(port, str) else port.address for port in ports)
    return msgspec.structs.replace(ref, ports=addresses)


def is_consumed(producer: Node, count: int) -> None:
    until(lambda: producer.do("counts")["consumed"] == count, f"{count} payloads are consumed")


def all_ready(producer: Node, count: int) -> None:
    until(lambda: producer.do("ready") == count, f"{count} payloads are ready again")


# --------------------------------------------------------------------------------------------------- without faults


@pytest.mark.parametrize("size", [0, 1, 4096, 64 << 20])
def test_a_payload_of_any_size(scheme: str, size: int) -> None:
    """The reader gets what was written, and the slot is free afterwards."""
    with node(Producer, scheme, slot_bytes=64 << 20, slots=2) as producer, client_of(scheme) as client:
        for seed in range(3):
            ref = producer.do("write", size, seed)
            assert client.read(ref, deadline=WAIT_S) == pattern(size, seed)
            is_consumed(producer, seed + 1)
        assert producer.do("states") == [State.FREE] * 2


def test_a_payload_of_256_mib(scheme: str) -> None:
    """The payload arrives whole, in a buffer of the reader's."""
    with node(Producer, scheme, slot_bytes=256 << 20, slots=1) as producer, client_of(scheme) as client:
        ref = producer.do("write", 256 << 20, 7)
        buffer = bytearray(256 << 20)
        client.read(ref, deadline=90.0, into=buffer)
        assert digest_of(buffer) == digest_of(pattern(256 << 20, 7))
        is_consumed(producer, 1)


def test_a_reader_on_the_same_node(tcp_producer: Node) -> None:
    """The reader reads from the ring itself, without a connection, even if all ports are dead."""
    ref = through(tcp_producer.do("write", 1 << 20, 3), "tcp://127.0.0.1:1")
    with client_of("shm", "tcp") as client:
        assert client.read(ref, deadline=WAIT_S) == pattern(1 << 20, 3)
        with pytest.raises(StaleSlotError):
            client.read(ref, deadline=WAIT_S)
    assert tcp_producer.do("counts")["consumed"] == 1
    assert tcp_producer.do("links") == 0


def test_what_is_kept_can_be_read_again(producer: Node, client: PayloadClient) -> None:
    """With `keep` the payload stays for other readers, until one takes it."""
    ref = producer.do("write", 5000, 3)
    for _ in range(3):
        assert client.read(ref, deadline=WAIT_S, keep=True) == pattern(5000, 3)
    assert client.read(ref, deadline=WAIT_S) == pattern(5000, 3)
    with pytest.raises(StaleSlotError):
        client.read(ref, deadline=WAIT_S)


# --------------------------------------------------------------------------------------------- processes that die


def test_a_server_that_is_killed_in_the_middle_of_a_payload(scheme: str) -> None:
    """The reader gets an error with its attempts long before its deadline, and a sweep removes the ring."""
    size = 256 << 20
    with node(Producer, scheme, slots=1, slot_bytes=size) as producer, client_of(scheme) as client:
        ref = producer.do("write", size)
        buffer = bytearray(size)
        strike = Strike(producer.pid, signal.SIGKILL, buffer)
        with bounded(15.0), pytest.raises((PeerReset, PayloadTruncated)) as caught:
            client.read(ref, deadline=60.0, into=buffer)
        strike.watching.result()
        assert caught.value.ref == ref
        assert len(caught.value.attempts) >= 2
        sweep()
        assert not rings_of(producer.pid)


def test_a_reader_that_is_killed_in_the_middle_of_a_payload(scheme: str) -> None:
    """The payload is ready again, and another reader gets it."""
    size = 64 << 20
    with node(Producer, scheme, slots=1, slot_bytes=size) as producer, client_of(scheme) as client:
        ref = producer.do("write", size, 4)
        with node(Consumer, scheme) as reader:
            reader.tell("hang_at", ref)
            until(lambda: producer.do("states") == [State.READING], "it is being read")
            reader.kill()
        all_ready(producer, 1)
        assert client.read(ref, deadline=WAIT_S) == pattern(size, 4)
        is_consumed(producer, 1)


def test_a_reader_that_is_stuck(scheme: str) -> None:
    """A stuck reader keeps its slot only for the time that it has announced. Then another reader gets the payload."""
    size = 64 << 20
    with node(Producer, scheme, slots=1, slot_bytes=size) as producer, client_of(scheme) as client:
        ref = producer.do("write", size, 4)
        link = asked(ref, budget_s=1.5)
        try:
            assert producer.do("states") == [State.READING]
            assert digest_of(client.read(ref, deadline=WAIT_S)) == digest_of(pattern(size, 4))
        finally:
            link.close()


@pytest.mark.parametrize("who", ["producer", "reader"])
def test_a_kill_leaves_nothing_in_shared_memory(scheme: str, who: str) -> None:
    """A killed producer's ring is swept. A reader never has files in shared memory."""
    with node(Producer, scheme) as producer, node(Consumer, "shm", scheme) as reader:
        refs = producer.do("write_many", 2, 1000)
        reader.do("read", refs[0])
        assert rings_of(producer.pid) and not rings_of(reader.pid)
        (producer if who == "producer" else reader).kill()
        if who == "producer":
            sweep()  # these processes share a resource tracker, which would wait for the end of all
            assert not rings_of(producer.pid)
        else:
            assert rings_of(producer.pid)
            assert producer.leave() == 0
            assert not rings_of(producer.pid)


# ----------------------------------------------------------------------------------------------------- faulty ports


@pytest.mark.parametrize("fault", HARMFUL)
def test_a_faulty_port_alone(tcp_producer: Node, fault: str) -> None:
    """The reader gets a TransportError by its deadline and never wrong bytes. The payload stays, and is read once the
    port works."""
    ref = tcp_producer.do("write", 3 << 18, 5)
    with SickPort(ref.ports[0]) as port, client_of("tcp", limits=BRISK) as client:
        port.make_sick(fault)
        ref = through(ref, port)
        with bounded(10.0), pytest.raises(TransportError) as caught:
            client.read(ref, deadline=10.0)
        assert not isinstance(caught.value, StaleSlotError)
        assert port.injected >= 1
        assert caught.value.ref == ref and caught.value.attempts
        all_ready(tcp_producer, 1)
        port.heal()
        assert client.read(ref, deadline=WAIT_S) == pattern(3 << 18, 5)


@pytest.mark.parametrize("fault", OF_WHOLE_MESSAGES)
def test_a_lying_server(scheme: str, producer: Node, client: PayloadClient, fault: str) -> None:
    """The same on each transport, for faults that can be made of whole messages."""
    ref = producer.do("write", 3 << 18, 5)
    lying = through(ref, producer.do("lie", fault))
    with client_of(scheme, limits=BRISK) as brisk, bounded(10.0), pytest.raises(TransportError) as caught:
        brisk.read(lying, deadline=10.0)
    assert not isinstance(caught.value, StaleSlotError)
    all_ready(producer, 1)
    assert client.read(ref, deadline=WAIT_S) == pattern(3 << 18, 5)


@pytest.mark.parametrize(
    "fault", ["silent", "resets", "truncates", "trickles", "garbage", "wrong-checksum", "refuses"]
)
def test_the_deadline_holds_for_every_fault(tcp_producer: Node, fault: str) -> None:
    """A client that retries ends at its deadline, neither earlier nor later, however short that is."""
    ref = tcp_producer.do("write", 3 << 18, 5)
    with SickPort(ref.ports[0]) as port, client_of("tcp", limits=replace(PATIENT, answer_s=2.0)) as client:
        port.make_sick(fault)
        for seconds in (0.0, 0.2, 0.7):
            with bounded(seconds) as deadline, pytest.raises(TransportError):
                client.read(through(ref, port), deadline=seconds)
            assert time.monotonic() >= deadline - PROMISED_S


@pytest.mark.parametrize("fault", HARMFUL)
def test_half_of_the_ports_are_faulty(fault: str) -> None:
    """Every read succeeds, and a port that is known to be faulty is not used again."""
    with (
        node(Producer, "tcp", slots=32, ports=4) as producer,
        contextlib.ExitStack() as open_ones,
        client_of("tcp", limits=replace(BRISK, answer_s=1.0, calls=3)) as client,
    ):
        healthy = producer.do("ports")
        sick = [open_ones.enter_context(SickPort(address)) for address in healthy[:2]]
        for port in sick:
            port.make_sick(fault)
        for seed, ref in enumerate(producer.do("write_many", 20, 100_000)):
            ported = through(ref, *sick, *healthy[2:])
            with bounded(WAIT_S):
                assert client.read(ported, deadline=WAIT_S) == pattern(100_000, seed)
        is_consumed(producer, 20)
        assert all(port.connections <= 2 for port in sick)


@pytest.mark.parametrize("fault", ["silent", "trickles", "silent-in-payload"])
def test_short_deadlines_and_half_of_the_ports_silent(fault: str) -> None:
    """A short deadline leaves a silent port less time than an attempt may take, but other ports are tried first from
    then on: only a few reads fail."""
    with (
        node(Producer, "tcp", slots=32, ports=2) as producer,
        SickPort(producer.do("ports")[0]) as sick,
        client_of("tcp") as client,
    ):
        sick.make_sick(fault)
        outcomes = []
        for ref in producer.do("write_many", 16, 100_000):
            try:
                client.read(through(ref, sick, ref.ports[1]), deadline=0.6)
                outcomes.append("read")
            except TransportError:
                outcomes.append("failed")
        assert outcomes.count("failed") <= 4, outcomes


@pytest.mark.parametrize("fault", ["silent", "resets", "garbage-answer", "truncates"])
def test_all_ports_are_faulty_and_one_recovers(tcp_producer: Node, fault: str) -> None:
    """While there is time, ports in quarantine are tried again, and the one that has recovered is found."""
    ref = tcp_producer.do("write", 100_000, 5)
    with SickPort(ref.ports[0]) as one, SickPort(ref.ports[1]) as other, client_of("tcp", limits=PATIENT) as client:
        for port in (one, other):
            port.make_sick(fault)
        reading = Async(lambda: client.read(through(ref, one, other), deadline=WAIT_S))
        until(lambda: min(one.injected, other.injected) >= 2, "both were found faulty, more than once")
        other.heal()
        assert reading.result() == pattern(100_000, 5)


@pytest.mark.parametrize("fault", ["silent", "resets", "truncates", "garbage-answer"])
def test_half_of_the_ports_lie(scheme: str, fault: str) -> None:
    """The same on each transport: every read succeeds, and lying ports are not used again."""
    with (
        node(Producer, scheme, slots=32) as producer,
        client_of(scheme, limits=replace(BRISK, answer_s=1.0, calls=3)) as client,
    ):
        assert client.read(producer.do("write", 1), deadline=WAIT_S) == pattern(1)  # loads all that a read needs
        sick = [producer.do("lie", fault) for _ in range(2)]
        for seed, ref in enumerate(producer.do("write_many", 20, 100_000)):
            with bounded(WAIT_S):
                assert client.read(through(ref, *sick, *ref.ports), deadline=WAIT_S) == pattern(100_000, seed)
        is_consumed(producer, 21)
        assert max(producer.do("lied_to")) in (1, 2)


@pytest.mark.parametrize("fault", ["silent", "resets", "truncates", "garbage-answer"])
def test_all_ports_lie_and_one_recovers(scheme: str, producer: Node, fault: str) -> None:
    """The same on each transport: a port that has recovered is found."""
    ref = producer.do("write", 100_000, 5)
    sick = [producer.do("lie", fault) for _ in range(2)]
    with client_of(scheme, limits=PATIENT) as client:
        reading = Async(lambda: client.read(through(ref, *sick), deadline=WAIT_S))
        until(lambda: min(producer.do("lied_to")) >= 2, "both were found faulty, more than once")
        producer.do("tell_the_truth", sick[1])
        assert reading.result() == pattern(100_000, 5)


@pytest.mark.parametrize("fault", AT_THE_ACK)
def test_an_ack_that_is_lost(tcp_producer: Node, fault: str) -> None:
    """The reader has its payload, but the server makes it ready again, until the client's next read there settles
    it."""
    first, second = tcp_producer.do("write_many", 2, 100_000)
    with SickPort(first.ports[0]) as port, client_of("tcp", limits=replace(BRISK, calls=3)) as client:
        port.make_sick(fault)
        assert client.read(through(first, port), deadline=WAIT_S) == pattern(100_000, 0)
        all_ready(tcp_producer, 2)
        port.heal()
        assert client.read(through(second, port), deadline=WAIT_S) == pattern(100_000, 1)
        is_consumed(tcp_producer, 2)
        with pytest.raises(StaleSlotError):
            client.read(first, deadline=WAIT_S)


def test_acks_that_are_lost_with_idle_connections(tcp_producer: Node) -> None:
    """Several idle connections end with their acks unread: all are settled later, and no payload is read twice."""
    refs = tcp_producer.do("write_many", 3, 50_000)
    with SickPort(refs[0].ports[0]) as port, client_of("tcp") as client:
        port.make_sick("loses-acks")
        with stopped(tcp_producer.pid):  # no read ends before each has a connection of its own
            reads = [Async(lambda ref=ref: client.read(through(ref, port), deadline=WAIT_S)) for ref in refs]
            until(lambda: port.connections == 3, "three connections")
        assert [read.result() for read in reads] == [pattern(50_000, seed) for seed in range(3)]
        port.go_down()
        all_ready(tcp_producer, 3)  # the server has received none of the acks
        port.heal()
        port.come_back()
        last = tcp_producer.do("write", 50_000, 9)
        assert client.read(through(last, port), deadline=WAIT_S) == pattern(50_000, 9)
        is_consumed(tcp_producer, 4)


def test_an_ack_that_is_read_too_late(tcp_producer: Node) -> None:
    """The server was stopped, and another process of its node released the slot meanwhile: the payload still counts
    as consumed."""
    ref = tcp_producer.do("write", 1000, 3)
    tasks = Path(f"/proc/{tcp_producer.pid}/task")
    with contextlib.closing(asked(ref, budget_s=3.0)) as link, SharedRing.attach(ref.ring) as ring:
        until(lambda: all(" S " in each.read_text() for each in tasks.glob("*/stat")), "the server waits for the Ack")
        with stopped(tcp_producer.pid):
            acknowledge(link, ref, AckVerdict.TAKEN, soon())
            until(lambda: ring.get_ready_count() == 1, "its lease is over")
        is_consumed(tcp_producer, 1)


def test_a_reader_with_another_token(scheme: str) -> None:
    """PeerRefused, whose message names the token; the payload stays."""
    with node(Producer, scheme) as producer, PayloadClient(token=b"x" * 32, transports=(scheme,)) as client:
        ref = producer.do("write", 1000)
        with bounded(10.0), pytest.raises(PeerRefused, match="token"):
            client.read(ref, deadline=10.0)
        assert producer.do("ready") == 1


def test_more_readers_than_a_server_takes(scheme: str) -> None:
    """A reader beyond the limit gets an error that says so, and is served once a place is free."""
    with node(Producer, scheme, most_links=2, ports=1) as producer:
        refs = producer.do("write_many", 3, 1000)
        first, second, third = (client_of(scheme) for _ in range(3))
        with first, second, third:
            for client, ref in ((first, refs[0]), (second, refs[1])):
                client.read(ref, deadline=WAIT_S)
            with pytest.raises(PeerRefused, match="as many connections as it takes"):
                third.read(refs[2], deadline=WAIT_S)
            first.close()
            until(lambda: producer.do("links") == 1, "a place is free")
            assert third.read(refs[2], deadline=WAIT_S) == pattern(1000, 2)


# -------------------------------------------------------------------------------------------- servers that change


def test_a_listener_restarts_on_its_port(producer: Node, client: PayloadClient) -> None:
    """A kept connection that ended with the old listener is no fault of the port: the next read succeeds at once."""
    refs = producer.do("write_many", 3, 1000)
    assert client.read(refs[0], deadline=WAIT_S) == pattern(1000, 0)
    producer.do("close_server")
    with bounded(5.0), pytest.raises(TransportError):
        client.read(refs[1], deadline=WAIT_S)
    producer.do("serve_again")
    for seed in (1, 2):
        with bounded(2.0):
            assert client.read(refs[seed], deadline=WAIT_S) == pattern(1000, seed)


def test_another_ring_behind_the_same_port(scheme: str, client: PayloadClient) -> None:
    """The producer was killed and another one listens on its port: refs to the old ring are stale at once."""
    with node(Producer, scheme, ports=1) as first:
        old = first.do("write", 1000)
    with node(Producer, scheme, ports=[int(old.ports[0].rpartition(":")[2])]) as second:
        new = second.do("write", 1000, 8)
        assert new.ports == old.ports
        with bounded(2.0), pytest.raises(StaleSlotError):
            client.read(old, deadline=10.0)
        assert client.read(new, deadline=WAIT_S) == pattern(1000, 8)


def test_the_writer_laps_the_reader(scheme: str, client: PayloadClient) -> None:
    """The ref of an overwritten payload is stale after one attempt, and never gives another payload's bytes."""
    with node(Producer, scheme, slots=2, overwrite=True) as producer:
        refs = producer.do("write_many", 5, 1000)
        for ref in refs[:3]:
            with pytest.raises(StaleSlotError) as caught:
                client.read(ref, deadline=WAIT_S)
            assert len(caught.value.attempts) == 1
        for seed in (3, 4):
            assert client.read(refs[seed], deadline=WAIT_S) == pattern(1000, seed)
        assert producer.do("counts")["dropped"] == 3


def test_a_writer_that_laps_all_the_time(scheme: str, client: PayloadClient) -> None:
    """While slots are overwritten, a reader gets the payload that its ref names, or StaleSlotError."""
    size, got, stale, end = 300_000, 0, 0, soon()
    with node(Producer, scheme, slots=3, overwrite=True) as producer:
        producer.do("write_on", size)
        while min(got, stale) < 5:
            seed, ref = producer.do("newest")
            try:
                assert client.read(ref, deadline=WAIT_S) == pattern(size, seed)
                got += 1
            except StaleSlotError:
                stale += 1
            assert time.monotonic() < end, f"{got} reads came, and {stale} were stale"
        producer.do("stop_writing")

        def all_is_counted() -> bool:
            counts = producer.do("counts")
            return bool(counts["published"] == counts["consumed"] + counts["dropped"] + producer.do("ready"))

        until(all_is_counted, "the last reader's ack has come, and each payload was counted once")


def test_a_node_is_replaced_during_a_batch(scheme: str) -> None:
    """Payloads of the dead node are left out of the batch, or make it an error that has the other payloads, as
    `on_missing` says."""
    for on_missing in ("skip", "raise"):
        with (
            node(Producer, scheme, slots=16) as stays,
            node(Producer, scheme, slots=16) as dies,
            client_of(scheme) as client,
        ):
            kept, lost = stays.do("write_many", 8, 100_000), dies.do("write_many", 8, 100_000)
            assert client.read(lost.pop(0), deadline=WAIT_S) == pattern(100_000, 0)
            dies.kill()
            with bounded(10.0):
                if on_missing == "skip":
                    fetched = client.fetch_all([*lost, *kept], deadline=10.0, on_missing="skip")
                else:
                    with pytest.raises(PayloadsMissing) as caught:
                        client.fetch_all([*lost, *kept], deadline=10.0, on_missing="raise")
                    fetched = caught.value.fetched
            assert list(fetched) == kept
            assert all(fetched[ref] == pattern(100_000, seed) for seed, ref in enumerate(kept))
            assert set(fetched.missing) == set(lost)
            assert all(isinstance(error, TransportError) for error in fetched.missing.values())
            with node(Producer, scheme) as replacement:
                assert client.read(replacement.do("write", 10, 1), deadline=WAIT_S) == pattern(10, 1)


# ------------------------------------------------------------------------------------------------- many at once


def test_two_hundred_readers_of_two_hundred_payloads(scheme: str) -> None:
    """Each reader gets the payload that it asked for."""
    with (
        node(Producer, scheme, slots=200, slot_bytes=1 << 16, ports=2) as producer,
        client_of(scheme, connections_per_port=16) as client,
    ):
        refs = producer.do("write_many", 200, 50_000)
        reads = [Async(lambda ref=ref: client.read(ref, deadline=60.0)) for ref in refs]
        for seed, read in enumerate(reads):
            assert read.result(60.0) == pattern(50_000, seed)
        is_consumed(producer, 200)


def test_two_hundred_readers_of_the_same_payload(scheme: str) -> None:
    """Exactly one reader gets it. To the others it is stale, and none waits until its deadline."""
    with (
        node(Producer, scheme, slots=2, slot_bytes=1 << 20, ports=2) as producer,
        client_of(scheme, connections_per_port=16) as client,
    ):
        ref = producer.do("write", 1 << 20, 3)
        with bounded(30.0):
            reads = [Async(lambda: client.read(ref, deadline=30.0)) for _ in range(200)]
            outcomes: Counter[str] = Counter()
            for read in reads:
                try:
                    assert read.result(60.0) == pattern(1 << 20, 3)
                    outcomes["read"] += 1
                except StaleSlotError:
                    outcomes["stale"] += 1
        assert outcomes == {"read": 1, "stale": 199}
        is_consumed(producer, 1)


def test_a_batch_of_many(scheme: str, client: PayloadClient) -> None:
    """The batch has each ref once and in order, although some are named twice."""
    with node(Producer, scheme, slots=64, slot_bytes=1 << 16) as producer:
        refs = producer.do("write_many", 64, 20_000)
        fetched = client.fetch_all([*refs, *refs[:5]], deadline=WAIT_S)
        assert list(fetched) == refs
        assert all(fetched[ref] == pattern(20_000, seed) for seed, ref in enumerate(refs))


async def test_a_hundred_reads_of_asyncio(scheme: str) -> None:
    """The event loop runs while reads wait for a stopped server, 32 at once, and each read gets its payload."""
    with node(Producer, scheme, slots=100, slot_bytes=1 << 16) as producer:
        refs, before = producer.do("write_many", 100, 20_000), set(threading.enumerate())
        async with AsyncPayloadClient(client_of(scheme, limits=Limits(answer_s=WAIT_S)), most_reads=32) as client:
            with stopped(producer.pid):
                reads = [asyncio.create_task(client.read(ref, deadline=WAIT_S)) for ref in refs]
                await async_until(lambda: len(read_threads() - before) == 32, "as many reads as there may be")
                assert not any(read.done() for read in reads)
            payloads = await asyncio.gather(*reads)
        assert all(payload == pattern(20_000, seed) for seed, payload in enumerate(payloads))


async def test_a_read_that_is_cancelled(tcp_producer: Node) -> None:
    """The read ends at once, and its payload stays for the next."""
    ref = tcp_producer.do("write", 100_000, 5)
    with SickPort(ref.ports[0]) as port:
        port.make_sick("silent-in-payload")
        async with AsyncPayloadClient(client_of("tcp")) as client:
            task = asyncio.create_task(client.read(through(ref, port), deadline=WAIT_S))
            await asyncio.to_thread(until, lambda: port.injected, "it waits for its payload")
            task.cancel()
            with bounded(0.5), pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(all_ready, tcp_producer, 1)
            assert await client.read(ref, deadline=WAIT_S) == pattern(100_000, 5)


# --------------------------------------------------------------------------------------------------------- the end


def test_a_server_closes_with_reads_in_flight(scheme: str) -> None:
    """The server closes within a second, its readers get a clear error, and the payloads stay in the ring."""
    with node(Producer, scheme, slots=4, slot_bytes=64 << 20) as producer, contextlib.ExitStack() as open_ones:
        refs = producer.do("write_many", 4, 64 << 20)
        links = [asked(ref) for ref in refs]
        for link in links:
            open_ones.callback(link.close)
        assert producer.do("states") == [State.READING] * 4
        assert producer.do("close_server") <= 1.0 + ROOM_S
        all_ready(producer, 4)
        for link in links:
            with pytest.raises((PeerReset, PayloadTruncated)):
                link.receive_payload_into(memoryview(bytearray(64 << 20)), soon(), None)


@pytest.mark.parametrize("fault", ["silent", "silent-after-request", "silent-in-payload", "trickles-hello"])
def test_a_client_closes_with_reads_in_flight(tcp_producer: Node, fault: str) -> None:
    """The reads fail at once with PeerReset, at every stage of the conversation."""
    ref = tcp_producer.do("write", 100_000)
    with SickPort(ref.ports[0]) as port:
        port.make_sick(fault)
        client = client_of("tcp", limits=Limits(answer_s=WAIT_S))
        reading = Async(lambda: client.read(through(ref, port), deadline=WAIT_S))
        until(lambda: port.injected, "it waits")
        with bounded(1.0), pytest.raises(PeerReset):
            client.close()
            reading.result()
        with pytest.raises(PeerReset):
            client.read(ref, deadline=WAIT_S)


def test_a_process_ends_by_itself(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With connections open on both sides, each process ends with exit code 0, and leaves no ring."""
    # A spawned interpreter runs its atexit functions; a process of the fork server ends by os._exit.
    monkeypatch.setattr(nodes, "PROCESSES", multiprocessing.get_context("spawn"))
    with node(Producer, scheme) as producer, node(Consumer, scheme) as reader:
        reader.do("read", producer.do("write", 1000))
        pid = producer.pid
        assert producer.leave() == 0
        assert reader.leave() == 0
        assert not rings_of(pid)


def test_idling_costs_nothing(scheme: str) -> None:
    """With connections open, an idle server and an idle client use almost no processor time."""
    with node(Producer, scheme, ports=4) as producer, node(Consumer, scheme) as reader:
        for seed in range(4):
            reader.do("read", producer.do("write", 1000, seed))
        assert_idle(producer.pid, reader.pid)


def test_an_idle_connection_is_evicted_and_replaced(scheme: str, client: PayloadClient) -> None:
    """The server announces in its hello when it closes idle connections, so the client never uses one that was
    closed."""
    with node(Producer, scheme, eviction_s=0.4, ports=1) as producer:
        refs = producer.do("write_many", 3, 1000)
        for seed, ref in enumerate(refs):
            assert client.read(ref, deadline=WAIT_S) == pattern(1000, seed)
            if seed == 0:
                until(lambda: producer.do("links") == 0, "the server has evicted the connection")


# ------------------------------------------------------------------------------------------------ fork and spawn


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_client_forks(tcp_producer: Node, transport: str) -> None:
    """Child and parent each read over connections of their own, and neither gets the other's payload."""
    refs = tcp_producer.do("write_many", 3, 50_000)
    with node(Consumer, transport) as reader:
        assert reader.do("read", refs[0]) == digest_of(pattern(50_000, 0))
        mine, code = reader.do("fork_and_read", refs[1], refs[2], digest_of(pattern(50_000, 2)))
        assert (mine, code) == (digest_of(pattern(50_000, 1)), 0)
    is_consumed(tcp_producer, 3)


def test_a_server_forks(producer: Node, client: PayloadClient) -> None:
    """A child that ends closes neither its parent's connections nor its ring."""
    refs = producer.do("write_many", 3, 1000)
    assert client.read(refs[0], deadline=WAIT_S) == pattern(1000, 0)
    assert producer.do("fork") == 0
    assert client.read(refs[1], deadline=WAIT_S) == pattern(1000, 1)
    with client_of(producer.do("ports")[0].partition("://")[0]) as another:
        assert another.read(refs[2], deadline=WAIT_S) == pattern(1000, 2)
