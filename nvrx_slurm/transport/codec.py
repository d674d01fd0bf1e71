"""Objects become a schema and buffers, and a schema and a payload become objects, without pickle.

    bytes, bytearray, memoryview      their bytes
    None, bool, int, float, str       in the schema (a long str: its bytes)
    numpy arrays and scalars          of types with a fixed size: `arrays`
    torch tensors                     dense ones: `tensors`
    dict (str keys), list, tuple      of these

The buffers are the object's own memory: nothing big is copied. Decoding checks the whole schema before it builds
anything, and builds on top of the payload.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import pickle
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from nvrx_slurm.transport.arguments import holds_objects
from nvrx_slurm.transport.errors import PayloadCorrupt, TransportError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA
from nvrx_slurm.transport.schema import (
    ALIGNMENT,
    FLOAT_BITS,
    MOST_DEPTH,
    MOST_LEAVES,
    MOST_VALUES,
    VERSION,
    Array,
    Constant,
    Dict,
    ListOrTuple,
    Node,
    padding,
    plan_of,
)

_MODULES = {"numpy": f"{__package__}.arrays", "torch": f"{__package__}.tensors"}


class Unsendable(Exception):
    """Why an object cannot be sent. The encoder adds where it lies."""


class Library(Protocol):
    """A module that describes and builds the arrays of one library."""

    def describe(self, array: object) -> tuple[list[object], memoryview]:
        """Its node of the schema, and its bytes: its own memory where that has no gaps. Raises Unsendable."""

    def build(self, leaf: Array, payload: memoryview) -> object:
        """The array or tensor that was described, on `payload`. Raises PayloadCorrupt, TransportError."""


@functools.cache
def library(name: str) -> Library:
    """The module for the library of that name. Raises TransportError where the library is not installed."""
    try:
        return cast(Library, importlib.import_module(_MODULES[name]))
    except (ImportError, OSError) as error:
        raise TransportError(f"this payload needs {name}, which cannot be loaded here: {error}") from error


LONGEST_INLINE = 256  # a str of more characters goes into the payload: schemas stay short, as refs carry them
MOST_INT_BITS = 4096  # Python itself reads no longer ones from text, by default

SENDABLE = (
    "what can be sent: None, bool, int, float, str, bytes, bytearray, memoryview, numpy arrays and scalars of "
    "fixed-size types, torch tensors, and dict (with str keys), list and tuple of these; anything else only as a "
    "pickle, with allow_pickle=True on both sides"
)

SHOWN_CHARS = 64  # of a key, in a message
Path = tuple[str | int, ...]

_ZEROS = memoryview(bytes(ALIGNMENT))
_PADS = tuple(_ZEROS[:size] for size in range(ALIGNMENT))


class Encoded(NamedTuple):
    """An object as it is sent. The payload is `buffers`, one after the other, the zeros between leaves included, in
    all `size` bytes. They are the object's own memory: it must not change before they are written."""

    schema: str
    buffers: tuple[memoryview, ...]
    size: int


def encode(obj: object, *, allow_pickle: bool = False) -> Encoded:
    """`obj` as a schema and buffers; bytes and memoryviews have the schema "".

    Copied are only arrays whose memory has gaps, long strings, tensors that are on a device, and what is pickled.
    Raises TransportError where something cannot be sent; the message says where in `obj` it is, and what can be.
    `allow_pickle`: such things are pickled, which the receiver must ask for, too.
    """
    if type(obj) is bytes or type(obj) is memoryview:
        view = _flat(obj)
        return Encoded("", (view,) if view.nbytes else (), view.nbytes)
    walk = _Encoder(allow_pickle)
    schema = _encode([VERSION, walk.node(obj, ())])
    if len(schema) > LONGEST_SCHEMA:
        raise TransportError(
            f"the description of this object takes {len(schema)} bytes, more than {LONGEST_SCHEMA}: "
            "put many numbers into one array, and many strings into one"
        )
    return Encoded(schema.decode(), tuple(walk.buffers), walk.size)


_encode = msgspec.json.Encoder().encode


class _Encoder:
    """Walks an object in the order in which its leaves are laid."""

    def __init__(self, allow_pickle: bool) -> None:
        self.buffers: list[memoryview] = []
        self.size = 0
        self._leaves = 0
        self._values = 0
        self._allow_pickle = allow_pickle

    def node(self, obj: Any, path: Path) -> object:
        """The object's part of the schema; its bytes go to the buffers."""
        self._values += 1
        if len(path) > MOST_DEPTH:
            raise TransportError(f"{written(path)}: nested deeper than {MOST_DEPTH}, or within itself")
        if self._values > MOST_VALUES:
            raise TransportError(f"this object has more than {MOST_VALUES} values: put many numbers into one array")
        try:
            return self._described(obj, path)
        except Unsendable as why:
            if not self._allow_pickle:
                raise TransportError(f"{written(path)}: {why}; {SENDABLE}") from None
        try:
            pickled = pickle.dumps(obj, protocol=5)
        except Exception as error:
            # The object's class may raise anything.
            raise TransportError(f"{written(path)}: cannot be pickled: {error}") from error
        return self.leaf(["pickle", len(pickled)], memoryview(pickled))

    def _described(self, obj: Any, path: Path) -> object:
        # By exact type: a subclass would come out as its base, and what comes out is what went in.
        kind = type(obj)
        if obj is None or kind is bool:
            return obj
        if kind is int:
            if obj.bit_length() > MOST_INT_BITS:
                raise Unsendable(f"an int of {obj.bit_length()} bits is too long")
            return obj
        if kind is float:
            return obj if math.isfinite(obj) else ["float", FLOAT_BITS.pack(obj).hex()]
        if kind is str:
            data = _check_text(obj)
            return obj if len(obj) <= LONGEST_INLINE else self.leaf(["text", len(data)], memoryview(data))
        if kind is bytes or kind is memoryview:
            view = _flat(obj)
            return self.leaf(["bytes", view.nbytes], view)
        if kind is bytearray:
            return self.leaf(["bytearray", len(obj)], memoryview(obj))
        if kind is dict:
            # All keys are checked before any leaf is laid.
            for key in obj:
                if type(key) is not str:
                    raise Unsendable(f"a dict with a key of {type(key).__qualname__} is not sent")
                if not key.isascii():
                    _check_text(key)
            return {key: self.node(value, (*path, key)) for key, value in obj.items()}
        if kind is list or kind is tuple:
            return [kind.__name__, *[self.node(item, (*path, index)) for index, item in enumerate(obj)]]
        name = kind.__module__.partition(".")[0]
        if name not in _MODULES:
            raise Unsendable(f"an object of {kind.__module__}.{kind.__qualname__} is not sent")
        return self.leaf(*library(name).describe(obj))

    def leaf(self, node: list[object], buffer: memoryview) -> list[object]:
        """Lay these bytes behind those that are there."""
        self._leaves += 1
        if self._leaves > MOST_LEAVES:
            raise TransportError(f"this object has more than {MOST_LEAVES} arrays and buffers: stack them")
        if pad := padding(self.size):
            self.buffers.append(_PADS[pad])
        if buffer.nbytes:
            self.buffers.append(buffer)
        self.size += pad + buffer.nbytes
        return node


def written(path: Path) -> str:
    """A path as text, such as `$.obs.image[3]`."""
    text = "$"
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif key.isidentifier() and len(key) <= SHOWN_CHARS:
            text += f".{key}"
        else:
            text += f"[{json.dumps(key[:SHOWN_CHARS])}]"
    return text


def _check_text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Unsendable(f"the text {text[:64]!r} has half a surrogate pair, which is no character") from None


def _flat(obj: bytes | memoryview) -> memoryview:
    """The object's bytes, one after the other; a copy where they do not lie in that order."""
    view = memoryview(obj)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if holds_objects(view):
        raise Unsendable("a memoryview whose elements are Python objects is not sent")
    if not view.c_contiguous or not view.nbytes:
        return memoryview(view.tobytes())
    try:
        return view.cast("B")
    except TypeError:
        # Python's own views do not know this format.
        return memoryview(view.tobytes())


def decode(schema: str, payload: memoryview, *, allow_pickle: bool = False) -> object:
    """The object that `encode` was given. `payload`: all of its bytes, one dimension of them.

    Arrays and tensors lie on `payload` and hold it; bytes, bytearrays and memoryviews come as memoryviews of it. All
    can be written to where `payload` can be, and only there. torch has no read-only tensors: on a read-only payload
    they are copies.

    Both may be hostile: nothing is allocated that the payload does not have the bytes for, nothing
    but numpy and torch is imported, and nothing is unpickled unless `allow_pickle` is given. Raises PayloadCorrupt
    where they do not fit each other, TransportError where this side cannot, or may not, read what they say.
    """
    if not schema:
        return payload
    plan = plan_of(schema)
    if plan.size != payload.nbytes:
        raise PayloadCorrupt(f"the schema is of a payload of {plan.size} bytes, this one has {payload.nbytes}")
    if plan.has_pickle and not allow_pickle:
        raise TransportError(
            "the payload has a pickle, which runs code of its writer; pass allow_pickle=True if you trust it"
        )
    return _build(plan.root, payload)


def _build(node: Node, payload: memoryview) -> object:
    if isinstance(node, Array):
        return library(node.library).build(node, payload)
    if isinstance(node, Constant):
        return node.value
    if isinstance(node, Dict):
        return {key: _build(item, payload) for key, item in node.items}
    if isinstance(node, ListOrTuple):
        return node.kind([_build(item, payload) for item in node.items])
    view = payload[node.start : node.start + node.size]
    if node.kind == "text":
        try:
            return str(view, "utf-8")
        except UnicodeDecodeError:
            raise PayloadCorrupt("a text in the payload is no UTF-8") from None
    if node.kind != "pickle":
        return view
    try:
        # `decode` has seen that the caller allows it.
        return pickle.loads(view)
    except Exception as error:
        # The object's class may raise anything.
        raise TransportError(
            f"a pickle in the payload cannot be read here: {type(error).__name__}: {error}"
        ) from error
