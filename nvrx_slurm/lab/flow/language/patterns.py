"""What may stand for a field's value in a flow, and whether a value fits it. Pure."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

Bindings = Mapping[str, Any]
"""Capture, without its `$` → the value that it stands for."""

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
"""Longer ones first: `>=` begins with `>`."""

RENAMED = {"tether_lost": "connection_closed"}
"""Values in flows and journals of older versions → what the journal says today."""


def _current(value: Any) -> Any:
    return RENAMED.get(value, value) if isinstance(value, str) else value


def _nobody(name: str) -> bool:
    return False


@dataclass(slots=True)
class Trial:
    """The captures while one entry is looked at. `new` is what it would bind; `may_bind` says which of those may."""

    known: Bindings
    may_bind: Callable[[str], bool] = _nobody
    new: dict[str, Any] = field(default_factory=dict)

    def agrees(self, name: str, value: Any) -> bool:
        """Whether the capture stands for `value`, or may from now on."""
        for bindings in (self.known, self.new):
            if name in bindings:
                return bool(bindings[name] == value)
        if not self.may_bind(name):
            return False
        self.new[name] = value
        return True


class Pattern(ABC):
    """`str(pattern)` is how the flow file says it."""

    __slots__ = ()

    @abstractmethod
    def fits(self, value: Any, trial: Trial) -> bool:
        """Whether `value` is meant; captures on the way are bound in the trial."""

    @abstractmethod
    def told(self, known: Bindings) -> str:
        """The pattern in words, with what its captures stand for: `n2 ($dead)`."""

    def parts(self) -> Iterator[Pattern]:
        """The patterns that it is made of."""
        return iter(())

    def __str__(self) -> str:
        return self.told({})


@dataclass(frozen=True, slots=True)
class Equals(Pattern):
    """A literal."""

    value: Any

    def fits(self, value: Any, trial: Trial) -> bool:
        return bool(_current(value) == _current(self.value))

    def told(self, known: Bindings) -> str:
        return shown(self.value)


@dataclass(frozen=True, slots=True)
class Capture(Pattern):
    """`$name`: binds where it is first used, compares afterwards."""

    name: str

    def fits(self, value: Any, trial: Trial) -> bool:
        return trial.agrees(self.name, value)

    def told(self, known: Bindings) -> str:
        return f"{shown(known[self.name])} (${self.name})" if self.name in known else f"${self.name}"


@dataclass(frozen=True, slots=True)
class Compares(Pattern):
    """`">= 5"`, `"!= $dead"`. A capture is compared with, never bound. What is not known (null) is only `!=`."""

    sign: str
    operand: Equals | Capture

    def fits(self, value: Any, trial: Trial) -> bool:
        if isinstance(self.operand, Equals):
            return self._holds(value, self.operand.value)
        bound = {**trial.known, **trial.new}
        return self.operand.name in bound and self._holds(value, bound[self.operand.name])

    def _holds(self, value: Any, other: Any) -> bool:
        if value is None and self.sign != "!=":
            return False
        return OPERATORS[self.sign](value, other)

    def parts(self) -> Iterator[Pattern]:
        return iter((self.operand,))

    def told(self, known: Bindings) -> str:
        return f"{self.sign} {self.operand.told(known)}"


@dataclass(frozen=True, slots=True)
class Matches(Pattern):
    """`"~ regex"`: found somewhere in the text."""

    regex: re.Pattern[str]

    def fits(self, value: Any, trial: Trial) -> bool:
        return isinstance(value, str) and self.regex.search(value) is not None

    def told(self, known: Bindings) -> str:
        return f"~ {self.regex.pattern}"


@dataclass(frozen=True, slots=True)
class Items(Pattern):
    """A list: as long as the value, and each item fits."""

    items: tuple[Pattern, ...]

    def fits(self, value: Any, trial: Trial) -> bool:
        if not isinstance(value, (tuple, list)) or len(value) != len(self.items):
            return False
        return all(item.fits(each, trial) for item, each in zip(self.items, value, strict=True))

    def parts(self) -> Iterator[Pattern]:
        return iter(self.items)

    def told(self, known: Bindings) -> str:
        return f"[{', '.join(item.told(known) for item in self.items)}]"


@dataclass(frozen=True, slots=True)
class Holds(Pattern):
    """`{contains: p}`, `{length: p}`, or both: an item that fits (of a mapping: a key), and how many there are."""

    contains: Pattern | None = None
    length: Pattern | None = None

    def fits(self, value: Any, trial: Trial) -> bool:
        if value is None or (self.length is not None and not self.length.fits(len(value), trial)):
            return False
        return self.contains is None or any(self.contains.fits(each, trial) for each in value)

    def parts(self) -> Iterator[Pattern]:
        return (part for part in (self.contains, self.length) if part is not None)

    def told(self, known: Bindings) -> str:
        said = {"contains": self.contains, "length": self.length}
        return _mapping({key: part.told(known) for key, part in said.items() if part is not None})


@dataclass(frozen=True, slots=True)
class Entries(Pattern):
    """A mapping: these keys are there, and their values fit. The value may hold more."""

    entries: tuple[tuple[Any, Pattern], ...]

    def fits(self, value: Any, trial: Trial) -> bool:
        return all(key in value and pattern.fits(value[key], trial) for key, pattern in self.entries)

    def parts(self) -> Iterator[Pattern]:
        return (pattern for _, pattern in self.entries)

    def told(self, known: Bindings) -> str:
        return _mapping({key: pattern.told(known) for key, pattern in self.entries})


@dataclass(frozen=True, slots=True)
class Fields(Pattern):
    """A record within a record: these fields of it fit."""

    fields: tuple[tuple[str, Pattern], ...]

    def fits(self, value: Any, trial: Trial) -> bool:
        return value is not None and all(pattern.fits(getattr(value, name), trial) for name, pattern in self.fields)

    def parts(self) -> Iterator[Pattern]:
        return (pattern for _, pattern in self.fields)

    def told(self, known: Bindings) -> str:
        return _mapping({name: pattern.told(known) for name, pattern in self.fields})


def captures(pattern: Pattern) -> Iterator[str]:
    """The captures that the pattern uses, in order."""
    if isinstance(pattern, Capture):
        yield pattern.name
    for part in pattern.parts():
        yield from captures(part)


def binds(pattern: Pattern) -> Iterator[str]:
    """Those of them that it can bind: all but what it merely compares with."""
    if isinstance(pattern, Capture):
        yield pattern.name
    elif not isinstance(pattern, Compares):
        for part in pattern.parts():
            yield from binds(part)


def shown(value: Any) -> str:
    """A value of a record as a flow file would say it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return _mapping({key: shown(each) for key, each in value.items()})
    return str(value)


def _mapping(said: Mapping[Any, str]) -> str:
    return f"{{{', '.join(f'{key}: {text}' for key, text in said.items())}}}"
