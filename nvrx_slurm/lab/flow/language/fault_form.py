"""What stands below `faults` of a flow file → faults and their triggers, every problem with its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from nvrx_slurm.jobspec.reading import Misfit, keys_of, read
from nvrx_slurm.jobspec.yamlfile import KeyPath
from nvrx_slurm.lab.flow.judging.triggers import BEAT_FIELDS, PROGRESS
from nvrx_slurm.lab.flow.language.event_form import (
    check_keys,
    event_pattern,
    mapping,
    only_key,
    read_duration,
)
from nvrx_slurm.lab.flow.language.events import EventPattern, check_event
from nvrx_slurm.lab.flow.language.faults import FAULTS
from nvrx_slurm.lab.flow.language.model import Fault
from nvrx_slurm.lab.flow.language.parsing import capture_name
from nvrx_slurm.lab.flow.language.patterns import Compares, Equals, Pattern
from nvrx_slurm.lab.flow.language.problems import Problems, nearest
from nvrx_slurm.lab.flow.language.when import (
    JobStateName,
    OnAll,
    OnAny,
    OnEvent,
    OnFault,
    OnState,
    Trigger,
)

STATES: tuple[JobStateName, ...] = get_args(JobStateName)
EXAMPLE = "when: {event: node_joined}"
DO_EXAMPLE = "do: {kill_node: {of_rank: 2}}"
_KEYS = ("when", "do", "as")


def read_faults(problems: Problems, raw: Sequence[Any], at: KeyPath) -> tuple[Fault, ...]:
    """The file's faults. One that cannot be read is a problem, and left out."""
    found: list[Fault] = []
    for index, item in enumerate(raw):
        with problems.caught(*at, index):
            found.append(_fault(problems, item, index + 1, len(raw), (*at, index)))
    return tuple(found)


def _fault(problems: Problems, raw: Any, number: int, most: int, at: KeyPath) -> Fault:
    item = mapping(raw, f"{{{EXAMPLE}, {DO_EXAMPLE}}}")
    check_keys(item, _KEYS, beside="do")
    for key in ("when", "do"):
        if key not in item:
            raise Misfit(f"needs `{key}`, as in `{EXAMPLE if key == 'when' else DO_EXAMPLE}`")
    when = _at_key("when", lambda: read_trigger(problems, item["when"], (*at, "when"), most))
    action, arguments = _at_key("do", lambda: _action(item["do"]))
    binds = _at_key("as", lambda: _name(item["as"], action)) if "as" in item else None
    return Fault(number, problems.line(at), when, action, arguments, binds)


def _at_key(key: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Misfit as misfit:
        raise Misfit(str(misfit), key, *misfit.path) from None


def _action(raw: Any) -> tuple[str, Mapping[str, Any]]:
    action, given = only_key(raw, DO_EXAMPLE)
    if action not in FAULTS:
        raise Misfit(f"is no fault; {nearest(action, FAULTS)} (all are in docs/flows.md)", action)
    block = FAULTS[action].arguments
    made, complaints = read(block, given)
    if made is None:
        path, sentence = next(iter(complaints.items()))
        raise Misfit(sentence, action, *map(str, path))
    said = msgspec.structs.asdict(made)
    arguments = {name: said[name] for name, key in keys_of(block).items() if said[name] != key.default}
    for key, value in arguments.items():
        if isinstance(value, str):
            try:
                capture_name(value)
            except Misfit as misfit:
                raise Misfit(str(misfit), action, key) from None
    return action, arguments


def _name(raw: Any, action: str) -> str:
    name = capture_name(raw) if isinstance(raw, str) else None
    if name is None:
        raise Misfit(f"must be a capture such as $dead, not {raw!r}")
    if FAULTS[action].names is None:
        named = [fault for fault, kind in FAULTS.items() if kind.names is not None]
        raise Misfit(f"names the node or the rank that was hit, and {action} hits none; {nearest(action, named)}")
    return name


# ------------------------------------------------------------------------------------------------- triggers


def read_trigger(problems: Problems, raw: Any, at: KeyPath, faults: int) -> Trigger:
    """The trigger that stands at the key path `at`. `faults`: how many the file has. Raises Misfit."""
    said = mapping(raw, EXAMPLE)
    heads = [head for head in _FORMS if head in said]
    if len(heads) != 1:
        seen = " and ".join(f"`{head}`" for head in heads) or "none"
        raise Misfit(f"a trigger has one of {', '.join(_FORMS)}, as in `{EXAMPLE}`, not {seen}")
    head = heads[0]
    if head != "event":
        check_keys(said.keys() - {head}, ("after",), beside=head)
    return _FORMS[head](problems, said, at, faults)


def _on_event(problems: Problems, said: Mapping[str, Any], at: KeyPath, faults: int) -> Trigger:
    event = said["event"]
    if not isinstance(event, str):
        raise Misfit(f"must be the name of an event, such as node_joined, not {event!r}", "event")
    _at_key("event", lambda: check_event(event))
    fields = {key: value for key, value in said.items() if key not in ("event", "times", "after")}
    pattern = event_pattern(problems, event, fields, at)
    if event == PROGRESS:
        pattern = _of_beats(pattern, said)
    return OnEvent(pattern, _times(said), read_duration(said, "after") or 0.0)


def _of_beats(pattern: EventPattern, said: Mapping[str, Any]) -> EventPattern:
    """Beats tell progress again and again, and skip steps: a step means that one or a later one."""
    if "times" in said:
        raise Misfit("cannot be counted of progress, which every beat tells again; name its cycle or step", "times")
    for name, _ in pattern.fields:
        if name not in BEAT_FIELDS:
            raise Misfit(f"is not told by beats; {nearest(name, BEAT_FIELDS)}", name)
    fields = ((name, _at_least(value) if name == "step" else value) for name, value in pattern.fields)
    return EventPattern(pattern.line, pattern.event, tuple(fields))


def _at_least(step: Pattern) -> Pattern:
    return Compares(">=", step) if isinstance(step, Equals) else step


def _times(said: Mapping[str, Any]) -> int:
    raw = str(said.get("times", "1"))
    if not raw.isdecimal() or int(raw) < 1:
        raise Misfit(f"must be a whole number from 1, not {raw!r}", "times")
    return int(raw)


def _on_state(problems: Problems, said: Mapping[str, Any], at: KeyPath, faults: int) -> Trigger:
    state = said["state"]
    if state not in STATES:
        raise Misfit(f"{state!r} is no state; {nearest(str(state), STATES)}", "state")
    return OnState(problems.line(at), state, read_duration(said, "after") or 0.0)


def _on_fault(problems: Problems, said: Mapping[str, Any], at: KeyPath, faults: int) -> Trigger:
    number = str(said["fault"])
    if not number.isdecimal() or not 1 <= int(number) <= faults:
        raise Misfit(f"must be the number of a fault of this file, 1 to {faults}, not {number!r}", "fault")
    return OnFault(problems.line(at), int(number), read_duration(said, "after") or 0.0)


def _on_several(
    kind: type[OnAll | OnAny], key: str
) -> Callable[[Problems, Mapping[str, Any], KeyPath, int], Trigger]:
    def read(problems: Problems, said: Mapping[str, Any], at: KeyPath, faults: int) -> Trigger:
        raw = said[key]
        if not isinstance(raw, list) or not raw:
            raise Misfit("must be a list of triggers", key)
        parts: list[Trigger] = []
        for index, part in enumerate(raw):
            with problems.caught(*at, key, index):
                parts.append(read_trigger(problems, part, (*at, key, index), faults))
        return kind(problems.line(at), tuple(parts), read_duration(said, "after") or 0.0)

    return read


_FORMS: dict[str, Callable[[Problems, Mapping[str, Any], KeyPath, int], Trigger]] = {
    "event": _on_event,
    "state": _on_state,
    "fault": _on_fault,
    "all": _on_several(OnAll, "all"),
    "any": _on_several(OnAny, "any"),
}
