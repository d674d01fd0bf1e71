"""How a flow file names an event of the journal: `node_lost: {node: $dead}`. Shared by expectations and triggers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nvrx_slurm.jobspec.reading import Misfit
from nvrx_slurm.jobspec.yamlfile import KeyPath
from nvrx_slurm.lab.flow.language.events import EventPattern, check_event, field_type
from nvrx_slurm.lab.flow.language.parsing import parse_pattern
from nvrx_slurm.lab.flow.language.patterns import Pattern
from nvrx_slurm.lab.flow.language.problems import Problems
from nvrx_slurm.util.durations import parse_duration


def read_event(problems: Problems, event: str, raw: Any, at: KeyPath) -> EventPattern:
    """The event whose fields stand in `raw`, at the key path `at`. A bad field is a problem, and left out."""
    try:
        check_event(event)
    except Misfit as misfit:
        raise Misfit(str(misfit), event) from None
    fields = {} if raw is None else mapping(raw, f"{event}: {{field: value}}", event)
    return event_pattern(problems, event, fields, (*at, event))


def event_pattern(problems: Problems, event: str, fields: Mapping[str, Any], at: KeyPath) -> EventPattern:
    """The event with these fields, which stand at the key path `at`."""
    read: list[tuple[str, Pattern]] = []
    for name, value in fields.items():
        with problems.caught(*at):
            read.append((name, _field(event, name, value)))
    return EventPattern(problems.line(at), event, tuple(read))


def _field(event: str, name: str, raw: Any) -> Pattern:
    kind = field_type(event, name)
    try:
        return parse_pattern(raw, kind)
    except Misfit as misfit:
        raise Misfit(str(misfit), name, *misfit.path) from None


def read_only_event(problems: Problems, raw: Any, at: KeyPath, example: str) -> EventPattern:
    """The one event of a mapping such as `{node_lost: {node: $dead}}`, which stands at the key path `at`."""
    event, fields = only_key(raw, example)
    return read_event(problems, event, fields, at)


def only_key(raw: Any, example: str) -> tuple[str, Any]:
    """The key of a mapping that has one, and its value: of `{kill_node: n3}`, or of `kill_node` alone."""
    if isinstance(raw, str):
        return raw, None
    said = mapping(raw, example)
    if len(said) != 1:
        raise Misfit(f"must have one key, as `{example}` has, not {len(said)}")
    return next(iter(said.items()))


def mapping(raw: Any, example: str, *key: str) -> Mapping[str, Any]:
    """Raises Misfit, at `key`, for anything but a mapping."""
    if not isinstance(raw, dict):
        raise Misfit(f"must be a mapping such as `{example}`, not {raw!r}", *key)
    return raw


def read_duration(said: Mapping[str, Any], key: str) -> float | None:
    """Seconds; None where the key is not set."""
    if key not in said:
        return None
    try:
        return parse_duration(said[key])
    except ValueError as error:
        raise Misfit(str(error), key) from None


def check_keys(said: Iterable[str], valid: Iterable[str], beside: str) -> None:
    """Raises Misfit for a key that has no meaning where it stands."""
    valid = tuple(valid)
    for key in said:
        if key not in valid:
            may = f"; what may stand there: {', '.join(valid)}" if valid else ""
            raise Misfit(f"has no meaning beside `{beside}`{may}", key)
