"""What callers give us, looked at before it goes anywhere: an error that names it beats one from deep inside. Pure.

All raise UsageError.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport.ref import PayloadRef

T = TypeVar("T")

LONGEST_S = 1e6
_FIELD_NAME = re.compile(r":[^:]*:")


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """The value as an int; numpy's whole numbers are accepted too."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or found < least or (most is not None and found > most):
        range_ = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} must be a whole number, {range_}, not {_shown(value)}")
    return found


def seconds(name: str, value: object, *, least: float = 0.0, most: float = LONGEST_S) -> float:
    """The value in seconds; a timedelta is accepted too."""
    if type(value) is float and least <= value <= most:
        return value
    return number(
        f"{name}, in seconds,", value.total_seconds() if isinstance(value, timedelta) else value, least, most
    )


def lease(value: object) -> float:
    """The value in seconds, of any length: a lease that has lapsed already does no harm."""
    return number("lease_s, in seconds,", value, -LONGEST_S, LONGEST_S)


def number(name: str, value: object, least: float, most: float) -> float:
    """The value as a float; numpy's real numbers are accepted too."""
    try:
        found = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an int that is too large for a float
        found = math.nan
    if not least <= found <= most:
        raise UsageError(f"{name} must be {least:g} to {most:g}, not {_shown(value)}")
    return found


def instance(name: str, value: object, kind: type[T]) -> T:
    """The value, which must be an object of `kind`."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} must be a {kind.__name__}, not {_shown(value)}")
    return value


def text(name: str, value: object, longest: int) -> str:
    """The value, which must be a text of at most `longest` characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise UsageError(f"{name} must be a text of {longest} characters at most, not {_shown(value)}")
    return value


def folder(value: object) -> Path:
    """The value as an absolute path: this process may change its folder, and others may have another one. Whether it
    exists shows when it is used."""
    if not isinstance(value, str | Path):
        raise UsageError(f"folder must be a path, not {_shown(value)}")
    return Path(value).absolute()


def payload_ref(value: object) -> PayloadRef:
    """The value, which must be a PayloadRef. Its fields need no check: its constructor has made it."""
    if not isinstance(value, PayloadRef):
        raise UsageError(f"a ref must be a PayloadRef, not {_shown(value)}{_hint(value)}")
    return value


def payload_refs(values: Iterable[PayloadRef]) -> list[PayloadRef]:
    """The values as a list. All of them are checked before any is asked for."""
    if isinstance(values, str | bytes | PayloadRef) or not isinstance(values, Iterable):
        raise UsageError(
            f"refs must be a list or another iterable of PayloadRef, not {_shown(values)}{_hint(values)}"
        )
    return [payload_ref(value) for value in values]


def buffer(name: str, value: Any) -> memoryview:
    """Memory that holds plain bytes: over pointers to Python's objects, bytes from elsewhere would crash it."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"{name} must be a buffer, such as a bytearray or an array: {error}") from None
    if holds_objects(view):
        raise UsageError(f"{name} has elements that are Python objects: only plain bytes and numbers can be sent")
    return view


def holds_objects(view: memoryview) -> bool:
    """Whether its elements, or fields of these, are pointers to Python's objects."""
    return "O" in view.format and "O" in _FIELD_NAME.sub("", view.format)


def _hint(value: object) -> str:
    if isinstance(value, str | bytes):
        return "; of its JSON it is made by PayloadRef.from_json"
    if isinstance(getattr(value, "ref", None), PayloadRef):
        return "; give its .ref"
    return ""


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an int of thousands of digits
        shown = "that is too large to be shown"
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:60] + '…'}"
