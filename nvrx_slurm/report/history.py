"""What a page, a trace or metrics show of a job beside its view: spans, failures with what was done, and the goodput.

A subscriber of `JobFold`, which needs no plan and replays nothing. It does no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import AttributionJudged, Entry, RestartDecided
from nvrx_slurm.journal.verdicts import Attribution
from nvrx_slurm.report.goodput import Goodput, GoodputMeter
from nvrx_slurm.report.model import CycleKey, FailureView, JobView
from nvrx_slurm.report.spans import Span

MOST_FOLLOWED = 8

FAILURES = (
    records.WorkerFailed,
    records.WorkerHung,
    records.NodeLost,
    records.NodeIsolated,
    records.NodeLeft,
    records.NodeJoined,  # of a node whose agent was replaced
)


_OF_EVERY_NODE = {records.NodeReady, records.WorkersStarted, records.Progress}


@dataclass(slots=True)
class FailureSummary:
    """One failure of a cycle, or of a node that worked for none (`key` is None): the first report of it, what was
    settled as its cause, and what was decided. `followed`: the other reports of the same cycle, the first ones;
    `more`: how many there are in all. `stacks`: files below the job folder."""

    at: float
    cause: FailureView
    key: CycleKey | None
    generation: int = 0
    followed: list[str] = field(default_factory=list)
    more: int = 0
    answers: list[Attribution] = field(default_factory=list)
    judged: AttributionJudged | None = None
    decided: RestartDecided | None = None
    decided_at: float | None = None
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def first_line(self) -> str | None:
        """The line of a log where it began, as the surest source says."""
        found = [answer for answer in self.answers if answer.primary is not None]
        best = max(found, key=lambda answer: answer.confidence, default=None)
        return None if best is None or best.primary is None else best.primary.text


class JobTimeline:
    """Reads one job's journal. `spans`: those of every node, in the order of their ends; with `keeps_spans=False`
    none is kept, for a reader that goes on for weeks."""

    def __init__(self, *, keeps_spans: bool = True) -> None:
        self.spans: list[Span] = []
        self.failures: list[FailureSummary] = []
        self.generations: list[tuple[float, tuple[str, ...]]] = []
        self._meter = GoodputMeter(self.spans if keeps_spans else None)
        self._by_cycle: dict[CycleKey, FailureSummary] = {}
        self._cause: FailureView | None = None  # the view's last failure before the entry
        self._goodput: Goodput | None = None

    def take(self, entry: Entry, view: JobView) -> None:
        """One entry, after the view has taken it."""
        self._meter.take(entry, view)
        record = entry.record
        before, self._cause = self._cause, view.last_failure
        if type(record) in _OF_EVERY_NODE:  # nearly all are, and nothing here follows from them
            return
        if isinstance(record, FAILURES):
            if view.last_failure is not before:
                self._fail(record, view)
            return
        match record:
            case records.JobStarted():
                self.generations.append((entry.t, record.expected))
            case records.RestartDecided():
                story = self._by_cycle.get((record.replica, view.generation, record.cycle))
                if story is None:
                    return
                story.decided, story.decided_at = record, entry.t
                if view.last_failure is not None and view.last_failure.cycle == record.cycle:
                    story.cause = view.last_failure
            case records.Attributed():
                if story := self._by_cycle.get((record.replica, view.generation, record.cycle)):
                    story.answers.append(record.attribution)
            case records.AttributionJudged():
                if story := self._by_cycle.get((record.replica, view.generation, record.cycle)):
                    story.judged = record
            case records.StacksDumped(request=None):
                node = view.nodes.get(record.node)
                if node is not None and node.replica is not None and self.failures:
                    self.failures[-1].stacks.update(record.files)

    def of_nodes(self) -> dict[str, list[Span]]:
        """The spans of each node that the job has had, in Slurm's order, those of later generations behind."""
        expected = {node: list[Span]() for _, nodes in self.generations for node in nodes}
        found = defaultdict(list[Span], expected)
        for span in self.spans:
            found[span.node].append(span)
        return found

    def goodput(self, view: JobView, at: float | None = None) -> Goodput:
        """So far; `at`: the moment, of a job that goes on."""
        return self._meter.result(view, at)

    def finish(self, view: JobView, at: float | None = None) -> Goodput:
        """The journal is read, and open spans end; `at`: the moment that is shown. Later calls give the same."""
        if self._goodput is None:
            self._goodput = self._meter.result(view, at)
            self.spans += self._meter.pending(at)
        return self._goodput

    def _fail(self, record: records.AnyRecord, view: JobView) -> None:
        cause = view.last_failure
        if cause is None or view.shutdown is not None:
            return
        key = None if cause.replica is None or cause.cycle is None else (cause.replica, view.generation, cause.cycle)
        if key is not None and (cycle := view.cycles.get(key)) is not None and cycle.closed_at is None:
            # Its rendezvous is open: no worker of it has failed. It is another report of what ended the cycle before.
            before = (key[0], key[1], key[2] - 1)
            key = before if before in self._by_cycle else key
        known = None if key is None else self._by_cycle.get(key)
        if known is not None:
            known.more += 1
            if len(known.followed) < MOST_FOLLOWED:
                known.followed.append(cause.why)
        else:
            known = FailureSummary(at=cause.at, cause=cause, key=key, generation=view.generation)
            self.failures.append(known)
            if key is not None:
                self._by_cycle[key] = known
        if isinstance(record, records.WorkerHung) and record.stacks is not None:
            known.stacks[record.rank] = record.stacks
