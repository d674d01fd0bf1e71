"""Patterns: what a flow asks of a field and of an event of the journal, and whether a value fits. Pure."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

import msgspec

from nvrx_slurm.journal.records import AnyRecord
from nvrx_slurm.report.words import event_name

# Capture, without its `$` → its value.
Bindings = Mapping[str, Any]

# Longer ones first: `>=` begins with `>`.
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}

# Values in flows of older versions → what the journal says today.
RENAMED = {"tether_lost": "connection_closed"}


def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A record's fields, each with its type; without the bounds that hold for its values."""
    types = get_type_hints(kind)
    return {part.name: types[part.name] for part in msgspec.structs.fields(kind)}


# Every event's name → its record.
EVENTS: dict[str, type[msgspec.Struct]] = {event_name(kind): kind for kind in get_args(AnyRecord)}

# Every event's name → its fields, each with its type.
FIELDS: dict[str, dict[str, Any]] = {event: fields_of(kind) for event, kind in EVENTS.items()}


@dataclass(slots=True)
class Trial:
    """The captures while one entry is looked at. `new` is what it would bind; `may_bind` says which of those may."""

    known: Bindings
    may_bind: Callable[[str], bool] = lambda name: False
    new: dict[str, Any] = field(default_factory=dict)

    def agrees(self, name: str, value: Any) -> bool:
        """Whether the capture has this value, or may have it from now on."""
        # What the entry itself has bound counts for its other fields: `[$a, $a]` fits only two equal items.
        for bindings in (self.known, self.new):
            if name in bindings:
                return bool(bindings[name] == value)
        if not self.may_bind(name):
            return False
        self.new[name] = value
        return True


class Described(ABC):
    """A part of a flow file. `str(part)` is how the file says it."""

    __slots__ = ()

    @abstractmethod
    def describe(self, known: Bindings) -> str:
        """As text, with the values of the captures that are known: `node_lost {node: n2 ($dead)}`."""

    def __str__(self) -> str:
        return self.describe({})


class Pattern(Described):
    """What a value must be."""

    __slots__ = ()

    @abstractmethod
    def fits(self, value: Any, trial: Trial) -> bool:
        """Whether `value` is meant; captures on the way are bound in the trial."""

    def parts(self) -> Iterator[Pattern]:
        """The patterns that it is made of."""
        return iter(())


@dataclass(frozen=True, slots=True)
class Equals(Pattern):
    """A literal."""

    value: Any

    def fits(self, value: Any, trial: Trial) -> bool:
        return bool(value == self.value)

    def describe(self, known: Bindings) -> str:
        return shown(self.value)


@dataclass(frozen=True, slots=True)
class Capture(Pattern):
    """`$name`: binds where it is first used, compares afterwards."""

    name: str

    def fits(self, value: Any, trial: Trial) -> bool:
        return trial.agrees(self.name, value)

    def describe(self, known: Bindings) -> str:
        return f"{shown(known[self.name])} (${self.name})" if self.name in known else f"${self.name}"


@dataclass(frozen=True, slots=True)
class Compares(Pattern):
    """`">= 5"`, `"!= $dead"`. A capture is compared with, never bound. What is not known (null) is only `!=`."""

    sign: str
    operand: Equals | Capture

    def fits(self, value: Any, trial: Trial) -> bool:
        if value is None and self.sign != "!=":
            return False
        if isinstance(self.operand, Equals):
            return OPERATORS[self.sign](value, self.operand.value)
        # Not `trial.agrees`: a comparison binds nothing, so a capture without a value does not fit.
        bound = {**trial.known, **trial.new}
        if self.operand.name not in bound:
            return False
        try:
            return OPERATORS[self.sign](value, bound[self.operand.name])
        except TypeError:  # a number, and a capture that is a text or not known
            return False

    def parts(self) -> Iterator[Pattern]:
        return iter((self.operand,))

    def describe(self, known: Bindings) -> str:
        return f"{self.sign} {self.operand.describe(known)}"


@dataclass(frozen=True, slots=True)
class Matches(Pattern):
    """`"~ regex"`: found somewhere in the text."""

    regex: re.Pattern[str]

    def fits(self, value: Any, trial: Trial) -> bool:
        return isinstance(value, str) and self.regex.search(value) is not None

    def describe(self, known: Bindings) -> str:
        return f"~ {self.regex.pattern}"


@dataclass(frozen=True, slots=True)
class ListItems(Pattern):
    """A list: as long as the value, and each item fits."""

    items: tuple[Pattern, ...]

    def fits(self, value: Any, trial: Trial) -> bool:
        if not isinstance(value, (tuple, list)) or len(value) != len(self.items):
            return False
        return all(item.fits(each, trial) for item, each in zip(self.items, value, strict=True))

    def parts(self) -> Iterator[Pattern]:
        return iter(self.items)

    def describe(self, known: Bindings) -> str:
        return f"[{', '.join(item.describe(known) for item in self.items)}]"


@dataclass(frozen=True, slots=True)
class Holds(Pattern):
    """`{contains: p}`, `{length: p}`, or both: an item that fits (of a mapping: a key), and how many there are."""

    contains: Pattern | None = None
    length: Pattern | None = None

    def fits(self, value: Any, trial: Trial) -> bool:
        if value is None or (self.length is not None and not self.length.fits(len(value), trial)):
            return False
        if self.contains is None:
            return True
        for each in value:
            own = replace(trial, new=dict(trial.new))  # an item that does not fit binds nothing
            if self.contains.fits(each, own):
                trial.new.update(own.new)
                return True
        return False

    def parts(self) -> Iterator[Pattern]:
        return (part for part in (self.contains, self.length) if part is not None)

    def describe(self, known: Bindings) -> str:
        said = {"contains": self.contains, "length": self.length}
        return _mapping({key: part.describe(known) for key, part in said.items() if part is not None})


@dataclass(frozen=True, slots=True)
class MappingEntries(Pattern):
    """A mapping, or a record within a record: these keys are there, and their values fit. It may hold more."""

    entries: tuple[tuple[Any, Pattern], ...]

    def fits(self, value: Any, trial: Trial) -> bool:
        if isinstance(value, Mapping):
            return all(key in value and pattern.fits(value[key], trial) for key, pattern in self.entries)
        # A record within a record has its fields as attributes. What an unlike event has in that field is neither.
        return isinstance(value, msgspec.Struct) and all(
            pattern.fits(getattr(value, name), trial) for name, pattern in self.entries
        )

    def parts(self) -> Iterator[Pattern]:
        return (pattern for _, pattern in self.entries)

    def describe(self, known: Bindings) -> str:
        return _mapping({key: pattern.describe(known) for key, pattern in self.entries})


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


@dataclass(frozen=True, slots=True)
class EventPattern(Described):
    """An event of the journal, and what its fields must be. `line`: where the flow file says so."""

    line: int
    event: str
    fields: tuple[tuple[str, Pattern], ...] = ()

    def fits(self, record: AnyRecord, trial: Trial) -> bool:
        """Whether the record is meant; the trial then holds the values of its captures."""
        if event_name(record) != self.event:
            return False
        return all(pattern.fits(getattr(record, name), trial) for name, pattern in self.fields)

    def differences(self, record: AnyRecord, trial: Trial) -> Iterator[str]:
        """Which fields of the event are otherwise, a thing each: `cycle: 0, not 1`."""
        for name, pattern in self.fields:
            value = getattr(record, name, None)
            if not pattern.fits(value, trial):
                yield f"{name}: {shown(value)}, not {pattern.describe(trial.known)}"

    def describe(self, known: Bindings) -> str:
        said = ", ".join(f"{name}: {pattern.describe(known)}" for name, pattern in self.fields)
        return f"{self.event} {{{said}}}" if said else self.event

    def captures(self) -> Iterator[str]:
        """Every capture that it uses."""
        return (name for _, pattern in self.fields for name in captures(pattern))

    def binds(self) -> Iterator[str]:
        """The captures that it can bind."""
        return (name for _, pattern in self.fields for name in binds(pattern))
