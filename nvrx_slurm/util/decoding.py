"""How bytes from outside this process become records: one function, and one error for any fault in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from nvrx_slurm.errors import MalformedRecord

_T = TypeVar("_T")


def decode(decoder: Callable[[bytes], _T], data: bytes, what: str) -> _T:
    """Decode `data`. Raises MalformedRecord for any defect; `what` names the record in the message.

    A decoder of msgspec raises more than its DecodeError: before 0.23 UnicodeDecodeError for text that is not UTF-8;
    RecursionError for a deep nest, OverflowError for a number that does not fit. One that is written by hand raises
    LookupError and AttributeError for what is not there.
    """
    try:
        return decoder(data)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise MalformedRecord(f"{what} cannot be read: {error}") from None
    except RecursionError:
        raise MalformedRecord(f"{what} cannot be read: it is nested too deeply") from None


def decode_json(kind: type[_T], data: bytes | str, what: str) -> _T:
    """The value of this kind in JSON. Raises MalformedRecord."""
    return decode(lambda each: msgspec.json.decode(each, type=kind), data, what)  # type: ignore[arg-type]
