"""The failures of a job: what counts as one, and what was answered, judged and decided about it.

Every report of failures takes its list from here. `Failures` goes by the records alone: it needs no plan, and does
not load the core. `failure_replay` attaches what only a replay of the core knows.

A report (a worker failed, a node was lost, …) opens a failure. It ended a cycle if the core's decisions about it,
which follow it in the journal, open the next rendezvous or decide about the restart. Later reports of that cycle
belong to the same failure; the decision names the one that is the cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from nvrx_slurm.report.model import CycleKey, CycleView, FailureView, JobView, Recovery, Value

MOST_FOLLOWED = 8

_OF_EVERY_NODE = {records.NodeReady, records.WorkersStarted, records.Progress}

_REPORTS = (
    records.WorkerFailed,
    records.WorkerHung,
    records.NodeLost,
    records.NodeIsolated,
    records.NodeLeft,
    records.NodeJoined,  # of a node whose agent was replaced
)


class RecordedAnswer(Value, frozen=True, kw_only=True):
    """What a source said; `at` in seconds since the epoch. `late`: the verdicts had been read by then. `now`: it was
    asked just now, not while the job ran."""

    attribution: Attribution
    at: float | None = None
    late: bool = False
    now: bool = False


def surest(answers: Iterable[RecordedAnswer]) -> Attribution | None:
    """The surest answer that names a line; None: none does."""
    named = (each.attribution for each in answers if each.attribution.primary is not None)
    return max(named, key=lambda answer: answer.confidence, default=None)


@dataclass(slots=True, eq=False)
class FailureTimeline:
    """One failure. Times are seconds since the epoch, by the store's clock; None: that has not happened.

    `at`: of the first report. `cause`: the first report, and from the decision on what was settled. `key`: the cycle
    that it ended; None: it ended none, as the loss of a node that had no ranks yet, or whose ranks were done.
    `followed`: the other reports about that cycle, the first ones; `more`: how many there are in all. `stacks`: files
    below the job folder.
    """

    at: float
    cause: FailureView
    key: CycleKey | None = None
    followed: list[str] = field(default_factory=list)
    more: int = 0
    answers: list[RecordedAnswer] = field(default_factory=list)
    judged: records.AttributionJudged | None = None
    decider: records.ControllerStarted | None = None
    decided: records.RestartDecided | None = None
    decided_at: float | None = None
    shutdown: records.Shutdown | None = None  # of the failure that ended the job
    stepped: records.FirstStepReached | None = None  # of the next cycle: when all nodes had made a step
    stacks: dict[int, str] = field(default_factory=dict)

    def next_cycle(self, view: JobView) -> CycleView | None:
        """The cycle after the one that it ended."""
        return None if self.key is None else view.cycles.get((*self.key[:2], self.key[2] + 1))

    def recovery(self, view: JobView) -> Recovery | None:
        """How its replica got to run again."""
        return None if self.key is None else view.recoveries.get((*self.key[:2], self.key[2] + 1))

    def running_again_at(self, view: JobView) -> float | None:
        """When the rendezvous after it had closed."""
        return None if (cycle := self.next_cycle(view)) is None else cycle.closed_at

    def is_settled(self, view: JobView) -> bool:
        """Whether its cause stays what it is."""
        if self.key is None or self.decided is not None:
            return True
        # Nothing is decided about it any more: the job ends or was requeued, or its controller recorded no decisions.
        over = view.shutdown is not None or self.key[1] != view.generation
        return over or self.running_again_at(view) is not None

    @property
    def verdict(self) -> Verdict | None:
        """What the controller read from the answers; None: it read none, or the job's end waited for none."""
        if self.judged is None or (self.judged.verdict is Verdict.TIMEOUT and self.shutdown is not None):
            return None
        return self.judged.verdict

    @property
    def first_line(self) -> str | None:
        """The line of a log where it began, as the surest source says."""
        best = surest(self.answers)
        return None if best is None or best.primary is None else best.primary.text


class Failures:
    """The failures of a journal, oldest first. A subscriber of `JobFold`."""

    def __init__(self) -> None:
        self.timelines: list[FailureTimeline] = []
        self._by_cycle: dict[CycleKey, FailureTimeline] = {}  # with `restart_job` one failure ends several cycles
        self._noted: FailureView | None = None  # the view's last failure before the entry
        self._reported: FailureTimeline | None = None  # by the fact whose decisions follow
        self._is_asked = False  # a user has asked for the rendezvous that opens next
        self._controller: records.ControllerStarted | None = None
        self._ending: FailureTimeline | None = None  # what ends the job, if it does not run again

    def of(self, replica: str, generation: int, cycle: int) -> FailureTimeline | None:
        """The failure that ended the cycle."""
        return self._by_cycle.get((replica, generation, cycle))

    def take(self, entry: Entry, view: JobView) -> None:
        record = entry.record
        # The view has taken the entry: where its last failure is another one now, the entry has reported a failure.
        noted, self._noted = self._noted, view.last_failure
        if type(record) in _OF_EVERY_NODE:  # nearly all are, and nothing here follows from them
            self._reported = None
            return
        # The decisions about a fact follow it in the journal. The next fact ends them.
        if isinstance(record, records.Fact):
            self._reported = None
        if isinstance(record, _REPORTS):
            if view.last_failure is not noted and view.last_failure is not None and view.shutdown is None:
                reported = self._report(view.last_failure, view)
                if isinstance(record, records.WorkerHung) and record.stacks is not None:
                    reported.stacks[record.rank] = record.stacks
            return
        match record:
            case records.ControllerStarted():
                self._controller = record
            case records.RestartOrdered():
                self._is_asked = True
            case records.RendezvousOpened():
                # Cycle 0 ends none, and a restart that a user asked for is no failure.
                if record.cycle and not self._is_asked:
                    self._end((record.replica, view.generation, record.cycle - 1), entry.t)
                self._is_asked = False
            case records.Attributed() if failure := self.of(record.replica, view.generation, record.cycle):
                # The controller reads the answers once: what stands behind its verdict in the journal came later.
                late = failure.judged is not None
                failure.answers.append(RecordedAnswer(attribution=record.attribution, at=entry.t, late=late))
            case records.AttributionJudged() if failure := self.of(record.replica, view.generation, record.cycle):
                failure.judged = record
            case records.RestartDecided():
                key = (record.replica, view.generation, record.cycle)
                failure = self._end(key, entry.t)
                failure.key = key  # the cause may be of another replica than its first report
                failure.cause = view.last_failure or failure.cause  # the view has settled it, too
                failure.decided, failure.decided_at, failure.decider = record, entry.t, self._controller
                if record.action in ("stop", "fail_job"):
                    self._ending = failure
            case records.FirstStepReached():
                key = (record.replica, view.generation, record.cycle - 1)
                if (failure := self._by_cycle.get(key)) and failure.key == key:  # not: was restarted with another
                    failure.stepped = record
            # A failure that the job has recovered from did not end it.
            case records.Shutdown() if (failure := self._ending) and failure.running_again_at(view) is None:
                failure.shutdown = record
            case records.StacksDumped(request=None):
                # Stacks that no user asked for: the newest failure made its nodes write them.
                node = view.nodes.get(record.node)
                if node is not None and node.replica is not None and self.timelines:
                    self.timelines[-1].stacks.update(record.files)

    def _report(self, cause: FailureView, view: JobView) -> FailureTimeline:
        """A report: about a cycle that a failure has ended already, or of a new failure."""
        if cause.replica is not None and cause.cycle is not None:
            now = view.cycles.get((cause.replica, view.generation, cause.cycle))
            # While a rendezvous is open no worker of it has failed: the report is about the cycle before.
            ended = cause.cycle - (now is not None and now.closed_at is None)
            if known := self.of(cause.replica, view.generation, ended):
                known.more += 1
                if len(known.followed) < MOST_FOLLOWED:
                    known.followed.append(cause.why)
                return known
        self._reported = FailureTimeline(cause.at, cause)
        self.timelines.append(self._reported)
        return self._reported

    def _end(self, key: CycleKey, at: float) -> FailureTimeline:
        """The failure that ended a cycle: the one that is known, or the one whose report these decisions follow."""
        if (known := self._by_cycle.get(key)) is not None:
            return known
        if self._reported is None:
            # No record reports workers that run on after those of other nodes have finished (`hang.exit_skew`).
            why = f"workers of {key[0]} hung: others have finished"
            cause = FailureView(at=at, why=why, node="", replica=key[0], cycle=key[2], kind="worker_hung")
            self._reported = FailureTimeline(at, cause)
            self.timelines.append(self._reported)
        failure = self._ending = self._by_cycle[key] = self._reported
        failure.decider = self._controller
        # With `restart_job` the failure ends a cycle of each replica. It counts for the one in which it was seen.
        if failure.key is None or failure.cause.replica == key[0]:
            failure.key = key
        return failure
