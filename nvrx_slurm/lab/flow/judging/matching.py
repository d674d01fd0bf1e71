"""A flow's expectations against its job's journal, while the job runs; and near misses of an unmet one. Pure.

Faults and entries reach the harness on different ways. So a fault is reported with the time at which it happened, and
entries that came in between are matched again: the order in which the two arrive makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.journal.records import AnyRecord, Entry
from nvrx_slurm.lab.flow.judging.expectations import Judging, Verdict
from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import Count, Never
from nvrx_slurm.lab.flow.language.model import Flow
from nvrx_slurm.lab.flow.language.patterns import Trial
from nvrx_slurm.report.words import event_name

LAG_S = 2.0
"""An entry may reach us so long after the time that it carries; before that no silence counts as one."""


class Matcher:
    """Tells, as entries come, whether the flow's expectations are met. All times are seconds on the journal's clock.

    A capture that a fault names by `as` is bound by that fault alone, and stands for the same from the journal's
    start. While faults are to come no `within` runs out: any of them may be what it counts from.
    """

    def __init__(self, flow: Flow) -> None:
        self._expect, self._faults = flow.expect, flow.faults
        self._history: list[Entry] = []
        self._strikes: list[float] = []
        self._named: dict[str, Any] = {}
        self._over: str | None = None
        self._nearest: tuple[Verdict, int, Nearest | None] | None = None
        self._judging = self._start()

    def feed(self, entry: Entry) -> None:
        """The journal's next entry."""
        self._history.append(entry)
        self._judging.feed(entry)

    def struck(self, t: float, bindings: Mapping[str, Any]) -> None:
        """A fault has struck at `t`, before any of what follows from it; `bindings`: what its captures stand for."""
        self._strikes.append(t)
        self._named.update(bindings)
        self._judging = self._start()
        for entry in self._history:
            self._judging.feed(entry)
        if self._over is not None:
            self._judging.close(self._over)

    def look(self, t: float) -> None:
        """It is `t` now, and all that has come was fed."""
        self._judging.look(t - LAG_S)

    def next_deadline(self) -> float | None:
        """When to `look` again if nothing comes; None: never."""
        deadline = self._judging.next_deadline()
        return None if deadline is None else deadline + LAG_S

    def job_over(self, why: str = "the job ended") -> None:
        """No entry comes any more, for this reason."""
        self._over = why
        self._judging.close(why)

    @property
    def bindings(self) -> dict[str, Any]:
        """What the captures stand for, as far as is known."""
        return self._judging.bindings

    @property
    def miss(self) -> Miss | None:
        """The first expectation that is not met."""
        verdict = self._judging.verdict
        if verdict is None:
            return None
        seen = len(self._history)
        if self._nearest is None or self._nearest[:2] != (verdict, seen):
            self._nearest = (verdict, seen, nearest_entry(self._judging, verdict, self._history))
        return miss_of(self._judging, verdict, self._history, self._nearest[2])

    @property
    def settled(self) -> bool:
        """Everything is met, nothing that can yet go wrong is open, and no fault is to come."""
        return self._judging.settled and (self._over is not None or self._judging.pending == 0)

    def _start(self) -> Judging:
        promised = {fault.binds for fault in self._faults if fault.binds is not None}
        return Judging(
            self._expect,
            bindings=dict(self._named),
            strikes=tuple(self._strikes),
            pending=len(self._faults) - len(self._strikes),
            promised=frozenset(promised.difference(self._named)),
        )


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
