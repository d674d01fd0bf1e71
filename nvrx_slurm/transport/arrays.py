"""numpy's arrays and scalars. Loaded only where there are such (see `codec.library`)."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np

from nvrx_slurm.transport.codec import Unsendable
from nvrx_slurm.transport.errors import PayloadCorrupt
from nvrx_slurm.transport.schema import (
    MOST_DIMENSIONS,
    Array,
    Field,
    Format,
    RecordFormat,
    axes_in_memory,
    format_node,
    parse_format,
)

CACHED_TYPES = 64
_KINDS = (np.ndarray, np.memmap)  # exactly these: a masked array is more than its bytes


def describe(array: object) -> tuple[list[object], memoryview]:
    """The array's node of the schema, and its bytes."""
    if type(array) in _KINDS:
        sent = cast("np.ndarray[Any, Any]", array)
        if sent.ndim > MOST_DIMENSIONS:
            raise Unsendable(f"an array of {sent.ndim} dimensions is not sent; {MOST_DIMENSIONS} are the most")
        node: list[object] = ["array", _described(sent.dtype), list(sent.shape)]
        if sent.flags.c_contiguous:
            return node, _flat(sent)
        axes = axes_in_memory(sent.strides)
        turned = sent.transpose(axes)
        if turned.flags.c_contiguous:
            return [*node, list(axes)], _flat(turned)
        return node, _flat(sent.copy(order="C"))
    if isinstance(array, np.generic):
        # The array's dtype may be another one: an empty text has no bytes, in an array it has.
        held = np.asarray(array)
        return ["scalar", _described(held.dtype), []], _flat(held)
    raise Unsendable(f"an object of {type(array).__module__}.{type(array).__qualname__} is not sent")


def _flat(array: np.ndarray[Any, Any]) -> memoryview:
    # numpy gives no buffer of some types, datetime64 among them. Of their bytes it does.
    return array.reshape(-1).view(np.uint8).data


def build(leaf: Array, payload: memoryview) -> object:
    """The array that a leaf describes. It lies on `payload`, holds it, and is as writable as `payload` is."""
    dtype = _dtype(leaf.format)
    # Not np.ndarray(buffer=…): that looks through a memoryview at what it is of, which it neither keeps from being
    # closed nor, if this is writable, from being written to.
    flat: np.ndarray[Any, Any] = np.frombuffer(payload, dtype, leaf.size // dtype.itemsize, leaf.start)
    array = flat.reshape(leaf.shape)
    if leaf.axes is not None:
        array = array.transpose(leaf.axes)
    if not leaf.is_scalar:
        return array
    try:
        return array[()]
    except (ValueError, SystemError) as error:
        # The numbers of a text may be no characters.
        raise PayloadCorrupt(f"a scalar in the payload is none: {error}") from None


def _described(dtype: np.dtype[Any]) -> object:
    """A type's node of the schema. Raises Unsendable for what would come out as something else."""
    node = _node(dtype)
    if node is None:
        raise Unsendable(
            f"elements of dtype {dtype} are not sent: they have no fixed size, or are not the same everywhere"
        )
    return node


@functools.lru_cache(CACHED_TYPES)
def _node(dtype: np.dtype[Any]) -> object:
    try:
        format = parse_format(format_node(_format(dtype)))
        return format_node(format) if _dtype(format) == dtype else None
    except (PayloadCorrupt, UnicodeEncodeError):
        return None


def _format(dtype: np.dtype[Any]) -> Format:
    if dtype.names is None:
        return dtype.str
    assert dtype.fields is not None
    fields = []
    for name in dtype.names:
        # JSON cannot carry half a surrogate pair.
        name.encode()
        of, offset = dtype.fields[name][:2]
        fields.append(Field(name, offset, _format(of.base), of.shape))
    return RecordFormat(dtype.itemsize, tuple(fields))


@functools.lru_cache(CACHED_TYPES)
def _dtype(format: Format) -> np.dtype[Any]:
    """numpy's type for a format. Raises PayloadCorrupt where numpy has none, or has it under another name."""
    try:
        named: Any = format
        if isinstance(format, RecordFormat):
            named = {
                "names": [field.name for field in format.fields],
                "formats": [(_dtype(field.format), field.shape) for field in format.fields],
                "offsets": [field.offset for field in format.fields],
                "itemsize": format.item_bytes,
            }
        dtype: np.dtype[Any] = np.dtype(named)
    except (TypeError, ValueError, OverflowError) as error:
        raise PayloadCorrupt(f"numpy knows no such type of elements: {error}") from None
    if dtype.hasobject or (isinstance(format, str) and dtype.str != format):
        raise PayloadCorrupt(f"{format!r} is no type of elements")
    return dtype
