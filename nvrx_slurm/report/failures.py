"""The failures of a job, each with its timeline: how it was noticed, the answers, the decision, what followed.

`Failures` subscribes to the one pass over the journal (`view.JobFold`). What the view has (worlds, restarts in
process, the shutdown) it takes from the view.

Beside that it replays the facts through the core, which no other reader of a report needs. Only the core's state at
the failure says which failure counted, how much progress the core had counted until then, and what the controller
asked the sources. `controller.AttributionRequests` builds that request here as it does in the controller, so the
rules are asked exactly what the controller asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nvrx_slurm.controller.attribution_requests import AttributionRequests
from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import new_job
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionJudged,
    ControllerStarted,
    Entry,
    Fact,
    FirstStepReached,
    JobStarted,
    NodeReady,
    Progress,
    RendezvousClosed,
    RestartDecided,
    RestartedInProcess,
    Shutdown,
    WorkerFailed,
)
from nvrx_slurm.journal.verdicts import Attribution, Inquiry
from nvrx_slurm.report.model import CycleKey, JobView
from nvrx_slurm.report.view import JobFold
from nvrx_slurm.util.files import JobFiles


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What a source said, and when. `late`: the verdicts had been read by then."""

    attribution: Attribution
    at: float
    late: bool


@dataclass(slots=True)
class FailureTimeline:
    """One failure. Times are seconds since the epoch, by the store's clock; None: that has not happened."""

    inquiry: Inquiry
    failed_at: float
    decider: ControllerStarted | None
    answers: list[RecordedAnswer] = field(default_factory=list)
    judged: AttributionJudged | None = None
    decided: RestartDecided | None = None
    decided_at: float | None = None
    shutdown: Shutdown | None = None
    running_again_at: float | None = None
    world_size: int = 0
    best_before: int | None = None  # the highest step before this cycle
    best_step: int | None = None  # the highest with it
    in_process: int = 0  # how often its ranks had restarted in process in this cycle
    last_in_process: str = ""  # for what the last time
    resumed_from: int | None = None  # the first step after it
    stepped: FirstStepReached | None = None  # when all nodes had made theirs
    peers_lost: set[int] = field(default_factory=set)  # ranks that lost the connection to a peer


class Failures:
    """The timelines of a journal's failures, oldest first. A subscriber of `JobFold`."""

    def __init__(self, plan: Plan, files: JobFiles) -> None:
        self.timelines: list[FailureTimeline] = []
        self.job = new_job(plan)
        self._requests = AttributionRequests(self.job, files, NoBroker())
        self._by_key: dict[CycleKey, FailureTimeline] = {}
        self._controller: ControllerStarted | None = None
        self._last_in_process: dict[CycleKey, str] = {}
        self._ending: FailureTimeline | None = None  # the failure that ends the job

    def take(self, entry: Entry, view: JobView) -> None:
        record = entry.record
        self._requests.note(record, entry.t)
        if isinstance(record, Fact):
            # A failure opens the next cycle, in which the core counts steps from 0: look before it takes the fact.
            best = {replica.id: _best(replica.best_step, replica.reached) for replica in self.job.replicas.values()}
            step(self.job, record, entry.t)
            self._open(view, best)
        match record:
            case JobStarted():
                self._ending = None
            case ControllerStarted():
                self._controller = record
            case RestartedInProcess():
                self._last_in_process[record.replica, view.generation, record.cycle] = record.restart.cause
            case RendezvousClosed() if timeline := self._timeline(record.replica, record.cycle - 1):
                timeline.running_again_at = entry.t
            case Progress() if (timeline := self._timeline(record.replica, record.cycle - 1)) is not None:
                timeline.resumed_from = record.step if timeline.resumed_from is None else timeline.resumed_from
            case FirstStepReached() if timeline := self._timeline(record.replica, record.cycle - 1):
                timeline.stepped = record
            case NodeReady() if timeline := self._timeline(record.replica, record.cycle - 1):
                timeline.best_step = _best(timeline.best_step, record.step)
                timeline.peers_lost.update(record.peers_lost)
            case WorkerFailed(peer_lost=True) if timeline := self._timeline(record.replica, record.cycle):
                timeline.peers_lost.add(record.rank)
            case Attributed() if timeline := self._timeline(record.replica, record.cycle):
                timeline.answers.append(RecordedAnswer(record.attribution, entry.t, late=timeline.judged is not None))
            case AttributionJudged() if timeline := self._timeline(record.replica, record.cycle):
                timeline.judged = record
            case RestartDecided() if timeline := self._timeline(record.replica, record.cycle):
                timeline.decided, timeline.decided_at, timeline.decider = record, entry.t, self._controller
                self._ending = timeline if record.action in ("stop", "fail_job") else self._ending
            case Shutdown():
                last = self.timelines[-1] if self.timelines and self.timelines[-1].running_again_at is None else None
                if ended := self._ending or last:
                    ended.shutdown = record

    def _open(self, view: JobView, best: dict[str, int | None]) -> None:
        """Begin the timeline of each failure that the core has just noticed, and name its cause as it is settled."""
        generation = self.job.generation
        for key, known in list(self._by_key.items()):
            moved = (
                key[1] == generation and known.decided is None and (key[0], key[2]) not in self.job.restart_decisions
            )
            if moved:  # its cause is another replica's failure
                self.timelines.remove(known)
                del self._by_key[key]
        for pending in self.job.restart_decisions.values():
            key = (pending.replica, generation, pending.cycle)
            if (timeline := self._by_key.get(key)) is not None:
                failed = timeline.inquiry.failed
                if timeline.decided is None and failed is not None and failed.cause != pending.failure.cause:
                    timeline.inquiry = self._requests.inquiry(pending)
                    timeline.failed_at = pending.failure.noticed
                    timeline.best_step = _best(timeline.best_step, pending.failure.step)
                continue
            cycle = view.cycles.get(key)
            timeline = FailureTimeline(
                inquiry=self._requests.inquiry(pending),
                failed_at=pending.failure.noticed,
                decider=self._controller,
                world_size=cycle.world_size if cycle else 0,
                best_before=self.job.replicas[pending.replica].best_step,
                best_step=_best(best[pending.replica], pending.failure.step),
                in_process=cycle.restarts_in_process if cycle else 0,
                last_in_process=self._last_in_process.get(key, ""),
            )
            self._by_key[key] = timeline
            self.timelines.append(timeline)

    def _timeline(self, replica: str, cycle: int) -> FailureTimeline | None:
        return self._by_key.get((replica, self.job.generation, cycle))


class NoBroker:
    """A broker for readers of a journal: it asks no source."""

    def open(self) -> None: ...
    def ask(self, inquiry: Inquiry, *, settled: bool) -> None: ...
    def settled(self, key: object) -> None: ...
    def judged(self, judged: object) -> None: ...
    def found(self, findings: object) -> None: ...
    async def close(self, within_s: float) -> None: ...


def read_failures(plan: Plan, files: JobFiles, journal: Iterable[Entry]) -> tuple[Failures, JobView]:
    """All failures of a journal, and the view after it."""
    found = Failures(plan, files)
    fold = JobFold(plan, [found])
    for entry in journal:
        fold.take(entry)
    return found, fold.view


def _best(*steps: int | None) -> int | None:
    return max((each for each in steps if each is not None), default=None)
