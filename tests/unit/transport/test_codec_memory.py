"""Large data is not copied, and memory that must not change is read-only."""

from __future__ import annotations

import gc
import mmap
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

from nvrx_slurm.transport.codec import decode, encode
from tests.unit.transport.objects import ALIGNMENT, address, built, payload_of

BIG = 8 << 20
LITTLE = 64 << 10


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Loads the modules for arrays beforehand, since they take memory once."""
    encoded = encode([np.ones(1)])
    decode(encoded.schema, payload_of(encoded, writable=False))


@pytest.mark.parametrize(
    "array",
    [
        np.ones(BIG, "u1"),
        np.ones((BIG >> 12, 1 << 10), ">f4"),
        np.ones((BIG >> 12, 1 << 10), "f4").T,
        np.ones((2, BIG >> 13, 2, 1 << 8), "f8").transpose(0, 3, 1, 2),
        np.ones(BIG >> 4, [("a", "f8"), ("b", "f8")]),
        np.ones(BIG >> 3, "M8[s]"),
    ],
    ids=["bytes", "big-endian", "columns", "channels-last", "records", "times"],
)
def test_an_array_without_gaps_is_sent_without_a_copy(array: np.ndarray[Any, Any]) -> None:
    """The buffer is the array's own memory; nothing of its size is allocated."""
    tracemalloc.start()
    (buffer,) = encode([array]).buffers
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert address(buffer) == array.ctypes.data
    assert buffer.nbytes == array.nbytes
    assert peak < LITTLE


def test_bytes_are_sent_without_a_copy() -> None:
    """Raw bytes and bytes within an object are sent from their own memory."""
    data, changing = b"x" * BIG, bytearray(BIG)
    assert address(encode(data).buffers[0]) == address(memoryview(data))
    assert address(encode({"a": data}).buffers[0]) == address(memoryview(data))
    assert address(encode([changing]).buffers[0]) == address(memoryview(changing))


@pytest.mark.parametrize("writable", [False, True])
def test_decoded_objects_use_the_memory_of_the_payload(writable: bool) -> None:
    """Each array and view is at its place in the payload, at a multiple of 64 bytes, and writable only if the payload
    is."""
    encoded = encode([np.ones(BIG, "u1"), b"x" * 3, np.ones((3, 5), "f4").T, bytearray(9), np.ones((), "f8")])
    payload = payload_of(encoded, writable=writable)
    tracemalloc.start()
    things: Any = decode(encoded.schema, payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    starts = [0, BIG, BIG + 64, BIG + 128, BIG + 192]
    assert [address(thing) - address(payload) for thing in things] == starts
    assert all(address(thing) % ALIGNMENT == 0 for thing in things)
    assert [things[index].flags.writeable for index in (0, 2, 4)] == [writable] * 3
    assert [things[index].readonly for index in (1, 3)] == [not writable] * 2
    assert peak < LITTLE


def test_a_read_only_array_cannot_be_made_writable() -> None:
    """Setting its flag is an error too: the memory belongs to a ring."""
    encoded = encode([np.ones(3)])
    (array,) = built(encoded.schema, payload_of(encoded))
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2


def test_memory_cannot_be_unmapped_under_an_array() -> None:
    """Closing the memory is an error while an array uses it; otherwise an access would crash the process."""
    encoded = encode([np.ones(3)])
    with mmap.mmap(-1, 4096) as memory:
        memory[: encoded.size] = b"".join(encoded.buffers)
        payload = memoryview(memory)[: encoded.size]
        (array,) = built(encoded.schema, payload.toreadonly())
        del payload
        with pytest.raises(BufferError):
            memory.close()
        assert array.tolist() == [1] * 3
        del array


def test_an_array_on_the_payload_keeps_it() -> None:
    """The memory is kept for as long as an array uses it."""
    encoded = encode([np.ones(3)])
    memory: np.ndarray[Any, Any] = np.frombuffer(bytearray(b"".join(encoded.buffers)), np.uint8)
    gone = weakref.ref(memory)
    (array,) = built(encoded.schema, memory.data)
    del memory
    gc.collect()
    assert gone() is not None
    del array
    gc.collect()
    assert gone() is None


def test_an_array_mapped_from_a_file_is_sent(tmp_path: Any) -> None:
    """It is received as a plain array."""
    mapped = np.memmap(tmp_path / "mapped", "f4", "w+", shape=(4,))
    mapped[:] = 7
    encoded = encode([mapped])
    assert address(encoded.buffers[0]) == mapped.ctypes.data
    (came,) = built(encoded.schema, payload_of(encoded))
    assert type(came) is np.ndarray
    assert came.tolist() == [7] * 4
