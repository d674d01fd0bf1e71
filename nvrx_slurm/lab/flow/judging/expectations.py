"""Expectations against a journal, entry by entry: which are met, which are open, and the first that is not met. Pure.

The expectations of a list wait for one another; `eventually`, `never` and `count` are opened in passing and stand
beside the list; `any_order` goes on when all of its branches are through. Each entry is looked at once, and only by
what is open: in a long journal it costs no more than in a short one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.journal.records import AnyRecord, Entry
from nvrx_slurm.lab.flow.language.model import AnyOrder, Count, Eventually, Expectation, Happens, Never
from nvrx_slurm.lab.flow.language.patterns import Compares, Equals, EventPattern, Trial
from nvrx_slurm.report.words import event_name, plural, seconds
from nvrx_slurm.util.durations import words

CLOCKS_DIFFER_S = 0.05
"""By how much the clock of a fault and the clock of the journal may differ."""

_Key = tuple[str, str | None, Any]


@dataclass(slots=True)
class ExpectationCursor:
    """A list of expectations and how far it has come. `branch_of`: the `any_order` that it is a branch of."""

    items: Sequence[Expectation]
    branch_of: OpenBranches | None = None
    next: int = 0


@dataclass(slots=True)
class OpenBranches:
    """An `any_order` under way: the list that goes on once no branch is open."""

    rest: ExpectationCursor
    open: int


@dataclass(eq=False, slots=True)
class PendingExpectation:
    """An expectation whose event has not come. `since`: the entry that opened it; None: the job's start. `cursor`:
    the list that goes on when it has come; None: it is an `eventually`."""

    item: Happens | Eventually
    since: Entry | None
    cursor: ExpectationCursor | None = None
    deadline: float | None = None
    has_come: bool = False


@dataclass(slots=True)
class ExpectationIndex:
    """All that waits. With many branches that each name another node, an entry meets only those that it may be."""

    _by_key: dict[_Key, dict[int, PendingExpectation]] = field(default_factory=lambda: defaultdict(dict))
    _names: dict[str, dict[str | None, None]] = field(default_factory=lambda: defaultdict(dict))
    _deadlines: list[tuple[float, int, PendingExpectation]] = field(default_factory=list)

    def add(self, waiting: PendingExpectation) -> None:
        """It waits from now on."""
        key = _key(waiting.item.event)
        self._names[key[0]][key[1]] = None
        self._by_key[key][id(waiting)] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, id(waiting), waiting))

    def remove(self, waiting: PendingExpectation) -> None:
        """Its event has come."""
        waiting.has_come = True
        del self._by_key[_key(waiting.item.event)][id(waiting)]

    def candidates(self, record: AnyRecord) -> list[PendingExpectation]:
        """What the record may be, by its event and one field."""
        event = event_name(record)
        keys = [(event, name, None if name is None else getattr(record, name)) for name in self._names[event]]
        return [waiting for key in keys if key in self._by_key for waiting in self._by_key[key].values()]

    def next_deadline(self) -> float | None:
        """When the next `within` runs out."""
        while self._deadlines and self._deadlines[0][2].has_come:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def soonest(self) -> PendingExpectation:
        """Whose that is; there must be one."""
        return self._deadlines[0][2]

    def __iter__(self) -> Iterator[PendingExpectation]:
        return (waiting for several in self._by_key.values() for waiting in several.values())


def _key(event: EventPattern) -> _Key:
    """The event, and the first of its fields that must have a certain value."""
    certain = ((name, pattern.value) for name, pattern in event.fields if isinstance(pattern, Equals))
    return (event.event, *next(certain, (None, None)))


@dataclass(eq=False, slots=True)
class OpenWatch:
    """A `never` or `count` that is open, and how often its event has come."""

    item: Never | Count
    since: Entry | None
    seen: int = 0


@dataclass(frozen=True, slots=True)
class UnmetExpectation:
    """An expectation is not met. `moment`: how many entries had come when that was certain, the deciding one
    included."""

    item: Happens | Eventually | Never | Count
    since: Entry | None
    reason: str
    moment: int


@dataclass(slots=True)
class Evaluation:
    """One journal against one list of expectations.

    `faults_at`: when faults happened, as far as it is known; `pending`: how many are still to come; `promised`: the
    captures that only those can bind. `bindings` may hold captures from the start.
    """

    expect: Sequence[Expectation]
    bindings: dict[str, Any]
    faults_at: Sequence[float] = ()
    pending: int = 0
    promised: frozenset[str] = frozenset()
    unmet: UnmetExpectation | None = None
    taken: dict[int, int] = field(default_factory=dict)  # entry → the line of the expectation that took it
    count: int = 0
    began_at: float | None = None
    _index: ExpectationIndex = field(default_factory=ExpectationIndex)
    _watches: list[OpenWatch] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------- what comes

    def feed(self, entry: Entry) -> None:
        """The journal's next entry. After a verdict nothing changes any more."""
        self.count += 1
        self._begin(entry.t)
        self.look(entry.t)
        if self.unmet is None:
            self._watch(entry)
        if self.unmet is None:
            self._take(entry)

    def look(self, t: float) -> None:
        """No entry with a time before `t` can come any more."""
        deadline = self.next_deadline()
        if deadline is not None and t > deadline:
            late = self._index.soonest()
            within = words(late.item.within_s or 0.0)
            self._fail(late, f"it did not come within {within} of {self._base(late)[1]}")

    def close(self, why: str) -> None:
        """Nothing comes any more: pending expectations are not met, and counts are final."""
        self._begin(0.0)
        unmet = [watch for watch in self._watches if isinstance(watch.item, Count) and not self._is_right(watch)]
        left: list[PendingExpectation | OpenWatch] = [*self._index, *unmet]
        first = min(left, key=lambda one: one.item.line, default=None)
        self._watches = []
        if first is not None and self.unmet is None:
            times = f"it came {plural(first.seen, 'time')}" if isinstance(first, OpenWatch) else "it had not come"
            self._fail(first, f"{why}, and {times}")

    def next_deadline(self) -> float | None:
        """When the next `within` runs out; None: never, as far as is known."""
        return None if self.unmet is not None or self.pending else self._index.next_deadline()

    @property
    def settled(self) -> bool:
        """All that is expected has come, and nothing that may yet go wrong is open."""
        return self.began_at is not None and self.unmet is None and not self._watches and not any(self._index)

    # ------------------------------------------------------------------------------------------------ lists

    def _begin(self, t: float) -> None:
        """With the job's first entry what `within` counts from is known."""
        if self.began_at is None:
            self.began_at = t
            self._advance(ExpectationCursor(self.expect), None)

    def _advance(self, cursor: ExpectationCursor, since: Entry | None) -> None:
        """Open what stands next in the list, up to the first expectation that the rest must wait for."""
        while cursor.next < len(cursor.items):
            item = cursor.items[cursor.next]
            cursor.next += 1
            if isinstance(item, AnyOrder):
                open_branches = OpenBranches(cursor, open=len(item.branches))
                for branch in item.branches:
                    self._advance(ExpectationCursor(branch, open_branches), since)
                return
            if isinstance(item, (Never, Count)):
                self._watches.append(OpenWatch(item, since))
                continue
            waits = not isinstance(item, Eventually)
            pending = PendingExpectation(item, since, cursor if waits else None)
            if item.within_s is not None:
                pending.deadline = self._base(pending)[0] + item.within_s
            self._index.add(pending)
            if waits:
                return
        if (branches := cursor.branch_of) is not None:
            branches.open -= 1
            if branches.open == 0:
                self._advance(branches.rest, since)

    # ------------------------------------------------------------------------------- what an entry is taken for

    def _take(self, entry: Entry) -> None:
        """Of the lists' next expectations one takes the entry; every `eventually` that it fits has come with it."""
        candidates = self._index.candidates(entry.record)
        for one in candidates:
            if one.cursor is None and (bound := self._fit(one, entry)) is not None:
                self._met(one, entry, bound)
        in_lists = ((self._fit(one, entry), one) for one in candidates if one.cursor is not None)
        fits = [(len(bound), one.item.line, bound, one) for bound, one in in_lists if bound is not None]
        if fits and self.unmet is None:
            *_, bound, one = min(fits, key=lambda fit: fit[:2])
            self.taken[entry.n] = one.item.line
            self._met(one, entry, bound)

    def _fit(self, waiting: PendingExpectation, entry: Entry) -> dict[str, Any] | None:
        """The captures' values if the entry fits; None if it does not."""
        trial = self.trial()
        return trial.new if waiting.item.event.fits(entry.record, trial) else None

    def trial(self) -> Trial:
        """What an expectation may bind now."""
        return Trial(self.bindings, lambda name: name not in self.promised)

    def _met(self, waiting: PendingExpectation, entry: Entry, bound: Mapping[str, Any]) -> None:
        within_s = waiting.item.within_s
        base, of = self._base(waiting, entry.t)
        if within_s is not None and entry.t - base > within_s:
            self._fail(waiting, f"it came {seconds(entry.t - base)} after {of}, not within {words(within_s)}")
            return
        self.bindings.update(bound)
        self._index.remove(waiting)
        if waiting.cursor is not None:
            self._advance(waiting.cursor, entry)

    # ---------------------------------------------------------------------------------------- never and count

    def _watch(self, entry: Entry) -> None:
        for watch in list(self._watches):
            item = watch.item
            if item.until is not None and item.until.fits(entry.record, Trial(self.bindings)):
                self._watches.remove(watch)
                if not self._is_right(watch):
                    self._fail(watch, f"until entry {entry.n} it came {plural(watch.seen, 'time')}")
            elif item.event.fits(entry.record, Trial(self.bindings)):
                watch.seen += 1
                if isinstance(item, Never):
                    self._fail(watch, f"entry {entry.n} is what must not come")
                    continue
                if isinstance(item.wanted, Compares):
                    # Of `>` and `!=` a later entry can make the count right again.
                    too_many = item.wanted.sign in ("<", "<=") and not self._is_right(watch)
                else:
                    too_many = isinstance(item.wanted, Equals) and watch.seen > item.wanted.value
                if too_many:
                    self._fail(watch, f"with entry {entry.n} it has come {plural(watch.seen, 'time')}")

    def _is_right(self, watch: OpenWatch) -> bool:
        return isinstance(watch.item, Never) or watch.item.wanted.fits(watch.seen, Trial(self.bindings))

    # ------------------------------------------------------------------------------------------------- times

    def _base(self, waiting: PendingExpectation, t: float | None = None) -> tuple[float, str]:
        """From when `within` counts for an entry at `t` (None: for one that may come), and what that was."""
        start, of = (self.began_at or 0.0, "the job's start")
        if waiting.since is not None:
            start, of = waiting.since.t, f"entry {waiting.since.n} ({event_name(waiting.since.record)})"
        # A fault has the time of the machine that injected it, an entry that of the store. So a fault can carry a time
        # that is a millisecond or two after the entry that it caused, and must count for that entry all the same.
        faults_at = [at for at in self.faults_at if t is None or at <= t + CLOCKS_DIFFER_S]
        last_fault = max(faults_at, default=start)
        return (last_fault, "the last fault") if last_fault > start else (start, of)

    def _fail(self, one: PendingExpectation | OpenWatch, reason: str) -> None:
        self.unmet = UnmetExpectation(one.item, one.since, reason, self.count)
