"""A flow's expectations against its job's journal, while the job runs: which are met, which are open, and the first
that is not met, with the entry that came nearest. Pure.

The expectations of a list wait for one another; `eventually`, `never` and `count` are opened in passing and stand
beside the list; `any_order` goes on when all of its branches are through. Each entry is looked at once, and only by
what is open: in a long journal it costs no more than in a short one.

Faults and entries reach the harness on different ways. So a fault is reported with the time at which it happened, and
entries that came in between are matched again: the order in which the two arrive makes no difference.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.journal.records import AnyRecord, Entry
from nvrx_slurm.lab.flow.model import AnyOrder, Count, Eventually, Expectation, Flow, Happens, Never
from nvrx_slurm.lab.flow.patterns import Compares, Equals, EventPattern, Trial
from nvrx_slurm.report.words import event_name, plural, seconds
from nvrx_slurm.util.durations import words

# An entry may reach us so long after the time that it carries; before that no silence counts as one.
LAG_S = 2.0

# How many entries are shown before the moment, and how many after.
AROUND = 5

# By how much the clock of a fault and the clock of the journal may differ.
CLOCKS_DIFFER_S = 0.05

_Key = tuple[str, str | None, Any]


@dataclass(slots=True)
class ExpectationCursor:
    """A list of expectations and the next one to open. `open_branches`: of its `any_order` that is under way; it goes
    on once none is open. `branch_of`: the list whose `any_order` this one is a branch of."""

    items: Sequence[Expectation]
    branch_of: ExpectationCursor | None = None
    next: int = 0
    open_branches: int = 0


@dataclass(eq=False, slots=True)
class PendingExpectation:
    """An expectation that is open. `since`: the entry that opened it; None: the job's start. `cursor`: the list that
    goes on once it is met; None: it is an `eventually`."""

    item: Happens | Eventually
    since: Entry | None
    cursor: ExpectationCursor | None = None
    deadline: float | None = None
    has_come: bool = False


@dataclass(slots=True)
class ExpectationIndex:
    """All open expectations, by event and one field.

    With many branches that each name another node, an entry is compared only with those that it may meet.
    """

    _by_key: dict[_Key, dict[int, PendingExpectation]] = field(default_factory=lambda: defaultdict(dict))
    _names: dict[str, dict[str | None, None]] = field(default_factory=lambda: defaultdict(dict))
    _deadlines: list[tuple[float, int, PendingExpectation]] = field(default_factory=list)

    def add(self, waiting: PendingExpectation) -> None:
        """It is open from now on."""
        key = _key(waiting.item.event)
        self._names[key[0]][key[1]] = None
        self._by_key[key][id(waiting)] = waiting
        if waiting.deadline is not None:
            # `id` decides between equal deadlines: the heap cannot compare two expectations.
            heapq.heappush(self._deadlines, (waiting.deadline, id(waiting), waiting))

    def remove(self, waiting: PendingExpectation) -> None:
        """It is met."""
        waiting.has_come = True
        del self._by_key[_key(waiting.item.event)][id(waiting)]

    def candidates(self, record: AnyRecord) -> list[PendingExpectation]:
        """The expectations that the record may meet, by its event and one field."""
        event = event_name(record)
        keys = [(event, name, None if name is None else getattr(record, name)) for name in self._names[event]]
        return [waiting for key in keys if key in self._by_key for waiting in self._by_key[key].values()]

    def next_deadline(self) -> float | None:
        """When the next `within` runs out."""
        # What was met stays in the heap until it is on top: to take it out sooner would cost a search.
        while self._deadlines and self._deadlines[0][2].has_come:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def soonest(self) -> PendingExpectation:
        """The expectation whose that is; there must be one."""
        return self._deadlines[0][2]

    def __iter__(self) -> Iterator[PendingExpectation]:
        return (waiting for several in self._by_key.values() for waiting in several.values())


def _key(event: EventPattern) -> _Key:
    """The event, and the first of its fields that must have a certain value."""
    certain = ((name, pattern.value) for name, pattern in event.fields if isinstance(pattern, Equals))
    return (event.event, *next(certain, (None, None)))


@dataclass(eq=False, slots=True)
class OpenWatch:
    """A `never` or `count` that is open, and how often its event was seen."""

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

    # --------------------------------------------------------------------------------------------- the journal

    def feed(self, entry: Entry) -> None:
        """The journal's next entry. After a verdict nothing changes any more."""
        self.count += 1
        self._begin(entry.t)
        # Entries are in the order of their times: what was due before this one is late. Then `never` and `count`: an
        # entry that must not come fails the flow even where a list expects the same event.
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
        # A job without any entry: its expectations are opened only now, and the first of them is not met.
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
        """All expectations are met, and nothing that may yet go wrong is open."""
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
                # The last branch to end goes on with the list, by its own cursor's `branch_of`.
                cursor.open_branches = len(item.branches)
                for branch in item.branches:
                    self._advance(ExpectationCursor(branch, cursor), since)
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
        if (whole := cursor.branch_of) is not None:
            whole.open_branches -= 1
            if whole.open_branches == 0:
                self._advance(whole, since)

    # ------------------------------------------------------------------------------- what an entry is taken for

    def _take(self, entry: Entry) -> None:
        """Of the lists' next expectations the entry meets one; it meets every `eventually` that it fits."""
        candidates = self._index.candidates(entry.record)
        # First every `eventually`: they stand beside the lists, and none takes the entry from them.
        for one in candidates:
            if one.cursor is None and (bound := self._fit(one, entry)) is not None:
                self._met(one, entry, bound)
        in_lists = ((self._fit(one, entry), one) for one in candidates if one.cursor is not None)
        fits = [(len(bound), one.item.line, bound, one) for bound, one in in_lists if bound is not None]
        # Of branches that fit, the one that binds the fewest captures, since the others may still meet another entry;
        # then the first in the file. There is no way back from a choice (docs/decisions/0013).
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
        # `look` does not see a late entry that comes while faults are pending: until then nothing was overdue.
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
        # A fault has the time of the machine that injected it, an entry that of the store. So a fault can carry a
        # time that is a millisecond or two after its own effect, and must count for that entry all the same.
        faults_at = [at for at in self.faults_at if t is None or at <= t + CLOCKS_DIFFER_S]
        last_fault = max(faults_at, default=start)
        return (last_fault, "the last fault") if last_fault > start else (start, of)

    def _fail(self, one: PendingExpectation | OpenWatch, reason: str) -> None:
        # One entry may be what several of them exclude: the first in the list is the finding.
        if self.unmet is None:
            self.unmet = UnmetExpectation(one.item, one.since, reason, self.count)


# ----------------------------------------------------------------------------------- one flow


@dataclass(frozen=True, slots=True)
class Nearest:
    """The entry that came closest, and each thing that kept it from being the one, in words."""

    entry: Entry
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Miss:
    """The first expectation that is not met. `line`: where it stands; `around`: the entries about the moment at which
    that was certain, those after it as far as they are known."""

    line: int
    expected: str
    reason: str
    around: tuple[Entry, ...]
    nearest: Nearest | None


class FlowMatcher:
    """Decides, as entries come, whether the expectations are met. All times are seconds on the journal's clock.

    A capture that a fault names by `as` is bound by that fault alone, and has the same value from the journal's
    start. While faults are to come no `within` runs out: any of them may be what it counts from.
    """

    def __init__(self, flow: Flow) -> None:
        self._expect, self._faults = flow.expect, flow.faults
        self._history: list[Entry] = []
        self._faults_at: list[float] = []
        self._named: dict[str, Any] = {}
        self._over: str | None = None
        self._evaluation = self._start()

    def feed(self, entry: Entry) -> None:
        """The journal's next entry."""
        self._history.append(entry)
        self._evaluation.feed(entry)

    def fault_happened(self, t: float, bindings: Mapping[str, Any]) -> None:
        """A fault happened at `t`, before any of what follows from it; `bindings`: the values of its captures."""
        self._faults_at.append(t)
        self._named.update(bindings)
        # Entries that arrived before this report may have been matched without the fault: match them all again.
        self._evaluation = self._start()
        for entry in self._history:
            self._evaluation.feed(entry)
        if self._over is not None:
            self._evaluation.close(self._over)

    def look(self, t: float) -> None:
        """It is `t` now, and every entry that has been read was fed."""
        self._evaluation.look(t - LAG_S)

    def next_deadline(self) -> float | None:
        """When to `look` again if nothing comes; None: never."""
        deadline = self._evaluation.next_deadline()
        return None if deadline is None else deadline + LAG_S

    def job_over(self, why: str = "the job ended") -> None:
        """No entry comes any more, for this reason."""
        self._over = why
        self._evaluation.close(why)

    @property
    def bindings(self) -> dict[str, Any]:
        """The values of the captures, as far as they are known."""
        return self._evaluation.bindings

    @property
    def miss(self) -> Miss | None:
        """The first expectation that is not met."""
        evaluation, history, unmet = self._evaluation, self._history, self._evaluation.unmet
        if unmet is None:
            return None
        last = unmet.moment - 1
        around = tuple(history[max(0, last - AROUND) : last + 1 + AROUND])
        unbound = [name for name in unmet.item.event.captures() if name in evaluation.promised]
        why = f"; ${unbound[0]} has no value yet: the fault that names it has not happened" if unbound else ""
        expected = unmet.item.describe(evaluation.bindings)
        nearest = _nearest_entry(evaluation, unmet, history)
        return Miss(unmet.item.line, expected, unmet.reason + why, around, nearest)

    @property
    def settled(self) -> bool:
        """Everything is met, nothing that can yet go wrong is open, and no fault is to come."""
        return self._evaluation.settled and (self._over is not None or self._evaluation.pending == 0)

    def _start(self) -> Evaluation:
        promised = {fault.binds for fault in self._faults if fault.binds is not None}
        return Evaluation(
            self._expect,
            bindings=dict(self._named),
            faults_at=tuple(self._faults_at),
            pending=len(self._faults) - len(self._faults_at),
            promised=frozenset(promised.difference(self._named)),
        )


def _nearest_entry(evaluation: Evaluation, unmet: UnmetExpectation, history: Sequence[Entry]) -> Nearest | None:
    """The entry that is most like what was expected: the same event first, then the fewest fields that differ, then
    the latest. None where nothing is like it, or where an entry too many is the fault."""
    # Of equally near entries the latest wins, so the search goes backwards and replaces by a smaller distance only.
    event, since = unmet.item.event, unmet.since
    if isinstance(unmet.item, Never):
        return None
    best: tuple[tuple[bool, int], Nearest] | None = None
    for entry in reversed(history):
        is_other = event_name(entry.record) != event.event
        differing = list(event.differences(entry.record, evaluation.trial()))
        if is_other:
            differing.insert(0, f"event: {event_name(entry.record)}, not {event.event}")
            # Another event is alike if it has all the fields, and one of them fits.
            has_all = all(hasattr(entry.record, name) for name, _ in event.fields)
            is_alike = has_all and len(differing) <= len(event.fields)
        else:
            is_alike = True
        distance = is_other, len(differing)
        if differing:
            if entry.n > unmet.moment or not is_alike:
                continue
        elif since is not None and entry.n <= since.n:  # it fits: why is it not what was expected?
            differing = [f"it came, but before entry {since.n} ({event_name(since.record)})"]
        elif entry.n in evaluation.taken:
            differing = [f"it is what line {evaluation.taken[entry.n]} expected"]
        elif isinstance(unmet.item, Count):
            continue  # it was counted, and so explains nothing
        else:
            differing = ["it came, but too late"]
        if best is None or distance < best[0]:
            best = distance, Nearest(entry, tuple(differing))
    return None if best is None else best[1]
