"""The expectations that wait for their event, found by the entry that comes and by the deadline that passes. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.journal.records import AnyRecord, Entry
from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import Eventually, Expectation, Happens
from nvrx_slurm.lab.flow.language.patterns import Equals
from nvrx_slurm.report.words import event_name

_Key = tuple[str, str | None, Any]


@dataclass(slots=True)
class Course:
    """A list of expectations and how far it has come. `branch_of`: the `any_order` that it is a branch of."""

    items: Sequence[Expectation]
    branch_of: Fork | None = None
    next: int = 0


@dataclass(slots=True)
class Fork:
    """An `any_order` under way: the list that goes on once no branch is open."""

    rest: Course
    open: int


@dataclass(eq=False, slots=True)
class Waiting:
    """An expectation whose event has not come. `since`: the entry that opened it; None: the job's start. `course`:
    the list that goes on when it has come; None: it is an `eventually`."""

    item: Happens | Eventually
    since: Entry | None
    course: Course | None = None
    deadline: float | None = None
    has_come: bool = False


@dataclass(slots=True)
class Board:
    """All that waits. With many branches that each name another node, an entry meets only those that it may be."""

    _by_key: dict[_Key, dict[int, Waiting]] = field(default_factory=lambda: defaultdict(dict))
    _names: dict[str, dict[str | None, None]] = field(default_factory=lambda: defaultdict(dict))
    _deadlines: list[tuple[float, int, Waiting]] = field(default_factory=list)

    def add(self, waiting: Waiting) -> None:
        """It waits from now on."""
        key = _key(waiting.item.event)
        self._names[key[0]][key[1]] = None
        self._by_key[key][id(waiting)] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, id(waiting), waiting))

    def remove(self, waiting: Waiting) -> None:
        """Its event has come."""
        waiting.has_come = True
        del self._by_key[_key(waiting.item.event)][id(waiting)]

    def candidates(self, record: AnyRecord) -> list[Waiting]:
        """What the record may be, as far as its event and one field tell."""
        event = event_name(record)
        keys = [(event, name, None if name is None else getattr(record, name)) for name in self._names[event]]
        return [waiting for key in keys if key in self._by_key for waiting in self._by_key[key].values()]

    def next_deadline(self) -> float | None:
        """When the next `within` runs out."""
        while self._deadlines and self._deadlines[0][2].has_come:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def soonest(self) -> Waiting:
        """Whose that is; there must be one."""
        return self._deadlines[0][2]

    def __iter__(self) -> Iterator[Waiting]:
        return (waiting for several in self._by_key.values() for waiting in several.values())


def _key(event: EventPattern) -> _Key:
    """The event, and the first of its fields that must have a certain value."""
    certain = ((name, pattern.value) for name, pattern in event.fields if isinstance(pattern, Equals))
    return (event.event, *next(certain, (None, None)))
