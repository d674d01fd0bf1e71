"""What the elements of an array are, as a schema tells it: checked, with their size. Pure: without numpy and torch.

numpy's are named as numpy does (`<f4`, `>i8`, `|S5`, `<M8[ns]`); records by their fields. `longdouble` has no place
here: it is another type on each architecture, under one name. torch's are named as torch does (`bfloat16`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from nvrx_slurm.transport.errors import PayloadCorrupt

MOST_ITEM_BYTES = (1 << 31) - 1
"""numpy takes no more for one element."""

MOST_DIMENSIONS = 32
MOST_BYTES = 1 << 62
MOST_FIELDS = 256
MOST_NESTED = 8
"""Records within records."""


class Field(NamedTuple):
    """Of a record. `shape`: of the array that the field is, () where it is one element."""

    name: str
    offset: int
    format: Format
    shape: tuple[int, ...]


class Record(NamedTuple):
    """An element that has fields."""

    item_bytes: int
    fields: tuple[Field, ...]


Format = str | Record

_NAME = re.compile(r"[|<>]([biufcmMSUV])([1-9][0-9]{0,9})(\[[0-9A-Za-z]{1,16}\])?")
_SIZES = {
    "b": (1,),
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (2, 4, 8),
    "c": (8, 16),
    "m": (8,),
    "M": (8,),
}
_UNITED = "mM"
_UNIT_BYTES = {"S": 1, "U": 4, "V": 1}

TENSOR_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Those that mean the same in each version of torch. The quantized ones need scales, which are no bytes of theirs."""


def item_bytes(format: Format) -> int:
    """How many bytes one element takes. Raises PayloadCorrupt where this is no name of a type, or one too big."""
    size = format.item_bytes if isinstance(format, Record) else _named_bytes(format)
    if not 0 < size <= MOST_ITEM_BYTES:
        raise PayloadCorrupt(f"elements of {size} bytes cannot be")
    return size


def _named_bytes(name: str) -> int:
    match = _NAME.fullmatch(name)
    if match is None:
        raise PayloadCorrupt(f"{name[:64]!r} is no type of elements")
    kind, number, unit = match[1], int(match[2]), match[3]
    if kind in _UNIT_BYTES and unit is None:
        return number * _UNIT_BYTES[kind]
    if number not in _SIZES.get(kind, ()) or (unit is not None and kind not in _UNITED):
        raise PayloadCorrupt(f"{name!r} is no type of elements")
    return number


def tensor_item_bytes(name: object) -> int:
    """Likewise, of torch's types."""
    if not isinstance(name, str) or name not in TENSOR_ITEM_BYTES:
        raise PayloadCorrupt(f"{str(name)[:64]!r} is no type of a tensor's elements")
    return TENSOR_ITEM_BYTES[name]


def parse_format(node: object, nested: int = 0) -> Format:
    """From a schema: a name, or `{"bytes": …, "fields": [[name, offset, format, shape?], …]}`."""
    if isinstance(node, str):
        item_bytes(node)
        return node
    if not isinstance(node, dict) or node.keys() != {"bytes", "fields"} or nested == MOST_NESTED:
        raise PayloadCorrupt("a type of elements is told by its name, or by its bytes and fields")
    size, fields = node["bytes"], node["fields"]
    if type(size) is not int or type(fields) is not list or not 0 < len(fields) <= MOST_FIELDS:
        raise PayloadCorrupt(f"a record needs a size, and a list of 1 to {MOST_FIELDS} fields")
    record = Record(size, tuple(_parse_field(field, nested) for field in fields))
    _check_record(record)
    return record


def _parse_field(node: object, nested: int) -> Field:
    if type(node) is not list or len(node) not in (3, 4):
        raise PayloadCorrupt("a field is a list of name, offset, format, and shape if it has one")
    name, offset, format, shape = (*node, [])[:4]
    if type(name) is not str or not name or type(offset) is not int or offset < 0:
        raise PayloadCorrupt("a field needs a name, and an offset of 0 or more")
    return Field(name, offset, parse_format(format, nested + 1), parse_shape(shape))


def _check_record(record: Record) -> None:
    size = item_bytes(record)
    if len({field.name for field in record.fields}) < len(record.fields):
        raise PayloadCorrupt("two fields of a record have one name")
    for field in record.fields:
        if field.offset + extent_bytes(field.shape, item_bytes(field.format)) > size:
            raise PayloadCorrupt(f"the field {field.name[:64]!r} lies outside its record")


def format_node(format: Format) -> object:
    """What `parse_format` takes."""
    if isinstance(format, str):
        return format
    return {"bytes": format.item_bytes, "fields": [_field_node(field) for field in format.fields]}


def _field_node(field: Field) -> list[object]:
    node = [field.name, field.offset, format_node(field.format)]
    return [*node, list(field.shape)] if field.shape else node


def parse_shape(node: object) -> tuple[int, ...]:
    """Raises PayloadCorrupt where it is none."""
    if type(node) is not list or len(node) > MOST_DIMENSIONS:
        raise PayloadCorrupt(f"a shape is a list of at most {MOST_DIMENSIONS} numbers")
    for length in node:
        if type(length) is not int or not 0 <= length <= MOST_BYTES:
            raise PayloadCorrupt("a shape has a length that is no number of elements")
    return tuple(node)


def parse_axes(node: object, dimensions: int) -> tuple[int, ...]:
    """Each of the axes once, the one that lies farthest apart in memory first."""
    if type(node) is not list or not all(type(axis) is int for axis in node) or sorted(node) != [*range(dimensions)]:
        raise PayloadCorrupt("the order of an array names each of its axes once")
    return tuple(node)


def extent_bytes(shape: Sequence[int], size: int) -> int:
    """What an array of this shape takes. One without elements is bounded likewise: its strides must be numbers."""
    extent, is_empty = size, False
    for length in shape:
        extent *= length or 1
        is_empty = is_empty or not length
    if extent > MOST_BYTES:
        raise PayloadCorrupt("an array is bigger than any memory")
    return 0 if is_empty else extent


def axes_in_memory(strides: Sequence[int]) -> tuple[int, ...]:
    """The axes in the order in which they lie in memory, as far as strides tell."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """The order of axes that undoes this one."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))
