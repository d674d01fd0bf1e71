"""numpy and torch, each loaded when the first object of its kind is sent, or the first schema asks for it."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Protocol, cast

from nvrx_slurm.transport.errors import TransportError

if TYPE_CHECKING:
    from nvrx_slurm.transport.payloads.schema import Array

_MODULES = {"numpy": f"{__package__}.arrays", "torch": f"{__package__}.tensors"}


class Unsendable(Exception):
    """What is wrong with this object; where it lies is told by whoever walks there."""


class Library(Protocol):
    """One of them."""

    def describe(self, array: object) -> tuple[list[object], memoryview]:
        """Its node of the schema, and its bytes: its own memory where that has no gaps. Raises Unsendable."""

    def build(self, leaf: Array, payload: memoryview, copy: bool) -> object:
        """What was described, in `payload` or as a copy. Raises PayloadCorrupt, TransportError."""


def of(kind: type) -> Library | None:
    """The one that an object of this type belongs to."""
    name = kind.__module__.partition(".")[0]
    return library(name) if name in _MODULES else None


@functools.cache
def library(name: str) -> Library:
    """Raises TransportError where it is not installed."""
    try:
        return cast(Library, importlib.import_module(_MODULES[name]))
    except (ImportError, OSError) as error:
        raise TransportError(f"this payload needs {name}, which cannot be loaded here: {error}") from error
