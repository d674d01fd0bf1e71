"""What stands below `expect` and `faults` of a flow file → expectations and faults, every problem with its line.

An item that cannot be read is a problem and is left out: the rest of the file is read all the same. Values are text
as it was written (`jobspec.yamlfile`); the type of the field in the journal says what the text means.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from nvrx_slurm.jobspec.reading import Misfit, keys_of, read
from nvrx_slurm.jobspec.yamlfile import KeyPath
from nvrx_slurm.journal.records import RENAMED_EVENTS
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.model import (
    BEAT_FIELDS,
    PROGRESS,
    AnyOrder,
    Count,
    Eventually,
    Expectation,
    Fault,
    Happens,
    JobStateName,
    Never,
    OnEvent,
    OnFault,
    OnSeveral,
    OnState,
    Trigger,
)
from nvrx_slurm.lab.flow.patterns import (
    EVENTS,
    FIELDS,
    OPERATORS,
    RENAMED,
    Capture,
    Compares,
    Equals,
    EventPattern,
    Holds,
    ListItems,
    MappingEntries,
    Matches,
    Pattern,
    captures,
    fields_of,
)
from nvrx_slurm.lab.flow.problems import Problems, below, nearest
from nvrx_slurm.util.durations import parse_duration

_T = TypeVar("_T")

STATES: tuple[JobStateName, ...] = get_args(JobStateName)
ITEM_EXAMPLE = "job_ended: {exit_code: 0}"
TRIGGER_EXAMPLE = "when: {event: node_joined}"
DO_EXAMPLE = "do: {kill_node: {of_rank: 2}}"

# What an item can begin with besides an event's name → what may stand beside it.
_BESIDE: dict[str, tuple[str, ...]] = {
    "any_order": (),
    "eventually": ("within",),
    "never": ("until",),
    "count": ("is", "until"),
}

# What YAML takes for null.
NULLS = ("null", "Null", "NULL", "~")
_TRIGGERS = ("event", "state", "fault", "all", "any")
_CAPTURE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)", re.ASCII)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number, or a duration such as 500ms",
    str: "text",
    bool: "true or false",
    tuple: "a list such as [a, b], or {contains: a}, or {length: 2}",
    dict: "a mapping, or {contains: key}, or {length: 2}",
}


# ------------------------------------------------------------------------------------------- expectations


def read_expectations(problems: Problems, raw: Sequence[Any], at: KeyPath) -> tuple[Expectation, ...]:
    """The items of a list that stands at the key path `at`."""
    return _each(problems, raw, at, partial(_expectation, problems))


def _expectation(problems: Problems, raw: Any, at: KeyPath) -> Expectation:
    # The short form: an event by its name alone.
    item, line = {raw: None} if isinstance(raw, str) else _mapping(raw, ITEM_EXAMPLE), problems.line(at)
    heads = [key for key in item if key not in ("within", "until", "is")]
    if len(heads) != 1:
        seen = f"{' and '.join(f'`{head}`' for head in heads)}; write each as an item of its own" if heads else "none"
        raise Misfit(f"an item has one event, as `{ITEM_EXAMPLE}` has, not {seen}")
    head = heads[0]
    _check_keys(item.keys() - {head}, _BESIDE.get(head, ("within",)), beside=head)
    if head == "any_order":
        listed = item[head]
        if not isinstance(listed, list) or not listed:
            raise Misfit("must be a list of items, or of lists of items", head)
        return AnyOrder(line, _each(problems, listed, (*at, head), partial(_branch, problems)))
    if head not in _BESIDE:
        return Happens(line, _event(problems, head, item[head], at), _duration(item, "within"))

    events: dict[str, EventPattern] = {}
    for key in (head, "until"):
        if key in item:
            with below(key):
                event, fields = _only_key(item[key], f"{key}: {{node_lost: {{node: $dead}}}}")
                events[key] = _event(problems, event, fields, (*at, key))
    if head == "eventually":
        return Eventually(line, events[head], _duration(item, "within"))
    if head == "never":
        return Never(line, events[head], events.get("until"))
    if "is" not in item:
        raise Misfit("needs `is`: how often, such as `is: 3` or `is: '>= 2'`", "count")
    with below("is"):
        wanted = parse_pattern(item["is"], int)
        if not isinstance(wanted, (Equals, Compares)) or any(captures(wanted)):
            raise Misfit(f"must be a number such as 3, or a comparison such as '>= 2', not {item['is']!r}")
    return Count(line, events[head], wanted, events.get("until"))


def _branch(problems: Problems, raw: Any, at: KeyPath) -> tuple[Expectation, ...]:
    if raw == []:
        raise Misfit("a branch without an item expects nothing")
    return read_expectations(problems, raw, at) if isinstance(raw, list) else (_expectation(problems, raw, at),)


# ------------------------------------------------------------------------------------------------- faults


def read_faults(problems: Problems, raw: Sequence[Any], at: KeyPath) -> tuple[Fault, ...]:
    """The faults of a list that stands at the key path `at`."""
    return _each(problems, raw, at, partial(_fault, problems, len(raw)))


def _fault(problems: Problems, count: int, raw: Any, at: KeyPath) -> Fault:
    number = int(at[-1]) + 1  # its place in the list, from 1
    item = _mapping(raw, f"{{{TRIGGER_EXAMPLE}, {DO_EXAMPLE}}}")
    _check_keys(item, ("when", "do", "as"), beside="do")
    for key, example in (("when", TRIGGER_EXAMPLE), ("do", DO_EXAMPLE)):
        if key not in item:
            raise Misfit(f"needs `{key}`, as in `{example}`")
    with below("when"):
        when = read_trigger(problems, count, item["when"], (*at, "when"))
    with below("do"):
        action, given = _only_key(item["do"], DO_EXAMPLE)
        if action not in FAULTS:
            raise Misfit(f"is no fault; {nearest(action, FAULTS)} (all are in docs/flows.md)", action)
        block = FAULTS[action].arguments
        made, complaints = read(block, given)
        if made is None:
            path, sentence = next(iter(complaints.items()))
            raise Misfit(sentence, action, *map(str, path))
        # Arguments at their default are left out: a fault is described by what its file says.
        said = msgspec.structs.asdict(made)
        arguments = {name: said[name] for name, key in keys_of(block).items() if said[name] != key.default}
        for name, value in arguments.items():
            if isinstance(value, str):
                with below(action, name):
                    capture_name(value)
    if "as" not in item:
        return Fault(number, problems.line(at), when, action, arguments)
    with below("as"):
        binds = capture_name(item["as"]) if isinstance(item["as"], str) else None
        if binds is None:
            raise Misfit(f"must be a capture such as $dead, not {item['as']!r}")
        if FAULTS[action].names is None:
            named = [fault for fault, kind in FAULTS.items() if kind.names is not None]
            raise Misfit(f"names the node or the rank that was hit, and {action} hits none; {nearest(action, named)}")
    return Fault(number, problems.line(at), when, action, arguments, binds)


def read_trigger(problems: Problems, count: int, raw: Any, at: KeyPath) -> Trigger:
    """The trigger that stands at the key path `at`. `count`: how many faults the file has. Raises Misfit."""
    said = _mapping(raw, TRIGGER_EXAMPLE)
    heads = [head for head in _TRIGGERS if head in said]
    if len(heads) != 1:
        seen = " and ".join(f"`{head}`" for head in heads) or "none"
        raise Misfit(f"a trigger has one of {', '.join(_TRIGGERS)}, as in `{TRIGGER_EXAMPLE}`, not {seen}")
    head = heads[0]
    if head == "event":
        return _on_event(problems, said, at)
    _check_keys(said.keys() - {head}, ("after",), beside=head)
    value, after_s = said[head], _duration(said, "after") or 0.0
    if head == "state":
        if value not in STATES:
            raise Misfit(f"{value!r} is no state; {nearest(str(value), STATES)}", head)
        return OnState(value, after_s)
    if head == "fault":
        if not str(value).isdecimal() or not 1 <= int(value) <= count:
            raise Misfit(f"must be the number of a fault of this file, 1 to {count}, not {str(value)!r}", head)
        return OnFault(int(value), after_s)
    if not isinstance(value, list) or not value:
        raise Misfit("must be a list of triggers", head)
    parts = _each(problems, value, (*at, head), partial(read_trigger, problems, count))
    return OnSeveral(parts, head == "all", after_s)


def _on_event(problems: Problems, said: Mapping[str, Any], at: KeyPath) -> OnEvent:
    event = said["event"]
    if not isinstance(event, str):
        raise Misfit(f"must be the name of an event, such as node_joined, not {event!r}", "event")
    with below("event"):
        event = _known_event(event)
    fields = {key: value for key, value in said.items() if key not in ("event", "times", "after")}
    pattern = _event_pattern(problems, event, fields, at)
    if event == PROGRESS:
        # Heartbeats carry it again and again, and skip steps: a step means that one or a later one.
        if "times" in said:
            raise Misfit(
                "cannot be counted of progress, which every heartbeat repeats; name its cycle or step", "times"
            )
        for name, _ in pattern.fields:
            if name not in BEAT_FIELDS:
                raise Misfit(f"is not in heartbeats; {nearest(name, BEAT_FIELDS)}", name)
        read = [
            (name, Compares(">=", value) if name == "step" and isinstance(value, Equals) else value)
            for name, value in pattern.fields
        ]
        pattern = EventPattern(pattern.line, event, tuple(read))
    times = str(said.get("times", "1"))
    if not times.isdecimal() or int(times) < 1:
        raise Misfit(f"must be a whole number from 1, not {times!r}", "times")
    return OnEvent(pattern, int(times), _duration(said, "after") or 0.0)


# -------------------------------------------------------------------------------------- lists, events, mappings


def _each(
    problems: Problems, raw: Sequence[Any], at: KeyPath, read_item: Callable[[Any, KeyPath], _T]
) -> tuple[_T, ...]:
    """What `read_item` makes of each item of a list. One that cannot be read is a problem, and left out."""
    found: list[_T] = []
    for index, item in enumerate(raw):
        with problems.caught(*at, index):
            found.append(read_item(item, (*at, index)))
    return tuple(found)


def _event(problems: Problems, event: str, raw: Any, at: KeyPath) -> EventPattern:
    """The event whose fields stand in `raw`; `at`: the key path of the mapping that has the event as a key."""
    with below(event):
        known = _known_event(event)
        fields = {} if raw is None else _mapping(raw, f"{event}: {{field: value}}")
    return _event_pattern(problems, known, fields, (*at, event))


def _event_pattern(problems: Problems, event: str, fields: Mapping[str, Any], at: KeyPath) -> EventPattern:
    """A field that cannot be read is a problem, and left out."""
    found: list[tuple[str, Pattern]] = []
    valid = FIELDS[event]
    for name, value in fields.items():
        with problems.caught(*at, name):
            if name not in valid:
                raise Misfit(f"is no field of {event}; {nearest(name, valid) if valid else 'it has none'}")
            found.append((name, parse_pattern(value, valid[name])))
    return EventPattern(problems.line(at), event, tuple(found))


def _known_event(event: str) -> str:
    """The event's name today: flows written before 0.2 may have an older one."""
    event = RENAMED_EVENTS.get(event, event)
    if event not in EVENTS:
        raise Misfit(f"is no event of the journal; {nearest(event, EVENTS)} (all are in docs/journal.md)")
    return event


def _only_key(raw: Any, example: str) -> tuple[str, Any]:
    """The key of a mapping that has one, and its value: of `{kill_node: n3}`, or of `kill_node` alone."""
    if isinstance(raw, str):
        return raw, None
    said = _mapping(raw, example)
    if len(said) != 1:
        raise Misfit(f"must have one key, as `{example}` has, not {len(said)}")
    return next(iter(said.items()))


def _mapping(raw: Any, example: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise Misfit(f"must be a mapping such as `{example}`, not {raw!r}")
    return raw


def _duration(said: Mapping[str, Any], key: str) -> float | None:
    """Seconds; None where the key is not set."""
    if key not in said:
        return None
    try:
        return parse_duration(said[key])
    except ValueError as error:
        raise Misfit(str(error), key) from None


def _check_keys(said: Iterable[str], valid: Sequence[str], beside: str) -> None:
    for key in said:
        if key not in valid:
            may = f"; what may stand there: {', '.join(valid)}" if valid else ""
            raise Misfit(f"has no meaning beside `{beside}`{may}", key)


# ------------------------------------------------------------------------------------------------ patterns


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
        return _parse_text(raw, kind)
    if raw is None:
        return _null(kind)
    if isinstance(raw, Mapping):
        return _parse_mapping(raw, kind)
    if (a_tuple := option_of(kind, tuple)) is None:
        raise Misfit(f"must be {_describe(kind)}, not a list")
    inner = get_args(a_tuple)
    # `tuple[str, ...]` takes any length, `tuple[int, float]` its own only.
    kinds = [inner[0]] * len(raw) if inner[-1] is Ellipsis else list(inner)
    if len(raw) != len(kinds):
        raise Misfit(f"has {len(kinds)} items, not {len(raw)}")
    items = []
    for index, (each, of) in enumerate(zip(raw, kinds, strict=True)):
        with below(str(index)):
            items.append(parse_pattern(each, of))
    return ListItems(tuple(items))


def _parse_text(raw: str, kind: Any) -> Pattern:
    if (name := capture_name(raw)) is not None:
        return Capture(name)
    if raw.startswith("~"):
        text = raw[1:].strip()
        if option_of(kind, str) is None:
            raise Misfit(f"`~` searches in text, and this is {_describe(kind)}")
        try:
            return Matches(re.compile(text))
        except re.error as error:
            raise Misfit(f"`~ {text}` is no regular expression: {error}") from None
    for sign in OPERATORS:  # `>=` before `>`
        if raw.startswith(sign):
            text = raw.removeprefix(sign).strip()
            if sign != "!=" and option_of(kind, int) is None and option_of(kind, float) is None:
                raise Misfit(f"`{sign}` compares numbers, and this is {_describe(kind)}")
            if sign == "!=" and text in NULLS:
                return Compares(sign, _null(kind))
            name = capture_name(text)
            return Compares(sign, Equals(_literal(text, kind)) if name is None else Capture(name))
    return Equals(_literal(raw, kind))


def _null(kind: Any) -> Equals:
    if type(None) not in get_args(kind):
        raise Misfit(f"is never null; it is {_describe(kind)}")
    return Equals(None)


def _parse_mapping(raw: Mapping[str, Any], kind: Any) -> Pattern:
    """Of a list or mapping: `contains` and `length`; of a record: its fields; of a mapping: its keys."""
    of_dict, record = option_of(kind, dict), record_of(kind)
    found: dict[Any, Pattern] = {}
    # First: of a mapping these two words are never keys of its own.
    if (many := option_of(kind, tuple) or of_dict) is not None and raw and raw.keys() <= {"contains", "length"}:
        for key, of in (("contains", get_args(many)[0]), ("length", int)):
            if key in raw:
                with below(key):
                    found[key] = parse_pattern(raw[key], of)
        return Holds(found.get("contains"), found.get("length"))
    if record is not None:
        kinds = fields_of(record)
        for name, value in raw.items():
            with below(name):
                if name not in kinds:
                    raise Misfit(f"is no field of it; {nearest(name, kinds)}")
                found[name] = parse_pattern(value, kinds[name])
    elif of_dict is not None:
        of_key, of_value = get_args(of_dict)
        for name, value in raw.items():
            with below(name):
                found[_literal(name, of_key)] = parse_pattern(value, of_value)
    else:
        raise Misfit(f"must be {_describe(kind)}, not a mapping")
    return MappingEntries(tuple(found.items()))


def _literal(text: str, kind: Any) -> Any:
    """The value that the text means, by the field's own type."""
    text = RENAMED.get(text, text)
    # Text in YAML has no type of its own here: `1` is a number for a number's field, and text for a name's.
    for option in _options(kind):
        try:
            return msgspec.convert(text, option, strict=False)
        except msgspec.ValidationError:
            if option is float:
                try:
                    return parse_duration(text)
                except ValueError:
                    continue
    choices = [choice for option in _options(kind) if get_origin(option) is Literal for choice in get_args(option)]
    near = difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise Misfit(f"must be {_describe(kind)}, not {text!r}{meant}")


def _options(kind: Any) -> tuple[Any, ...]:
    """The types that a union lists, without None; of any other type itself alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(option for option in get_args(kind) if option is not type(None))
    return (kind,)


def option_of(kind: Any, wanted: type) -> Any:
    """What the type lists of this kind, such as `tuple[int, ...]`; None: nothing."""
    return next((option for option in _options(kind) if (get_origin(option) or option) is wanted), None)


def record_of(kind: Any) -> type[msgspec.Struct] | None:
    """The record that the type lists, if it lists one."""
    records = (option for option in _options(kind) if isinstance(option, type) and issubclass(option, msgspec.Struct))
    return next(records, None)


def _describe(kind: Any) -> str:
    """What the type can be, for people."""
    found = []
    for option in _options(kind):
        if get_origin(option) is Literal:
            found.append(f"one of {', '.join(get_args(option))}")
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            found.append(f"one of {', '.join(option)}")
        elif record_of(option) is not None:
            found.append("a mapping of its fields")
        else:
            found.append(_WORDS[get_origin(option) or option])
    return " or ".join(found)
