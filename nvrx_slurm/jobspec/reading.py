"""Plain values of a file → a frozen block of the model, or every complaint about them with its key.

A block is a msgspec struct. The annotation of each field is the rule for its value: type, checks before and after it
(`Before`, `After`), bounds (`msgspec.Meta`), written form (`Written`), JSON Schema (`Schema`), and, as plain text,
its meaning.

msgspec decodes blocks that this package has written, such as those of `plan.json`; it stops at the first error. What
people write is read by `read`, which goes on after one.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import msgspec

from nvrx_slurm.errors import ConfigError

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.yamlfile import KeyPath

# Characters of a value that a message repeats.
MOST_SHOWN = 60

_Check = Callable[[Any], Any]
_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0*)?")
# Stands for a value with an error.
_INVALID: Any = object()


class Misfit(ValueError):
    """What is wrong with one key of a mapping that is looked at as a whole. `path`: that key, from the mapping."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


# eq=False has notes hashed by identity: `rule_of` is cached by the annotation, whose hash is made of its notes, and
# the dict in a `Schema` has none.
class Before(msgspec.Struct, frozen=True, eq=False):
    """Changes a value before its type is checked; of several the last one comes first. Raises ValueError."""

    change: _Check


class After(msgspec.Struct, frozen=True, eq=False):
    """Checks a value that has its type, and returns it. Raises ValueError."""

    check: _Check


class Written(msgspec.Struct, frozen=True, eq=False):
    """How job.yaml holds the value."""

    form: _Check


class Schema(msgspec.Struct, frozen=True, eq=False):
    """The value's JSON Schema, in place of its type's."""

    schema: Mapping[str, Any]


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mapping of a file: immutable. `read` refuses keys that it does not have; msgspec's decoders pass them, so
    that one version can read what another has written."""

    @classmethod
    def long_form(cls, value: object) -> object:
        """The mapping that a short form stands for, also one of some of its keys. Raises ValueError."""
        return value

    def settled(self, said: Mapping[str, Any]) -> Self:
        """This block with defaults that depend on other keys; `said`: the mapping that it was read from. Raises
        Misfit for keys that contradict each other."""
        return self


_B = TypeVar("_B", bound=Block)


class ValueRule(msgspec.Struct, frozen=True):
    """How a value is read: the annotation of a field, taken apart."""

    kind: Any
    """`str`, `int`, `float`, `bool`, `tuple`, `dict`, `Literal`, a Block, or Any where `before` does it all."""
    inner: tuple[ValueRule, ...] = ()
    """Of a tuple: that of its items. Of a dict: those of its keys and of its values."""
    choices: tuple[Any, ...] = ()
    is_optional: bool = False
    before: tuple[_Check, ...] = ()
    after: tuple[_Check, ...] = ()
    least: float | None = None
    most: float | None = None
    written: _Check | None = None
    schema: Mapping[str, Any] | None = None
    about: str | None = None


class Key(msgspec.Struct, frozen=True):
    """A key of a block. `default` is None where it is required."""

    rule: ValueRule
    is_required: bool
    default: Any


def read(block: type[_B], value: object) -> tuple[_B | None, Mapping[KeyPath, str]]:
    """The block that the value describes, or None and key path → what is wrong there."""
    found: dict[KeyPath, str] = {}
    made = _read(ValueRule(block), value, (), found)
    return (None, _hinted(found, block)) if found else (made, {})


def checked(block: type[Block], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some of the block's keys, each as its rule has it. Raises ValueError with all problems."""
    found: dict[KeyPath, str] = {}
    values = {name: _read(keys_of(block)[name].rule, value, (name,), found) for name, value in raw.items()}
    if found:
        raise ValueError("; ".join(f"{dotted(path)}: {text}" for path, text in _hinted(found, block).items()))
    return values


def written(block: Block) -> dict[str, Any]:
    """The block as job.yaml holds it, every key with its value."""
    return {name: as_written(key.rule, getattr(block, name)) for name, key in keys_of(type(block)).items()}


@functools.cache
def keys_of(block: type[Block]) -> dict[str, Key]:
    """The block's keys, in the order of the model."""
    found = {}
    for field in msgspec.structs.fields(block):
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        else:
            default = None if field.required else field.default
        found[field.name] = Key(rule_of(field.type), field.required, default)
    return found


@functools.cache
def rule_of(annotation: Any) -> ValueRule:
    """The rule in a type annotation."""
    notes: tuple[Any, ...] = ()
    is_optional = False
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *more = get_args(annotation)
            # As Python itself joins nested ones: what stands further in comes first.
            notes = (*more, *notes)
        elif origin in (Union, types.UnionType):
            options = [option for option in get_args(annotation) if option is not types.NoneType]
            is_optional = is_optional or len(options) < len(get_args(annotation))
            annotation = options[0] if len(options) == 1 else Any
        else:
            break
    bounds = [note for note in notes if isinstance(note, msgspec.Meta)]
    return ValueRule(
        kind=origin or annotation,
        inner=tuple(rule_of(each) for each in get_args(annotation) if each is not ...)
        if origin in (tuple, dict)
        else (),
        choices=get_args(annotation) if origin is Literal else (),
        is_optional=is_optional,
        before=tuple(note.change for note in reversed(notes) if isinstance(note, Before)),
        after=tuple(note.check for note in notes if isinstance(note, After)),
        least=next((note.ge for note in bounds if note.ge is not None), None),
        most=next((note.le for note in bounds if note.le is not None), None),
        written=next((note.form for note in notes if isinstance(note, Written)), None),
        schema=next((note.schema for note in reversed(notes) if isinstance(note, Schema)), None),
        about=next((note for note in reversed(notes) if isinstance(note, str)), None),
    )


# ------------------------------------------------------------------------------------------------ reading


def _read(rule: ValueRule, value: Any, at: KeyPath, found: dict[KeyPath, str]) -> Any:
    """The value, or `_INVALID` with at least one complaint more in `found`."""
    if value is None and rule.is_optional:
        return None
    before = len(found)
    try:
        for change in rule.before:
            value = change(value)
        if (block := block_of(rule)) is not None:
            value = _block(block, value, at, found)
        elif rule.kind is dict:
            if not isinstance(value, dict):
                raise ValueError(f"must be a mapping of keys, not {shown(value)}")
            of_key, of_value = rule.inner
            value = {
                _read(of_key, name, (*at, name), found): _read(of_value, each, (*at, name), found)
                for name, each in value.items()
            }
        elif rule.kind is tuple:
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"must be a list, not {shown(value)}")
            value = tuple(_read(rule.inner[0], each, (*at, index), found) for index, each in enumerate(value))
        else:
            value = _scalar(rule, value)
        # A check sees only a value that is right so far, as a whole.
        if value is _INVALID or len(found) > before:
            return _INVALID
        for check in rule.after:
            value = check(value)
        return value
    except Misfit as misfit:
        found.setdefault((*at, *misfit.path), str(misfit))
    except ValueError as error:
        found.setdefault(at, str(error))
    return _INVALID


def _block(block: type[Block], raw: Any, at: KeyPath, found: dict[KeyPath, str]) -> Any:
    if isinstance(raw, block):  # a Python caller has made it
        return raw
    if not isinstance(raw, dict):
        long = block.long_form(raw)
        if not isinstance(long, dict):
            raise ValueError(f"must be a mapping of keys, not {shown(raw)}")
        below: dict[KeyPath, str] = {}
        made = _block(block, long, (), below)
        for path, text in below.items():  # a key that the short form stands for is not in the file
            found.setdefault(at if path and path[0] in long else (*at, *path), text)
        return made
    # A mapping may hold short forms of single keys, too.
    raw = block.long_form(raw)
    assert isinstance(raw, dict)
    keys = keys_of(block)
    before = len(found)
    values = {}
    for name, key in keys.items():
        if name in raw:
            values[name] = _read(key.rule, raw[name], (*at, name), found)
        elif key.is_required:
            found.setdefault((*at, name), "is required")
    for name in raw:
        if name not in keys:
            found.setdefault((*at, name), _UNKNOWN)
    # Relations are judged only where each key alone is well: a wrong one would be reported twice.
    return block(**values).settled(raw) if len(found) == before else _INVALID


def _scalar(rule: ValueRule, raw: Any) -> Any:
    """Raises ValueError."""
    value = raw
    if rule.kind is str:
        if not isinstance(raw, str):
            raise ValueError(f"must be text, not {shown(raw)}")
    elif rule.kind is bool:
        if not isinstance(raw, bool):
            raise ValueError(f"must be true or false, not {shown(raw)}")
    elif rule.kind is int:
        # `3.0` is a whole number; True is an int of Python, and none of job.yaml.
        if isinstance(raw, (int, float)) and not isinstance(raw, bool) and raw == raw // 1:
            value = int(raw)
        else:
            text = raw.strip() if isinstance(raw, str) else ""
            # A longer one than this passes no bound, and Python refuses to read one of thousands of digits.
            if not _WHOLE.fullmatch(text) or len(text) > MOST_SHOWN:
                raise ValueError(f"must be a whole number, not {shown(raw)}")
            value = int(text.partition(".")[0])
    elif rule.kind is float:
        try:
            value = float(raw)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"must be a number, not {shown(raw)}") from None
    elif rule.kind is Literal and raw not in rule.choices:
        *others, last = map(repr, rule.choices)
        valid = f"one of {', '.join(others)} or {last}" if others else last
        raise ValueError(f"must be {valid}, not {shown(raw)}")
    # `not (a <= b)`, since every comparison with NaN is false
    if rule.least is not None and not rule.least <= value:
        raise ValueError(f"must be at least {rule.least}, not {shown(raw)}")
    if rule.most is not None and not value <= rule.most:
        raise ValueError(f"must be at most {rule.most}, not {shown(raw)}")
    return value


def as_written(rule: ValueRule, value: Any) -> Any:
    """The value as job.yaml holds it."""
    if value is None:
        return None
    if rule.written is not None:
        return rule.written(value)
    if isinstance(value, Block):
        return written(value)
    if isinstance(value, dict):
        return {name: as_written(rule.inner[1], each) for name, each in value.items()}
    return [as_written(rule.inner[0], each) for each in value] if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------------------------ messages

_UNKNOWN = "is not known"


def dotted(path: KeyPath) -> str:
    """The path as people write it: `slurm.time`."""
    return ".".join(map(str, path))


def by_path(data: Mapping[str, Any], at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no mapping, or an empty one, with its path, in the order of the mappings."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from by_path(value, (*at, key))
        else:
            yield (*at, key), value


def together(found: Sequence[ConfigError]) -> ConfigError:
    """One error that lists all of these, in the order of their files and lines."""
    if len(found) == 1:
        return found[0]
    ordered = sorted(found, key=lambda one: (one.file or "", one.line or 0))
    return ConfigError("\n  ".join([f"{len(ordered)} problems:", *map(str, ordered)]))


def shown(value: object) -> str:
    """A value in a message: of a long text the beginning."""
    return repr(value[:MOST_SHOWN] + "…" if isinstance(value, str) and len(value) > MOST_SHOWN else value)


def _hinted(found: Mapping[KeyPath, str], root: type[Block]) -> dict[KeyPath, str]:
    """The complaints; those about an unknown key name the key that was meant."""
    import difflib  # only where something is wrong

    hinted = dict(found)
    for path, text in found.items():
        if text is not _UNKNOWN:
            continue
        key, block = str(path[-1]), root
        for part in path[:-1]:  # a role's name is no key of a block, and leads nowhere else
            known = keys_of(block).get(str(part))
            block = (known and block_in(known.rule)) or block
        valid = list(keys_of(block))
        # Meant is one that begins like it, or is spelled much alike; else one of another block; else one that is
        # spelled somewhat alike.
        near = [name for name in valid if name.startswith(f"{key}_")]
        near = near or difflib.get_close_matches(key, valid, cutoff=0.7)
        near = near or [dotted(home) for name, home in _homes(root) if name == key]
        near = near or difflib.get_close_matches(key, valid, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"valid here: {', '.join(valid) or 'nothing'}"
        hinted[path] = f"{text}; {hint}"
    return hinted


def _homes(block: type[Block], at: KeyPath = ()) -> Iterator[tuple[str, KeyPath]]:
    """Every key of the block and below, with its path; roles aside, whose names are the user's."""
    for name, key in keys_of(block).items():
        yield name, (*at, name)
        inner = block_in(key.rule)
        if inner is not None and name != "roles":
            yield from _homes(inner, (*at, name))


def block_of(rule: ValueRule) -> type[Block] | None:
    """The block that a value of the rule is."""
    return rule.kind if isinstance(rule.kind, type) and issubclass(rule.kind, Block) else None


def block_in(rule: ValueRule) -> type[Block] | None:
    """The block that the rule holds, directly or as a mapping's value."""
    return block_of(rule) or next((found for each in rule.inner if (found := block_in(each)) is not None), None)


def rule_below(rule: ValueRule, key: str) -> ValueRule | None:
    """The rule of one key of a block or a mapping; None where it is not known."""
    if block := block_of(rule):
        return keys_of(block)[key].rule if key in keys_of(block) else None
    return rule.inner[1] if rule.kind is dict else None
