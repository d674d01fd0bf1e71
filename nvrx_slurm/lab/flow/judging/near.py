"""Of an expectation that is not met, what a person wants to know: what came around it, what almost was it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvrx_slurm.journal.records import AnyRecord, Entry
from nvrx_slurm.lab.flow.judging.expectations import Judging, Verdict
from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import Count, Never
from nvrx_slurm.lab.flow.language.patterns import Trial
from nvrx_slurm.report.words import event_name

AROUND = 5
"""How many entries are shown before the moment, and how many after."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The entry that came closest, and each thing that kept it from being the one, in words."""

    entry: Entry
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """The first expectation that is not met. `line`: where it stands; `around`: the entries about the moment at which
    that was certain, those after it as far as they have come."""

    line: int
    expected: str
    reason: str
    around: tuple[Entry, ...]
    nearest: Nearest | None


def miss_of(judging: Judging, verdict: Verdict, history: Sequence[Entry], nearest: Nearest | None) -> Miss:
    """The verdict, for people."""
    telling = verdict.moment - 1
    around = tuple(history[max(0, telling - AROUND) : telling + 1 + AROUND])
    nobody = [name for name in verdict.item.event.captures() if name in judging.promised]
    unnamed = f"; ${nobody[0]} stands for nothing yet: the fault that names it has not struck" if nobody else ""
    expected = verdict.item.told(judging.bindings)
    return Miss(verdict.item.line, expected, verdict.reason + unnamed, around, nearest)


def nearest_entry(judging: Judging, verdict: Verdict, history: Sequence[Entry]) -> Nearest | None:
    """The entry that is most like what was expected: the same event first, then the fewest fields that differ, then
    the latest. None where nothing is like it, or where an entry too many is the fault."""
    if isinstance(verdict.item, Never):
        return None
    found = [near for entry in history if (near := _near(judging, verdict, entry)) is not None]
    closest = min(reversed(found), key=lambda near: near.distance, default=None)
    return None if closest is None else Nearest(closest.entry, closest.differences)


@dataclass(frozen=True, slots=True)
class _Near:
    """An entry that could be the nearest. `distance`: whether its event differs, and how many fields do."""

    entry: Entry
    differences: tuple[str, ...]
    distance: tuple[bool, int]


def _near(judging: Judging, verdict: Verdict, entry: Entry) -> _Near | None:
    event = verdict.item.event
    differing = tuple(differences(event, entry.record, judging.trial()))
    if differing:
        is_near = entry.n <= verdict.moment and _is_alike(event, entry, len(differing))
        distance = event_name(entry.record) != event.event, len(differing)
        return _Near(entry, differing, distance) if is_near else None
    why = _why_not(judging, verdict, entry)
    return None if why is None else _Near(entry, (why,), (False, 0))


def _why_not(judging: Judging, verdict: Verdict, entry: Entry) -> str | None:
    """Why an entry that fits is not what was expected."""
    since = verdict.since
    if since is not None and entry.n <= since.n:
        return f"it came, but before entry {since.n} ({event_name(since.record)})"
    if entry.n in judging.taken:
        return f"it is what line {judging.taken[entry.n]} expected"
    return None if isinstance(verdict.item, Count) else "it came, but too late"


def _is_alike(event: EventPattern, entry: Entry, differing: int) -> bool:
    """Another event is alike if it has all the fields, and one that fits beside its name."""
    if event_name(entry.record) == event.event:
        return True
    return differing <= len(event.fields) and all(hasattr(entry.record, name) for name, _ in event.fields)


def differences(event: EventPattern, record: AnyRecord, trial: Trial) -> Iterator[str]:
    """What keeps the record from being the event, a thing each: `cycle: 0, not 1`."""
    if event_name(record) != event.event:
        yield f"event: {event_name(record)}, not {event.event}"
    yield from event.differences(record, trial)
