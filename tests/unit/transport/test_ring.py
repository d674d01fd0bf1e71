"""What users of a ring can rely on, in one process."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport.errors import (
    PayloadCorrupt,
    PayloadTimeout,
    RingError,
    RingFull,
    StaleSlotError,
    TransportError,
)
from nvrx_slurm.transport.ring import Claim, RingHandle, SharedRing
from nvrx_slurm.transport.ring_file import Glance
from nvrx_slurm.transport.slots import Refusal, State

WAIT_S = 30.0
SLOTS, SIZE = 3, 3 << 20


@pytest.fixture
def ring() -> Iterator[SharedRing]:
    """A ring with three slots of three mebibytes."""
    with SharedRing.create(SLOTS, SIZE) as ring:
        yield ring


@pytest.fixture
def strict() -> Iterator[SharedRing]:
    """A ring that overwrites nothing and has long leases."""
    with SharedRing.create(SLOTS, SIZE, overwrite=False, lease_s=3600) as ring:
        yield ring


def claimed(ring: SharedRing, slot: int = 0, **options: float) -> Claim:
    claim = ring.claim(slot, **options)  # type: ignore[arg-type]
    assert isinstance(claim, Claim)
    return claim


def test_what_is_written_is_read(ring: SharedRing) -> None:
    """Another attachment reads it as a copy of its own, and the slot is free afterwards."""
    other = SharedRing.attach(pickle.loads(pickle.dumps(ring.handle)))
    image = np.arange(12, dtype="f4").reshape(3, 4)
    ref = ring.write({"image": image, "step": 7})
    read = other.read(ref)
    assert isinstance(read, dict) and read["step"] == 7
    assert np.array_equal(read["image"], image) and read["image"].flags.writeable
    assert (ref.ring, ref.slot, ref.generation, ref.node, ref.ports) == (ring.name, 0, 1, "", ())
    assert ring.metrics().consumed == 1 and not ring.is_full()
    other.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 64 << 10, (64 << 10) + 1, (1 << 20) + 1, SIZE])
@pytest.mark.parametrize("checksum", [False, True])
def test_every_size(size: int, checksum: bool) -> None:
    """Payloads of no byte, of one byte, of sizes around lines and pieces, and of a whole slot are read back."""
    data = np.random.default_rng(size).bytes(size)
    with SharedRing.create(1, SIZE, checksum=checksum) as ring:
        ref = ring.write_raw([data[: size // 3], bytearray(data[size // 3 :])])
        assert (ref.size, bool(ref.checksum)) == (size, checksum)
        with ring.view(ref, keep=True) as viewed:
            assert viewed == data
        assert ring.read(ref) == data


def test_payloads_begin_at_lines(ring: SharedRing) -> None:
    """They begin at multiples of 64 bytes, so that views of arrays are aligned."""
    for _ in range(SLOTS):
        ring.write_raw(b"x")
    for slot in range(SLOTS):
        claim = claimed(ring, slot)
        assert np.frombuffer(claim.payload, np.uint8).ctypes.data % 64 == 0
        claim.finish(consumed=True)


def test_the_oldest_comes_first(ring: SharedRing) -> None:
    """Payloads are read in the order of writing, regardless of their slots."""
    refs = [ring.write_raw(b"%d" % number) for number in range(SLOTS + 2)]
    assert [ref.slot for ref in refs] == [0, 1, 2, 0, 1]
    assert all(older.generation < newer.generation for older, newer in pairwise(refs))
    assert ring.get_ready_indices() == [2, 0, 1] and ring.is_full()
    assert [ring.try_read() for _ in range(SLOTS + 1)] == [b"2", b"3", b"4", None]
    assert ring.metrics().dropped == 2


def meanwhile(ring: SharedRing, *acts: Callable[[], object]) -> None:
    """Each act happens once, right after `ring` has looked at its slots, as if another process did it."""
    memory, pending = ring._steps.memory, list(acts)
    glance = memory.glance

    def looked() -> list[Glance]:
        seen = glance()
        if pending:
            pending.pop(0)()
        return seen

    memory.glance = looked  # type: ignore[method-assign]


def test_the_oldest_comes_first_while_others_write(ring: SharedRing) -> None:
    """A slot that is written again after the look has the newest payload. A ring is not empty because all payloads
    that were seen are gone."""
    other = SharedRing.attach(ring.handle)
    for number in range(SLOTS):
        other.write(number)
    meanwhile(ring, lambda: other.write(3), lambda: [other.write(number) for number in (4, 5, 6)])
    assert [ring.try_read() for _ in range(SLOTS + 1)] == [4, 5, 6, None]
    for number in range(SLOTS):
        other.write(number)
    meanwhile(ring, lambda: other.write(3))
    assert [ring.try_read() for _ in range(SLOTS + 1)] == [1, 2, 3, None]
    other.close()


def test_the_oldest_is_dropped_while_others_write(ring: SharedRing) -> None:
    """Of two writers that look at the same time, the second does not drop what the first has written. A ring is not
    full because all payloads that were seen are gone."""
    other = SharedRing.attach(ring.handle)
    for number in range(SLOTS):
        other.write(number)
    meanwhile(ring, lambda: other.write(3), lambda: [other.write(number) for number in (5, 6, 7)])
    ring.write(4)
    assert [other.read() for _ in range(SLOTS)] == [6, 7, 4]
    for number in range(SLOTS):
        other.write(number)
    meanwhile(ring, lambda: other.write(3))
    ring.write(4)
    assert [other.try_read() for _ in range(SLOTS + 1)] == [2, 3, 4, None]
    other.close()


def test_a_lapped_ref_is_stale(ring: SharedRing) -> None:
    """A consumed ref, and one of a slot that does not exist, are stale too; a ref never gives another payload."""
    refs = [ring.write_raw(b"%d" % number) for number in range(SLOTS + 1)]
    with pytest.raises(StaleSlotError, match="another payload") as raised:
        ring.read(refs[0])
    assert raised.value.ref == refs[0]
    assert ring.read(refs[1]) == b"1"
    with pytest.raises(StaleSlotError, match="consumed"):
        ring.try_read(refs[1])
    assert ring.claim(99, 1) is ring.claim(-1, 1) is Refusal.STALE


def test_without_overwriting_a_full_ring_refuses(strict: SharedRing) -> None:
    """It raises RingFull at once or after the timeout, with the states of its slots; no payload is dropped."""
    for _ in range(SLOTS):
        strict.write_raw(b"x")
    with pytest.raises(RingFull, match="3 READY"):
        strict.write_raw(b"x")
    begun = time.monotonic()
    with pytest.raises(RingFull):
        strict.write_raw(b"x", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - begun < WAIT_S
    assert strict.metrics().dropped == 0


def test_a_payload_that_is_being_read_is_not_overwritten(ring: SharedRing) -> None:
    """This holds in a ring that overwrites, too; if all payloads are being read, the ring is full."""
    ring.write_raw(b"kept")
    claims = [claimed(ring)]
    for _ in range(SLOTS * 2):
        assert ring.write_raw(b"x").slot != 0
    claims += [claimed(ring, slot) for slot in (1, 2)]
    with pytest.raises(RingFull, match="3 READING"):
        ring.write_raw(b"x")
    assert claims[0].payload == b"kept"
    assert all(claim.finish(consumed=True) for claim in claims)


def test_waiting_for_a_slot_and_for_a_payload(strict: SharedRing) -> None:
    """A waiting writer wakes up when a slot is free, a waiting reader when a payload is ready."""
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(strict.read(timeout_s=WAIT_S) for _ in range(50)))
    reader.start()
    for number in range(50):
        strict.write_raw(b"%d" % number, timeout_s=WAIT_S)
    reader.join(WAIT_S)
    assert got == [b"%d" % number for number in range(50)]


def test_a_read_with_a_deadline(ring: SharedRing) -> None:
    """The read ends at its deadline, and the error has the ref for which it waited."""
    with pytest.raises(PayloadTimeout):
        ring.read(timeout_s=0.05)
    ref = ring.write_raw(b"x")
    claim = claimed(ring)
    with pytest.raises(PayloadTimeout) as raised:
        ring.read(ref, timeout_s=0.05)
    assert raised.value.ref == ref
    assert claim.finish(consumed=False) and ring.read(ref) == b"x"


def test_a_read_ends_once(ring: SharedRing, caplog: pytest.LogCaptureFixture) -> None:
    """Each later end changes nothing, is counted, and is logged in one line."""
    ring.write_raw(b"x")
    claim = claimed(ring)
    assert ring.release_reading(claim)
    again = claimed(ring)
    with caplog.at_level(logging.WARNING, "nvrx.transport"):
        assert not ring.mark_consumed(claim)
    assert len(caplog.records) == 1 and "too late" in caplog.text
    assert again.is_ours() and not claim.is_ours()
    assert ring.mark_consumed(again)
    assert ring.metrics()[:6] == (1, 1, 0, 1, 0, 1)


def test_a_lease_that_lapses(ring: SharedRing) -> None:
    """The payload is ready again, and the end of the read is too late; a renewed lease does not lapse."""
    ref = ring.write_raw(b"x")
    slow = claimed(ring, lease_s=0.0)
    assert ring.get_ready_count() == 1
    other = claimed(ring, lease_s=0.0)
    assert other.renew(WAIT_S) and ring.get_ready_count() == 0
    assert not slow.finish(consumed=True)
    assert ring.claim_ref(ref) is Refusal.BUSY
    assert other.finish(consumed=True)


def test_a_lease_that_ended_before_the_machine_began(ring: SharedRing) -> None:
    """It lapses like any other lease."""
    ref = ring.write(b"x")
    with pytest.raises(StaleSlotError, match="longer than its lease"), ring.view(ref, lease_s=-1e6):
        assert ring.get_ready_count() == 1
    claim = claimed(ring)
    assert claim.renew(-1e6) and ring.get_ready_count() == 1


def test_a_payload_that_is_copied_and_then_taken(ring: SharedRing) -> None:
    """It can be consumed or left for others; taking fails if it is gone, has another size, or was overwritten
    meanwhile."""
    ref, buffer = ring.write_raw(b"here it is"), memoryview(bytearray(10))
    assert ring.peek(ref, buffer) and buffer == b"here it is"
    assert ring.take(ref, consume=False) and ring.get_ready_count() == 1
    assert not ring.take(replace(ref, size=9), consume=True)
    assert ring.take(ref, consume=True) and not ring.take(ref, consume=True)
    assert not ring.peek(ref, buffer)
    lapped = ring.write_raw(b"the second")
    assert ring.peek(lapped, buffer)
    for _ in range(SLOTS):
        ring.write_raw(b"a later one")
    assert not ring.take(lapped, consume=True)
    for elsewhere in (replace(ref, slot=SLOTS), replace(ref, size=SIZE + 1)):
        assert not ring.peek(elsewhere, memoryview(bytearray(elsewhere.size)))
        assert not ring.take(elsewhere, consume=True)


def test_a_claim_that_is_forgotten(strict: SharedRing) -> None:
    """When its claim is garbage-collected the payload is ready again; a forgotten write leaves a free slot."""
    strict.write_raw(b"x")
    claim = claimed(strict)
    writing = strict.begin(10)
    assert strict.get_ready_count() == 0
    del claim, writing
    gc.collect()
    assert strict.get_ready_count() == 1
    assert [slot.state for slot in strict.slot_states()] == [State.READY, State.FREE, State.FREE]


def test_a_view_is_the_ring_itself(ring: SharedRing) -> None:
    """It is no copy and is read-only; leaving it consumes the payload."""
    ref = ring.write(np.arange(5))
    with ring.view(ref) as array:
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable
        assert np.shares_memory(array, np.frombuffer(ring.memory, np.uint8))
        assert ring.claim_ref(ref) is Refusal.BUSY
        del array
    with pytest.raises(StaleSlotError), ring.view(ref):
        pass


def test_a_view_that_fails_or_keeps(ring: SharedRing) -> None:
    """The payload stays in the ring."""
    ref = ring.write_raw(b"x")
    with pytest.raises(ZeroDivisionError), ring.view(ref):
        raise ZeroDivisionError
    with ring.view(ref, keep=True) as viewed:
        assert viewed == b"x"
    assert ring.read(ref, consume=False) == ring.read(ref) == b"x"


def test_a_view_for_longer_than_its_lease(ring: SharedRing) -> None:
    """It raises StaleSlotError, since other processes may have written there."""
    ref = ring.write_raw(b"x")
    with pytest.raises(StaleSlotError, match="longer than its lease"), ring.view(ref, lease_s=0.0):
        ring.write_raw([b"y"] * 3)
        ring.get_ready_count()


def test_bytes_that_are_not_those_that_were_written(ring: SharedRing) -> None:
    """PayloadCorrupt is raised; the payload stays, under the ref of the error, until it is settled."""
    ref = ring.write_raw(b"right" * 100)
    claim = claimed(ring)
    offset = np.frombuffer(claim.payload, np.uint8).ctypes.data - np.frombuffer(ring.memory, np.uint8).ctypes.data
    ring.memory[offset + 7] ^= 1
    claim.finish(consumed=False)
    with pytest.raises(PayloadCorrupt) as raised:
        ring.read()
    assert raised.value.ref == ref
    assert ring.get_ready_count() == 1
    assert ring.settle(ref.slot, ref.generation) and not ring.settle(ref.slot, ref.generation)
    assert ring.get_ready_count() == 0


def test_a_writing_step_by_step(ring: SharedRing) -> None:
    """Pieces may be written in any order: the checksum is of the final bytes. A piece beyond the payload's size is
    refused."""
    writing = ring.begin(10, "")
    writing.copy_in(5, b"world")
    writing.copy_in(0, b"xxxxx")
    writing.copy_in(0, b"hello")
    with pytest.raises(RingError, match="beyond a payload of 10 bytes"):
        writing.copy_in(6, b"world")
    ref = writing.publish()
    assert ring.read(ref, consume=False) == b"helloworld"
    with pytest.raises(StaleSlotError, match="ended before"):
        writing.publish()
    assert not writing.abandon()
    assert ring.read(ref) == b"helloworld"


def test_a_copy_in_pieces(ring: SharedRing) -> None:
    """`seen` gets each byte once, in order; a part of a payload can be copied alone."""
    data = np.random.default_rng(1).bytes(SIZE)
    ring.write_raw(data)
    claim = claimed(ring)
    buffer, seen = bytearray(SIZE - 10), list[bytes]()
    claim.copy_into(buffer, 10, lambda piece: seen.append(bytes(piece)))
    assert buffer == b"".join(seen) == data[10:] and len(seen) > 1
    with pytest.raises(ValueError, match="cannot be read"):
        claim.copy_into(bytearray(10), SIZE - 9)
    claim.finish(consumed=True)


def test_what_does_not_fit(ring: SharedRing) -> None:
    """The message has both sizes; no slot is used for it."""
    with pytest.raises(RingError, match=f"{SIZE + 1} bytes .* {SIZE} bytes"):
        ring.write_raw(bytes(SIZE + 1))
    with pytest.raises(RingError, match="schema"):
        ring.write_raw(b"", "é" * (40 << 10))
    with pytest.raises(UsageError, match="one piece"):
        ring.write_raw(memoryview(b"abcdef")[::2])
    assert ring.metrics().states[State.FREE] == SLOTS


def test_pickles_are_only_for_sides_that_allow_them(ring: SharedRing) -> None:
    """The writing side and the reading side must both allow them."""
    with pytest.raises(TransportError, match="allow_pickle"):
        ring.write({1, 2})
    trusting = SharedRing.attach(ring.name, allow_pickle=True)
    ref = trusting.write({1, 2})
    with pytest.raises(TransportError, match="allow_pickle"):
        ring.read(ref)
    assert trusting.read(ref) == {1, 2}
    trusting.close()


def test_a_closed_ring(ring: SharedRing) -> None:
    """Its claims are released, every use raises RingError, and arrays that use its memory stay valid."""
    other = SharedRing.attach(ring.handle)
    ref = ring.write(np.arange(1000))
    claim = other.claim_ref(ref)
    assert isinstance(claim, Claim)
    array = np.frombuffer(claim.payload[: 8 * 1000], np.int64)
    writing = other.begin(10)
    other.close()
    other.close()
    assert ring.get_ready_count() == 1 and array.sum() == 499500
    for use in (
        other.read,
        other.is_full,
        other.metrics,
        lambda: other.write(1),
        lambda: claim.finish(consumed=True),
        lambda: claim.renew(1.0),
        lambda: writing.copy_in(0, b"x"),
        writing.publish,
    ):
        with pytest.raises(RingError, match="is closed"):
            use()
    assert ring.read(ref) is not None
    writing.abandon()
    assert ring.metrics().states[State.FREE] == SLOTS


def test_a_ref_of_another_ring(ring: SharedRing, strict: SharedRing) -> None:
    """It is refused before anything is read."""
    with pytest.raises(RingError, match="is not of ring"):
        ring.read(strict.write_raw(b"x"))


def test_unlinking(ring: SharedRing) -> None:
    """No process can attach any more; attached ones can go on; unlinking again is no error."""
    other = SharedRing.attach(ring.handle)
    ring.unlink()
    ring.unlink()
    with pytest.raises(RingError, match="unlinked"):
        SharedRing.attach(ring.handle)
    ref = ring.write_raw(b"still")
    assert other.read(ref) == b"still"
    other.unlink()
    other.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "nvrx-ring-", "", "nvrx-ring-1/2"])
def test_names_that_are_none(name: str) -> None:
    """They are refused before they are used as a path."""
    with pytest.raises(RingError, match="no name of a ring"):
        SharedRing.attach(RingHandle(name))


@pytest.mark.parametrize(
    ("name", "number"),
    [("slots", 0), ("slots", 1 << 20), ("slot_bytes", 0), ("slot_bytes", 1 << 50), ("lease_s", 0)],
)
def test_rings_that_cannot_be(name: str, number: float) -> None:
    """RingError names the option, its valid range, and the number that was given."""
    with pytest.raises(RingError, match=rf"{name} must be .*\d, it is {number}"):
        SharedRing.create(**{name: number})  # type: ignore[arg-type]


def test_draining(ring: SharedRing) -> None:
    """It waits until all payloads are read, and returns how many are not."""
    ring.write_raw(b"x")
    assert ring.drain(0.02) == 1
    reader = threading.Thread(target=lambda: ring.read(timeout_s=WAIT_S))
    reader.start()
    assert ring.drain(WAIT_S) == 0
    reader.join()


def test_many_threads(strict: SharedRing) -> None:
    """Eight threads write and eight read: each payload is read once, unchanged."""
    count, got, guard = 100, list[bytes](), threading.Lock()

    def write(number: int) -> None:
        for at in range(count):
            strict.write_raw(b"%d/%d;" % (number, at) * 200, timeout_s=WAIT_S)

    def read() -> None:
        for _ in range(count):
            payload = strict.read(timeout_s=WAIT_S)
            assert isinstance(payload, memoryview)
            with guard:
                got.append(bytes(payload))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    threads += [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
    assert sorted(got) == sorted(b"%d/%d;" % (number, at) * 200 for number in range(8) for at in range(count))
    metrics = strict.metrics()
    assert metrics.published == metrics.consumed == 8 * count and metrics.dropped == metrics.late == 0
