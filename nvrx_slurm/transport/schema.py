"""The text that says how bytes become an object: JSON, `[version, node]`. Pure. What is read may be hostile.

    null, true, 7, 0.5, "text"                  themselves
    {"key": node, …}                            a dict
    ["list", node, …], ["tuple", node, …]
    ["float", "7ff8000000000000"]               one that JSON has no word for: its bits
    ["bytes", size], ["bytearray", size], ["text", size], ["pickle", size]
    ["array", type, shape], ["tensor", type, shape], ["scalar", type, []]
    ["array", type, shape, axes], …             not row by row: its axes in the order in which they lie in memory

In this order the leaves lie in the payload, each at the next multiple of 64 bytes: there is no offset that could lie.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from nvrx_slurm.transport.errors import PayloadCorrupt, TransportError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA

MOST_ITEM_BYTES = (1 << 31) - 1  # numpy takes no more for one element
MOST_DIMENSIONS = 32
MOST_BYTES = 1 << 62
MOST_FIELDS = 256
MOST_NESTED = 8  # records within records


class Field(NamedTuple):
    """A field of a record. `shape`: of the array that the field is, () where it is one element."""

    name: str
    offset: int
    format: Format
    shape: tuple[int, ...]


class RecordFormat(NamedTuple):
    """An element that has fields."""

    item_bytes: int
    fields: tuple[Field, ...]


Format = str | RecordFormat

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

# Those that mean the same in each version of torch. The quantized ones need scales, which are no bytes of theirs.
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


def item_bytes(format: Format) -> int:
    """How many bytes one element takes. Raises PayloadCorrupt where this is no name of a type, or one too big."""
    if isinstance(format, RecordFormat):
        size = format.item_bytes
    else:
        match = _NAME.fullmatch(format)
        if match is None:
            raise PayloadCorrupt(f"{format[:64]!r} is no type of elements")
        kind, number, unit = match[1], int(match[2]), match[3]
        if kind in _UNIT_BYTES and unit is None:
            size = number * _UNIT_BYTES[kind]
        elif number not in _SIZES.get(kind, ()) or (unit is not None and kind not in _UNITED):
            raise PayloadCorrupt(f"{format!r} is no type of elements")
        else:
            size = number
    if not 0 < size <= MOST_ITEM_BYTES:
        raise PayloadCorrupt(f"elements of {size} bytes cannot be")
    return size


def tensor_item_bytes(name: object) -> int:
    """How many bytes one element of a tensor takes. Raises PayloadCorrupt for a name that is none of torch's."""
    if not isinstance(name, str) or name not in TENSOR_ITEM_BYTES:
        raise PayloadCorrupt(f"{str(name)[:64]!r} is no type of a tensor's elements")
    return TENSOR_ITEM_BYTES[name]


def parse_format(node: object, nested: int = 0) -> Format:
    """From a schema: a name, or `{"bytes": …, "fields": [[name, offset, format, shape?], …]}`."""
    if isinstance(node, str):
        item_bytes(node)
        return node
    if not isinstance(node, dict) or node.keys() != {"bytes", "fields"} or nested == MOST_NESTED:
        raise PayloadCorrupt("a type of elements is given by its name, or by its bytes and fields")
    size, fields = node["bytes"], node["fields"]
    if type(size) is not int or type(fields) is not list or not 0 < len(fields) <= MOST_FIELDS:
        raise PayloadCorrupt(f"a record needs a size, and a list of 1 to {MOST_FIELDS} fields")
    parsed = []
    for field in fields:
        if type(field) is not list or len(field) not in (3, 4):
            raise PayloadCorrupt("a field is a list of name, offset, format, and shape if it has one")
        name, offset, format, shape = (*field, [])[:4]
        if type(name) is not str or not name or type(offset) is not int or offset < 0:
            raise PayloadCorrupt("a field needs a name, and an offset of 0 or more")
        parsed.append(Field(name, offset, parse_format(format, nested + 1), parse_shape(shape)))
    record = RecordFormat(size, tuple(parsed))
    size = item_bytes(record)
    if len({field.name for field in record.fields}) < len(record.fields):
        raise PayloadCorrupt("two fields of a record have one name")
    for each in record.fields:
        if each.offset + extent_bytes(each.shape, item_bytes(each.format)) > size:
            raise PayloadCorrupt(f"the field {each.name[:64]!r} lies outside its record")
    return record


def format_node(format: Format) -> object:
    """The node of the schema that `parse_format` reads."""
    if isinstance(format, str):
        return format
    fields = []
    for field in format.fields:
        node: list[object] = [field.name, field.offset, format_node(field.format)]
        # One element has no shape, which keeps schemas short.
        fields.append([*node, list(field.shape)] if field.shape else node)
    return {"bytes": format.item_bytes, "fields": fields}


def parse_shape(node: object) -> tuple[int, ...]:
    """The shape of a schema's node. Raises PayloadCorrupt where it is none."""
    if type(node) is not list or len(node) > MOST_DIMENSIONS:
        raise PayloadCorrupt(f"a shape is a list of at most {MOST_DIMENSIONS} numbers")
    for length in node:
        if type(length) is not int or not 0 <= length <= MOST_BYTES:
            raise PayloadCorrupt("a shape has a length that is no number of elements")
    return tuple(node)


def parse_axes(node: object, dimensions: int) -> tuple[int, ...]:
    """The order of the axes: each once, the one that lies farthest apart in memory first."""
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
    """The axes in the order in which they lie in memory, as far as strides show."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """The order of axes that undoes this one."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


VERSION = 1
ALIGNMENT = 64
MOST_DEPTH = 32
MOST_LEAVES = 4096
MOST_VALUES = LONGEST_SCHEMA // 2  # no schema has place for more
CACHED_SCHEMAS = 128
# Schemas that are longer are parsed each time: what is kept is bounded, also where every schema is a new one.
LONGEST_CACHED = 8 << 10
FLOAT_BITS = struct.Struct(">d")


class Constant(NamedTuple):
    """A value that is in the schema itself."""

    value: object


class Dict(NamedTuple):
    items: tuple[tuple[str, Node], ...]


class ListOrTuple(NamedTuple):
    """A list or a tuple."""

    kind: Callable[[list[object]], object]
    items: tuple[Node, ...]


class ByteLeaf(NamedTuple):
    """`kind`: as the schema names it; all but "text" and "pickle" are bytes."""

    kind: str
    start: int
    size: int


class Array(NamedTuple):
    """`shape` as it lies in memory, row by row; `axes` makes its own shape of it, None where that is the same."""

    start: int
    size: int
    library: str
    format: Format
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None
    is_scalar: bool = False


Node = Constant | Dict | ListOrTuple | ByteLeaf | Array


class DecodePlan(NamedTuple):
    """A schema that was found good. `size`: of the one payload that it fits."""

    root: Node
    size: int
    has_pickle: bool


def padding(size: int) -> int:
    """How many bytes lie between an end at `size` and the next leaf."""
    return -size % ALIGNMENT


def plan_of(schema: str) -> DecodePlan:
    """What the schema says. Raises PayloadCorrupt where it is none, TransportError where a later version wrote it."""
    return _cached_plan(schema) if len(schema) <= LONGEST_CACHED else _plan(schema)


def _plan(schema: str) -> DecodePlan:
    if len(schema) > LONGEST_SCHEMA:
        raise PayloadCorrupt(f"the schema has {len(schema)} characters; none has more than {LONGEST_SCHEMA}")
    try:
        document = _decode(schema)
    except (ValueError, RecursionError) as error:
        raise PayloadCorrupt(f"the schema is none: {error}") from None
    if type(document) is not list or len(document) != 2 or type(document[0]) is not int:
        raise PayloadCorrupt("the schema is none: it is no pair of a version and a description")
    version, node = document
    if version != VERSION:
        raise TransportError(f"the payload's schema is of version {version}, this side knows {VERSION}: upgrade it")
    parser = _Parser()
    root = parser.node(node, 0)
    return DecodePlan(root, parser.size, parser.has_pickle)


_cached_plan = functools.lru_cache(CACHED_SCHEMAS)(_plan)
_decode = msgspec.json.Decoder().decode


TAGS = ("list", "tuple", "float", "bytes", "bytearray", "text", "array", "scalar", "tensor", "pickle")


class _Parser:
    """Walks a schema and lays its leaves, one after the other."""

    def __init__(self) -> None:
        self.size = 0
        self.has_pickle = False
        self._leaves = 0

    def node(self, node: object, depth: int) -> Node:
        if depth > MOST_DEPTH:
            raise PayloadCorrupt(f"the schema is nested deeper than {MOST_DEPTH}")
        if type(node) is dict:
            return Dict(tuple((key, self.node(value, depth + 1)) for key, value in node.items()))
        if type(node) is not list:
            return Constant(node)
        tag = node[0] if node and type(node[0]) is str else None
        if tag == "list" or tag == "tuple":
            items = tuple(self.node(item, depth + 1) for item in node[1:])
            return ListOrTuple(list if tag == "list" else tuple, items)
        if tag == "float":
            try:
                (_, bits) = node
                (number,) = FLOAT_BITS.unpack(bytes.fromhex(bits))
            except (TypeError, ValueError, struct.error):
                raise PayloadCorrupt("a float in the schema has not the bits of one") from None
            return Constant(number)
        if tag in ("bytes", "bytearray", "text", "pickle"):
            if len(node) != 2 or type(node[1]) is not int or not 0 <= node[1] <= MOST_BYTES:
                raise PayloadCorrupt("a leaf in the schema has no size")
            self.has_pickle |= tag == "pickle"
            return ByteLeaf(tag, self.place(node[1]), node[1])
        if tag in ("array", "scalar", "tensor"):
            return self._array(tag, node)
        raise PayloadCorrupt(f"the schema has something that is none of {', '.join(TAGS)}")

    def _array(self, tag: str, node: list[Any]) -> Array:
        if len(node) not in (3, 4):
            raise PayloadCorrupt("an array in the schema has a type, a shape, and its axes if need be")
        shape, axes = parse_shape(node[2]), None
        if len(node) == 4:
            order = parse_axes(node[3], len(shape))
            shape, axes = tuple(shape[axis] for axis in order), inverse(order)
        if tag == "tensor":
            size = extent_bytes(shape, tensor_item_bytes(node[1]))
            return Array(self.place(size), size, "torch", str(node[1]), shape, axes)
        format = parse_format(node[1])
        size = extent_bytes(shape, item_bytes(format))
        array = Array(self.place(size), size, "numpy", format, shape, axes, is_scalar=tag == "scalar")
        if array.is_scalar and shape:
            raise PayloadCorrupt("a scalar in the schema has a shape")
        return array

    def place(self, size: int) -> int:
        """Lay a leaf of `size` bytes behind the others, and return where it begins."""
        self._leaves += 1
        if self._leaves > MOST_LEAVES:
            raise PayloadCorrupt(f"the schema has more than {MOST_LEAVES} leaves")
        start = self.size + padding(self.size)
        self.size = start + size
        if self.size > MOST_BYTES:
            raise PayloadCorrupt("the payload would be bigger than any memory")
        return start
