"""Copies between buffers: as fast as memcpy, and big ones while other threads run."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport.arguments import buffer
from nvrx_slurm.transport.ring_file import PAGE, up_to

if TYPE_CHECKING:
    from typing_extensions import Buffer

# So much is copied before it is looked at: it is still in the processor's cache then. In smaller pieces memmove may
# take four times as long (glibc's `rep movsb` on AMD, where the buffers are not aligned alike).
#
# Up to here a copy keeps the interpreter's lock, too: a tenth of a millisecond, which other threads hardly notice.
PIECE_BYTES = 1 << 20
# From here on memory is asked for in huge pages; below, malloc gives memory that was used before.
HUGE_BYTES = 4 << 20
_WRITABLE = 1  # PyBUF_WRITABLE


class _PyBuffer(ctypes.Structure):
    """`Py_buffer`, of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None
_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_new_bytearray.restype = ctypes.py_object
_advise = ctypes.CDLL(None).madvise
_advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_move = ctypes.CDLL(None).memmove  # ctypes.memmove keeps the interpreter's lock
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = ctypes.c_void_p


def copy(target: memoryview, source: memoryview, seen: Callable[[memoryview], object] | None = None) -> None:
    """Copy all of `source` to the start of `target`. Both are contiguous bytes. `seen` gets each piece of the target
    once, in order, just after it was written."""
    size = source.nbytes
    if size <= PIECE_BYTES:
        target[:size] = source
        if seen is not None:
            seen(target[:size])
        return
    piece_bytes = size if seen is None else PIECE_BYTES
    with _address(target[:size], _WRITABLE) as to, _address(source, 0) as from_:
        for start in range(0, size, piece_bytes):
            end = min(start + piece_bytes, size)
            _move(to + start, from_ + start, end - start)
            if seen is not None:
                seen(target[start:end])


def copy_hashed(target: memoryview, source: memoryview) -> int:
    """As `copy`; returns the checksum of what is in the target now."""
    if source.nbytes <= PIECE_BYTES:
        copy(target, source)
        return checksum(target[: source.nbytes])
    digest = xxhash.xxh3_64()
    copy(target, source, digest.update)
    return digest.intdigest()


def room(size: int) -> bytearray:
    """Memory that holds anything: it is written next. In huge pages where it is big, else its page faults would take
    longer than all else."""
    # `bytearray(size)` would write zeros first: one more pass over all of the memory.
    made: bytearray = _new_bytearray(None, size)
    if size >= HUGE_BYTES:
        with _address(memoryview(made), _WRITABLE) as start:
            first = up_to(PAGE, start)
            _advise(first, size - (first - start), mmap.MADV_HUGEPAGE)
    return made


def checksum(data: memoryview) -> int:
    """The checksum of payloads: XXH3 with 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def as_bytes(given: Buffer) -> memoryview:
    """The buffer's bytes, without a copy. Raises UsageError where it has none, or they are not in one piece."""
    view = buffer("a payload's buffer", given)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.c_contiguous:
        raise UsageError(
            "a payload's buffer must lie in one piece (C-contiguous), as numpy.ascontiguousarray makes it"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


@contextmanager
def _address(view: memoryview, flags: int) -> Iterator[int]:
    """The address of the view's memory, which stays where it is inside the block."""
    buffer = _PyBuffer()
    try:
        _get_buffer(view, buffer, flags)
        yield buffer.buf
    finally:
        # This does nothing where the buffer was not got.
        _release_buffer(buffer)
