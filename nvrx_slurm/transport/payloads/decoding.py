"""A schema and a payload become an object: on top of the payload, after all of the schema was found good."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from nvrx_slurm.transport.errors import PayloadCorrupt, TransportError
from nvrx_slurm.transport.payloads.libraries import library
from nvrx_slurm.transport.payloads.schema import Array, Bytes, Constant, Dict, Items, Node, Pickle, Text, plan_of


class _Source(NamedTuple):
    payload: memoryview
    copy: bool


def decode(schema: str, payload: memoryview, *, allow_pickle: bool = False, copy: bool = False) -> object:
    """The object that `encode` was given. `payload`: all of its bytes, one dimension of them.

    Without `copy`, arrays and tensors lie on `payload` and hold it; bytes, bytearrays and memoryviews come as
    memoryviews of it. All can be written to where `payload` can be, and only there. torch knows no read-only tensors:
    on a read-only payload they are copies. With `copy`, all is the object's own, and bytes are bytes again.

    Both may come from somebody hostile: nothing is allocated that the payload does not have the bytes for, nothing
    but numpy and torch is imported, and nothing is unpickled unless `allow_pickle` is given. Raises PayloadCorrupt
    where they do not fit each other, TransportError where this side cannot, or may not, read what they say.
    """
    if not schema:
        return bytes(payload) if copy else payload
    plan = plan_of(schema)
    if plan.size != payload.nbytes:
        raise PayloadCorrupt(f"the schema is of a payload of {plan.size} bytes, this one has {payload.nbytes}")
    if plan.has_pickle and not allow_pickle:
        raise TransportError(
            "the payload has a pickle, which runs code of whoever wrote it; pass allow_pickle=True if you trust them"
        )
    return _build(plan.root, _Source(payload, copy))


def _build(node: Node, source: _Source) -> object:
    return _BUILDERS[type(node)](node, source)


def _build_constant(node: Constant, source: _Source) -> object:
    return node.value


def _build_dict(node: Dict, source: _Source) -> object:
    return {key: _build(item, source) for key, item in node.items}


def _build_items(node: Items, source: _Source) -> object:
    return node.kind([_build(item, source) for item in node.items])


def _build_bytes(node: Bytes, source: _Source) -> object:
    view = source.payload[node.start : node.start + node.size]
    return node.kind(view) if source.copy else view


def _build_text(node: Text, source: _Source) -> object:
    try:
        return str(source.payload[node.start : node.start + node.size], "utf-8")
    except UnicodeDecodeError:
        raise PayloadCorrupt("a text in the payload is no UTF-8") from None


def _build_pickle(node: Pickle, source: _Source) -> object:
    try:
        return pickle.loads(source.payload[node.start : node.start + node.size])
    except Exception as error:  # whatever the code of its class raises
        raise TransportError(
            f"a pickle in the payload cannot be read here: {type(error).__name__}: {error}"
        ) from error


def _build_array(node: Array, source: _Source) -> object:
    return library(node.library).build(node, source.payload, source.copy)


_BUILDERS: dict[type, Callable[[Any, _Source], object]] = {
    Constant: _build_constant,
    Dict: _build_dict,
    Items: _build_items,
    Bytes: _build_bytes,
    Text: _build_text,
    Pickle: _build_pickle,
    Array: _build_array,
}
