"""Text, lists and mappings of a flow file → patterns, each for the type of the field that it stands for."""

from __future__ import annotations

import difflib
import enum
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from nvrx_slurm.jobspec.reading import Misfit
from nvrx_slurm.lab.flow.language.events import fields_of
from nvrx_slurm.lab.flow.language.patterns import (
    OPERATORS,
    Capture,
    Compares,
    Entries,
    Equals,
    Fields,
    Holds,
    Items,
    Matches,
    Pattern,
)
from nvrx_slurm.lab.flow.language.problems import nearest
from nvrx_slurm.util.durations import parse_duration

_CAPTURE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number, or a duration such as 500ms",
    str: "text",
    bool: "true or false",
    tuple: "a list such as [a, b], or {contains: a}, or {length: 2}",
    dict: "a mapping, or {contains: key}, or {length: 2}",
}


def capture_name(text: str) -> str | None:
    """`$dead` → `dead`; None for text that does not begin with `$`. Raises Misfit for a `$` and no name."""
    if not text.startswith("$"):
        return None
    match = _CAPTURE.fullmatch(text)
    if match is None:
        raise Misfit(f"{text!r} is no capture: after `$` come letters, digits and '_', no digit first")
    return match[1]


def parse_pattern(raw: Any, kind: Any) -> Pattern:
    """The pattern for a field of type `kind`. Raises Misfit: what the field can be, and what was seen."""
    if isinstance(raw, str):
        return _text(raw, kind)
    if raw is None:
        return _null(kind)
    if isinstance(raw, Sequence):
        return _items(raw, kind)
    return _mapping(raw, kind)


def _text(raw: str, kind: Any) -> Pattern:
    if (name := capture_name(raw)) is not None:
        return Capture(name)
    if raw.startswith("~"):
        return _regex(raw[1:].strip(), kind)
    for sign in OPERATORS:
        if raw.startswith(sign):
            return _comparison(sign, raw.removeprefix(sign).strip(), kind)
    return Equals(_literal(raw, kind))


def _regex(text: str, kind: Any) -> Pattern:
    if not _is(kind, str):
        raise Misfit(f"`~` searches in text, and this is {_words(kind)}")
    try:
        return Matches(re.compile(text))
    except re.error as error:
        raise Misfit(f"`~ {text}` is no regular expression: {error}") from None


def _comparison(sign: str, text: str, kind: Any) -> Pattern:
    if sign != "!=" and not (_is(kind, int) or _is(kind, float)):
        raise Misfit(f"`{sign}` compares numbers, and this is {_words(kind)}")
    if (name := capture_name(text)) is not None:
        return Compares(sign, Capture(name))
    return Compares(sign, Equals(_literal(text, kind)))


def _literal(text: str, kind: Any) -> Any:
    """The value that the text means, by the field's own type."""
    for option in _options(kind):
        try:
            return _convert(text, option)
        except ValueError:  # msgspec's ValidationError is one
            continue
    raise Misfit(f"must be {_words(kind)}, not {text!r}{_meant(text, kind)}")


def _convert(text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        if kind is not float:
            raise
        return parse_duration(text)


def _null(kind: Any) -> Pattern:
    if type(None) not in get_args(kind):
        raise Misfit(f"is never null; it is {_words(kind)}")
    return Equals(None)


def _items(raw: Sequence[Any], kind: Any) -> Pattern:
    if not _is(kind, tuple):
        raise Misfit(f"must be {_words(kind)}, not a list")
    inner = get_args(_option(kind, tuple))
    kinds = [inner[0]] * len(raw) if inner[-1] is Ellipsis else list(inner)
    if len(raw) != len(kinds):
        raise Misfit(f"has {len(kinds)} items, not {len(raw)}")
    parsed = (_below(str(index), each, of) for index, (each, of) in enumerate(zip(raw, kinds, strict=True)))
    return Items(tuple(parsed))


def _mapping(raw: Mapping[str, Any], kind: Any) -> Pattern:
    many = _is(kind, tuple) or _is(kind, dict)
    if many and raw and raw.keys() <= {"contains", "length"}:
        return _holds(raw, kind)
    if (record := _record(kind)) is not None:
        return Fields(tuple((name, _field(record, name, value)) for name, value in raw.items()))
    if not _is(kind, dict):
        raise Misfit(f"must be {_words(kind)}, not a mapping")
    of_key, of_value = get_args(_option(kind, dict))
    return Entries(tuple((_key(key, of_key), _below(key, value, of_value)) for key, value in raw.items()))


def _holds(raw: Mapping[str, Any], kind: Any) -> Pattern:
    inner = get_args(_option(kind, tuple) if _is(kind, tuple) else _option(kind, dict))[0]
    contains = _below("contains", raw["contains"], inner) if "contains" in raw else None
    length = _below("length", raw["length"], int) if "length" in raw else None
    return Holds(contains, length)


def _field(record: type[msgspec.Struct], name: str, raw: Any) -> Pattern:
    kinds = fields_of(record)
    if name not in kinds:
        raise Misfit(f"is no field of it; {nearest(name, kinds)}", name)
    return _below(name, raw, kinds[name])


def _below(key: str, raw: Any, kind: Any) -> Pattern:
    try:
        return parse_pattern(raw, kind)
    except Misfit as misfit:
        raise Misfit(str(misfit), key, *misfit.path) from None


def _key(text: str, kind: Any) -> Any:
    try:
        return _literal(text, kind)
    except Misfit as misfit:
        raise Misfit(str(misfit), text) from None


# -------------------------------------------------------------------------------------------------- types


def _options(kind: Any) -> tuple[Any, ...]:
    """The types that a union lists, without None; of any other type itself alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(option for option in get_args(kind) if option is not type(None))
    return (kind,)


def _option(kind: Any, wanted: type) -> Any:
    return next((option for option in _options(kind) if (get_origin(option) or option) is wanted), None)


def _is(kind: Any, wanted: type) -> bool:
    return _option(kind, wanted) is not None


def _record(kind: Any) -> type[msgspec.Struct] | None:
    """The record that the type lists, if it lists one."""
    records = (option for option in _options(kind) if isinstance(option, type) and issubclass(option, msgspec.Struct))
    return next(records, None)


def _words(kind: Any) -> str:
    """What the type can be, for people."""
    return " or ".join(_one_of(option) for option in _options(kind))


def _one_of(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(kind)}"
    if _record(kind) is not None:
        return "a mapping of its fields"
    return _WORDS[get_origin(kind) or kind]


def _meant(text: str, kind: Any) -> str:
    """The choice that was meant, where the type is one of a few words."""
    choices = [choice for option in _options(kind) if get_origin(option) is Literal for choice in get_args(option)]
    near = difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
