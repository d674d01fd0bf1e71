"""Objects of all kinds to send, and the comparison of what was received with what was sent."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nvrx_slurm.transport.codec import Encoded, decode

ALIGNMENT = 64

Key = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
Text = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)
Bits = st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack(">d", bits)[0])

Plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**300), 2**300), st.floats(), Bits, Key, Text
)
Buffers = st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(bytearray))

Elements = st.one_of(hnp.scalar_dtypes(), hnp.byte_string_dtypes(min_len=1), hnp.unicode_string_dtypes(min_len=1))


def has_titles(dtype: np.dtype[Any]) -> bool:
    """Whether the type has a second name for a field, which is not in the bytes and is not sent."""
    fields = (dtype.fields or {}).values()
    return any(len(field) > 2 or has_titles(field[0].base) for field in fields)


Records = hnp.nested_dtypes(Elements, max_leaves=6, max_itemsize=400).filter(
    lambda dtype: 0 < dtype.itemsize <= 400 and not has_titles(dtype.base)
)
Types = st.one_of(Elements, Records).filter(lambda dtype: dtype.subdtype is None)
Shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any bits, any type, any shape, and any layout in memory that transposing, slicing or repeating can give."""
    dtype, shape = draw(Types), draw(Shapes)
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(size)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, bits)
    for axis in draw(st.lists(st.integers(0, 3), max_size=2)):
        if axis < array.ndim:
            array = draw(st.sampled_from(TURNS))(array, axis)
    return array


TURNS = (
    lambda array, axis: array.T,
    lambda array, axis: np.moveaxis(array, axis, 0),
    lambda array, axis: np.flip(array, axis),
    lambda array, axis: array[(slice(None),) * axis + (slice(None, None, 2),)],
    lambda array, axis: np.asfortranarray(array),
    lambda array, axis: np.broadcast_to(array, (2, *array.shape)),
)

Scalars = hnp.scalar_dtypes().flatmap(hnp.from_dtype).map(lambda value: np.asarray(value)[()])

Objects = st.recursive(
    st.one_of(Plain, Buffers, arrays(), Scalars),
    lambda inner: st.one_of(
        st.dictionaries(Key, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)


def payload_of(encoded: Encoded, *, writable: bool = False) -> memoryview:
    """The payload as in a ring: at a multiple of 64 bytes."""
    memory = np.zeros(encoded.size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    memory[start : start + encoded.size] = np.frombuffer(b"".join(encoded.buffers), np.uint8)
    view = memory.data[start : start + encoded.size]
    return view if writable else view.toreadonly()


def built(schema: str, payload: memoryview) -> Any:
    """The result of `decode`, of any type."""
    return decode(schema, payload)


def address(memory: object) -> int:
    """The address of its first byte."""
    return np.frombuffer(memory, np.uint8).ctypes.data if isinstance(memory, memoryview) else memory.ctypes.data  # type: ignore[attr-defined]


def is_same(came: object, went: object) -> bool:
    """Whether both have the same type and the same bits. Bytes are received as a view of the payload."""
    if isinstance(went, bytes | bytearray) and type(came) is memoryview:
        return came == went
    return type(came) is type(went) and _COMPARED.get(type(went), _is_same_value)(came, went)


def _is_same_value(came: Any, went: Any) -> bool:
    if isinstance(went, np.generic):
        return bool(came.dtype == went.dtype and came.tobytes() == went.tobytes())
    return bool(came == went)


def _is_same_array(came: np.ndarray[Any, Any], went: np.ndarray[Any, Any]) -> bool:
    return (came.dtype, came.shape) == (went.dtype, went.shape) and _bits(came) == _bits(went)


def _bits(array: np.ndarray[Any, Any]) -> bytes:
    """All bytes, including the gaps of records, which a comparison of values ignores."""
    return np.ascontiguousarray(array).tobytes()


_COMPARED: dict[type, Any] = {
    float: lambda came, went: struct.pack(">d", came) == struct.pack(">d", went),
    dict: lambda came, went: [*came] == [*went] and all(is_same(came[key], went[key]) for key in went),
    list: lambda came, went: len(came) == len(went) and all(map(is_same, came, went)),
    tuple: lambda came, went: len(came) == len(went) and all(map(is_same, came, went)),
    np.ndarray: _is_same_array,
}
