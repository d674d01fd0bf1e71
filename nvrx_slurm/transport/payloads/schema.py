"""The text that says how bytes become an object: JSON, `[version, node]`. Pure. What is read may be hostile.

    null, true, 7, 0.5, "text"                  themselves
    {"key": node, …}                            a dict
    ["list", node, …], ["tuple", node, …]
    ["float", "7ff8000000000000"]               one that JSON has no word for: its bits
    ["bytes", size], ["bytearray", size], ["text", size], ["pickle", size]
    ["array", type, shape], ["tensor", type, shape], ["scalar", type, []]
    ["array", type, shape, axes], …             not row by row: its axes in the order in which they lie in memory

In this order the leaves lie in the payload, each at the next multiple of 64 bytes: no offset is told that could lie.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from nvrx_slurm.transport.errors import PayloadCorrupt, TransportError
from nvrx_slurm.transport.payloads.formats import (
    MOST_BYTES,
    Format,
    extent_bytes,
    inverse,
    item_bytes,
    parse_axes,
    parse_format,
    parse_shape,
    tensor_item_bytes,
)
from nvrx_slurm.transport.ref import LONGEST_SCHEMA

VERSION = 1
ALIGNMENT = 64
MOST_DEPTH = 32
MOST_LEAVES = 4096
MOST_VALUES = LONGEST_SCHEMA // 2
"""No schema has place for more."""

CACHED_SCHEMAS = 128
LONGEST_CACHED = 8 << 10
"""Schemas that are longer are parsed each time: what is kept is bounded, also where every schema is a new one."""

FLOAT_BITS = struct.Struct(">d")


class Constant(NamedTuple):
    """It is in the schema itself."""

    value: object


class Dict(NamedTuple):
    items: tuple[tuple[str, Node], ...]


class Items(NamedTuple):
    """A list or a tuple."""

    kind: Callable[[list[object]], object]
    items: tuple[Node, ...]


class Bytes(NamedTuple):
    """`kind`: what a copy of them is."""

    start: int
    size: int
    kind: Callable[[memoryview], object]


class Text(NamedTuple):
    start: int
    size: int


class Pickle(NamedTuple):
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


Node = Constant | Dict | Items | Bytes | Text | Pickle | Array


class Plan(NamedTuple):
    """A schema that was found good. `size`: of the one payload that it fits."""

    root: Node
    size: int
    has_pickle: bool


def padding(size: int) -> int:
    """From there to where the next leaf lies."""
    return -size % ALIGNMENT


def plan_of(schema: str) -> Plan:
    """What the schema says. Raises PayloadCorrupt where it is none, TransportError where a later version wrote it."""
    return _cached_plan(schema) if len(schema) <= LONGEST_CACHED else _plan(schema)


def _plan(schema: str) -> Plan:
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
    return Plan(root, parser.size, parser.has_pickle)


_cached_plan = functools.lru_cache(CACHED_SCHEMAS)(_plan)
_decode = msgspec.json.Decoder().decode


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
        parse = _TAGS.get(node[0]) if node and type(node[0]) is str else None
        if parse is None:
            raise PayloadCorrupt(f"the schema has something that is none of {', '.join(_TAGS)}")
        return parse(self, node, depth)

    def place(self, size: int) -> int:
        """Where the next leaf begins."""
        self._leaves += 1
        if self._leaves > MOST_LEAVES:
            raise PayloadCorrupt(f"the schema has more than {MOST_LEAVES} leaves")
        start = self.size + padding(self.size)
        self.size = start + size
        if self.size > MOST_BYTES:
            raise PayloadCorrupt("the payload would be bigger than any memory")
        return start


def _parse_list(parser: _Parser, node: list[Any], depth: int) -> Node:
    return Items(list, tuple(parser.node(item, depth + 1) for item in node[1:]))


def _parse_tuple(parser: _Parser, node: list[Any], depth: int) -> Node:
    return Items(tuple, tuple(parser.node(item, depth + 1) for item in node[1:]))


def _parse_float(parser: _Parser, node: list[Any], depth: int) -> Node:
    try:
        (_, bits) = node
        (number,) = FLOAT_BITS.unpack(bytes.fromhex(bits))
    except (TypeError, ValueError, struct.error):
        raise PayloadCorrupt("a float in the schema has not the bits of one") from None
    return Constant(number)


def _parse_bytes(parser: _Parser, node: list[Any], depth: int) -> Node:
    size = _parse_size(node)
    return Bytes(parser.place(size), size, bytes)


def _parse_bytearray(parser: _Parser, node: list[Any], depth: int) -> Node:
    size = _parse_size(node)
    return Bytes(parser.place(size), size, bytearray)


def _parse_text(parser: _Parser, node: list[Any], depth: int) -> Node:
    size = _parse_size(node)
    return Text(parser.place(size), size)


def _parse_pickle(parser: _Parser, node: list[Any], depth: int) -> Node:
    parser.has_pickle = True
    size = _parse_size(node)
    return Pickle(parser.place(size), size)


def _parse_array(parser: _Parser, node: list[Any], depth: int) -> Node:
    format, shape, axes = _parse_layout(node)
    known = parse_format(format)
    size = extent_bytes(shape, item_bytes(known))
    return Array(parser.place(size), size, "numpy", known, shape, axes)


def _parse_scalar(parser: _Parser, node: list[Any], depth: int) -> Node:
    array = _parse_array(parser, node, depth)
    if not isinstance(array, Array) or array.shape:
        raise PayloadCorrupt("a scalar in the schema has a shape")
    return array._replace(is_scalar=True)


def _parse_tensor(parser: _Parser, node: list[Any], depth: int) -> Node:
    name, shape, axes = _parse_layout(node)
    size = extent_bytes(shape, tensor_item_bytes(name))
    return Array(parser.place(size), size, "torch", str(name), shape, axes)


def _parse_size(node: list[Any]) -> int:
    if len(node) != 2 or type(node[1]) is not int or not 0 <= node[1] <= MOST_BYTES:
        raise PayloadCorrupt("a leaf in the schema has no size")
    return node[1]


def _parse_layout(node: list[Any]) -> tuple[object, tuple[int, ...], tuple[int, ...] | None]:
    """The type of its elements, its shape in memory, and what makes its own shape of that."""
    if len(node) not in (3, 4):
        raise PayloadCorrupt("an array in the schema has a type, a shape, and its axes if need be")
    shape = parse_shape(node[2])
    if len(node) == 3:
        return node[1], shape, None
    axes = parse_axes(node[3], len(shape))
    return node[1], tuple(shape[axis] for axis in axes), inverse(axes)


_TAGS: dict[str, Callable[[_Parser, list[Any], int], Node]] = {
    "list": _parse_list,
    "tuple": _parse_tuple,
    "float": _parse_float,
    "bytes": _parse_bytes,
    "bytearray": _parse_bytearray,
    "text": _parse_text,
    "array": _parse_array,
    "scalar": _parse_scalar,
    "tensor": _parse_tensor,
    "pickle": _parse_pickle,
}
