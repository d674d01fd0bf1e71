"""What only a replay of the core knows of each failure: what the sources were asked, and the progress until then.

`FailureReplay` attaches it to the failures that `Failures` finds. Only `explain`, the lines at a job's end and
`hindsight` need it; other reports load no core.

`controller.AttributionRequests` builds the request here as it does in the controller, so the rules are asked exactly
what the controller asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nvrx_slurm.controller.attribution_requests import AttributionRequests
from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import RestartDecision, new_job
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import Entry, Fact, NodeReady, RestartedInProcess, WorkerFailed
from nvrx_slurm.journal.verdicts import Inquiry
from nvrx_slurm.report.failures import Failures, FailureTimeline
from nvrx_slurm.report.model import CycleKey, JobView
from nvrx_slurm.report.view import JobFold
from nvrx_slurm.util.files import JobFiles


@dataclass(slots=True)
class ReplayedFailure:
    """A failure that ended a cycle, with what `explain` shows beside its timeline. None: no step is known."""

    timeline: FailureTimeline
    inquiry: Inquiry
    failed_at: float  # when the cause was noticed: seconds since the epoch, by the store's clock
    best_before: int | None  # the highest step before this cycle
    best_step: int | None  # the highest with it
    last_step: int | None  # the highest of this cycle
    last_in_process: str  # for what its ranks restarted in process the last time in this cycle
    peers_lost: set[int]  # ranks that lost the connection to a peer


class FailureReplay:
    """The failures that ended a cycle, oldest first. A subscriber of `JobFold`."""

    def __init__(self, plan: Plan, files: JobFiles) -> None:
        self._job = new_job(plan)
        self._requests = AttributionRequests(self._job, files, NoBroker())
        self._fold = Failures()
        self._replayed: dict[FailureTimeline, ReplayedFailure] = {}
        self._best_before: dict[str, int | None] = {}  # replica → its highest step in earlier cycles
        self._last_in_process: dict[CycleKey, str] = {}
        self._peers_lost: defaultdict[CycleKey, set[int]] = defaultdict(set)

    @property
    def failures(self) -> list[ReplayedFailure]:
        return list(self._replayed.values())

    def take(self, entry: Entry, view: JobView) -> None:
        record = entry.record
        self._fold.take(entry, view)
        # As the controller does with each record: a request names what these have said of the cycle.
        self._requests.note(record, entry.t)
        if isinstance(record, Fact):
            # The step may begin the next cycle, which counts the steps of the failed one among the earlier ones.
            self._best_before = {replica.id: replica.best_step for replica in self._job.replicas.values()}
            step(self._job, record, entry.t)
        match record:
            case RestartedInProcess():
                self._last_in_process[record.replica, view.generation, record.cycle] = record.restart.cause
            case WorkerFailed(peer_lost=True):
                self._peers_lost[record.replica, view.generation, record.cycle].add(record.rank)
            # A node reports them once it is ready for the next cycle; they are of the cycle before.
            case NodeReady() if record.peers_lost:
                self._peers_lost[record.replica, view.generation, record.cycle - 1].update(record.peers_lost)
        for pending in self._job.restart_decisions.values():
            self._attach(pending, view)

    def _attach(self, pending: RestartDecision, view: JobView) -> None:
        """Take in a failure that the core has noticed, and again when the core has another cause for it."""
        key, replica = (pending.replica, view.generation, pending.cycle), self._job.replicas[pending.replica]
        timeline = self._fold.of(*key)
        if timeline is None or timeline.running_again_at(view) is not None:
            return  # the entries that end its cycle follow; or it is over
        known = self._replayed.get(timeline)
        failed = None if known is None else known.inquiry.failed
        # Until the decision a later report may turn out to be the cause; after it the cause is settled.
        if known is None or failed is None or (timeline.decided is None and failed.cause != pending.failure.cause):
            known = self._replayed[timeline] = ReplayedFailure(
                timeline=timeline,
                inquiry=self._requests.inquiry(pending),
                failed_at=pending.failure.noticed,
                best_before=self._best_before[replica.id],
                best_step=None,
                last_step=None,
                last_in_process=self._last_in_process.get(key, ""),
                # The set itself, not a copy: ranks that lose a peer later are added to it.
                peers_lost=self._peers_lost[key],
            )
        # Nodes report how far the cycle had come until the next one begins.
        steps = (known.best_step, replica.best_step, replica.reached)
        known.best_step = max((each for each in steps if each is not None), default=None)
        known.last_step = known.last_step if replica.reached is None else replica.reached


class NoBroker:
    """A broker for readers of a journal: it asks no source."""

    def open(self) -> None: ...
    def ask(self, inquiry: Inquiry, *, settled: bool) -> None: ...
    def settled(self, key: object) -> None: ...
    def judged(self, judged: object) -> None: ...
    def found(self, findings: object) -> None: ...
    async def close(self, within_s: float) -> None: ...


def read_failures(plan: Plan, files: JobFiles, journal: Iterable[Entry]) -> tuple[list[ReplayedFailure], JobView]:
    """All failures of a journal that ended a cycle, and the view after it."""
    replay = FailureReplay(plan, files)
    fold = JobFold(plan, [replay])
    for entry in journal:
        fold.take(entry)
    return replay.failures, fold.view
