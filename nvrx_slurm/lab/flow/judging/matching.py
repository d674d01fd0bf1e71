"""A flow's expectations against its job's journal, while the job runs; and near misses of an unmet one. Pure.

Faults and entries reach the harness on different ways. So a fault is reported with the time at which it happened, and
entries that came in between are matched again: the order in which the two arrive makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.journal.records import Entry
from nvrx_slurm.lab.flow.judging.expectations import Evaluation, UnmetExpectation
from nvrx_slurm.lab.flow.language.model import Count, Flow, Never
from nvrx_slurm.report.words import event_name

LAG_S = 2.0
"""An entry may reach us so long after the time that it carries; before that no silence counts as one."""


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


class FlowMatcher:
    """Tells, as entries come, whether the flow's expectations are met. All times are seconds on the journal's clock.

    A capture that a fault names by `as` is bound by that fault alone, and has the same value from the journal's
    start. While faults are to come no `within` runs out: any of them may be what it counts from.
    """

    def __init__(self, flow: Flow) -> None:
        self._expect, self._faults = flow.expect, flow.faults
        self._history: list[Entry] = []
        self._faults_at: list[float] = []
        self._named: dict[str, Any] = {}
        self._over: str | None = None
        self._nearest: tuple[UnmetExpectation, int, Nearest | None] | None = None
        self._evaluation = self._start()

    def feed(self, entry: Entry) -> None:
        """The journal's next entry."""
        self._history.append(entry)
        self._evaluation.feed(entry)

    def fault_happened(self, t: float, bindings: Mapping[str, Any]) -> None:
        """A fault happened at `t`, before any of what follows from it; `bindings`: the values of its captures."""
        self._faults_at.append(t)
        self._named.update(bindings)
        self._evaluation = self._start()
        for entry in self._history:
            self._evaluation.feed(entry)
        if self._over is not None:
            self._evaluation.close(self._over)

    def look(self, t: float) -> None:
        """It is `t` now, and all that has come was fed."""
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
        if self._nearest is None or self._nearest[:2] != (unmet, len(history)):
            self._nearest = (unmet, len(history), _nearest_entry(evaluation, unmet, history))
        last = unmet.moment - 1
        around = tuple(history[max(0, last - AROUND) : last + 1 + AROUND])
        unbound = [name for name in unmet.item.event.captures() if name in evaluation.promised]
        why = f"; ${unbound[0]} has no value yet: the fault that names it has not happened" if unbound else ""
        expected = unmet.item.describe(evaluation.bindings)
        return Miss(unmet.item.line, expected, unmet.reason + why, around, self._nearest[2])

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
            continue
        else:
            differing = ["it came, but too late"]
        if best is None or distance < best[0]:
            best = distance, Nearest(entry, tuple(differing))
    return None if best is None else best[1]
