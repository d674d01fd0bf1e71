"""The failures of a job, each with its timeline: how it was noticed, the answers, the decision, what followed.

They are found by replaying the journal through the core: what it knew at each failure is what the sources were asked.
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
    AttributionAsked,
    AttributionJudged,
    ControllerStarted,
    Entry,
    Fact,
    JobStarted,
    NodeReady,
    RestartDecided,
    RestartedInProcess,
    RoundClosed,
    Shutdown,
)
from nvrx_slurm.journal.verdicts import Attribution, Inquiry
from nvrx_slurm.util.files import JobFiles

Key = tuple[int, str, int]
"""Generation, replica, cycle."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What a source said, and when. `late`: the verdicts had been read by then."""

    attribution: Attribution
    at: float
    late: bool


@dataclass(slots=True)
class FailureTimeline:
    """One failure. Times are seconds since the epoch, by the store's clock; None: that has not come."""

    inquiry: Inquiry
    failed_at: float
    decider: ControllerStarted | None
    asked: AttributionAsked | None = None
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

    @property
    def key(self) -> Key:
        key = self.inquiry.key
        return key.generation, key.replica, key.cycle


class Failures:
    """Takes a journal, entry by entry."""

    def __init__(self, plan: Plan, files: JobFiles) -> None:
        self.plan, self.job = plan, new_job(plan)
        self.timelines: list[FailureTimeline] = []
        self.exit_code: int | None = None
        self._requests = AttributionRequests(self.job, files, NoBroker())
        self._by_key: dict[Key, FailureTimeline] = {}
        self._controller: ControllerStarted | None = None
        self._worlds: dict[str, int] = {}
        self.in_process: dict[Key, list[RestartedInProcess]] = {}
        self._ending: FailureTimeline | None = None  # the failure that ends the job

    def take(self, entry: Entry) -> None:
        record = entry.record
        self._requests.note(record, entry.t)
        if isinstance(record, Fact):
            best = {replica.id: _best(replica.best_step, replica.reached) for replica in self.job.replicas.values()}
            step(self.job, record, entry.t)
            self._open(entry.t, best)
        match record:
            case ControllerStarted():
                self._controller = record
            case RestartedInProcess():
                self.in_process.setdefault((self.job.generation, record.replica, record.cycle), []).append(record)
            case RoundClosed():
                self._worlds[record.replica] = record.world_size
                if timeline := self._timeline(record.replica, record.cycle - 1):
                    timeline.running_again_at = entry.t
            case NodeReady() if timeline := self._timeline(record.replica, record.cycle - 1):
                timeline.best_step = _best(timeline.best_step, record.step)
            case AttributionAsked() if timeline := self._timeline(record.replica, record.cycle):
                timeline.asked = record
            case Attributed() if timeline := self._timeline(record.replica, record.cycle):
                timeline.answers.append(RecordedAnswer(record.attribution, entry.t, late=timeline.judged is not None))
            case AttributionJudged() if timeline := self._timeline(record.replica, record.cycle):
                timeline.judged = record
            case RestartDecided() if timeline := self._timeline(record.replica, record.cycle):
                timeline.decided, timeline.decided_at, timeline.decider = record, entry.t, self._controller
                self._ending = timeline if record.action in ("stop", "fail_job") else self._ending
            case Shutdown():
                self.exit_code = record.exit_code
                last = self.timelines[-1] if self.timelines and self.timelines[-1].running_again_at is None else None
                if ended := self._ending or last:
                    ended.shutdown = record
            case JobStarted():
                self.exit_code, self._ending = None, None

    def _open(self, now: float, best: dict[str, int | None]) -> None:
        for case in self.job.restart_decisions.values():
            key = (self.job.generation, case.replica, case.cycle)
            if key in self._by_key:
                continue
            replica, in_process = self.job.replicas[case.replica], self.in_process.get(key, [])
            timeline = FailureTimeline(
                inquiry=self._requests.inquiry(case),
                failed_at=case.failure.noticed,
                decider=self._controller,
                world_size=self._worlds.get(case.replica, 0),
                best_before=replica.best_step,
                best_step=_best(best[case.replica], case.failure.step),
                in_process=sum(record.times for record in in_process),
                last_in_process=in_process[-1].restart.cause if in_process else "",
            )
            self._by_key[key] = timeline
            self.timelines.append(timeline)

    def _timeline(self, replica: str, cycle: int) -> FailureTimeline | None:
        return self._by_key.get((self.job.generation, replica, cycle))


class NoBroker:
    """A broker for readers of a journal: it asks no source."""

    def open(self) -> None: ...
    def ask(self, inquiry: Inquiry, *, settled: bool) -> None: ...
    def settled(self, key: object) -> None: ...
    def judged(self, judged: object) -> None: ...
    async def close(self, within_s: float) -> None: ...


def failures(plan: Plan, files: JobFiles, journal: Iterable[Entry]) -> Failures:
    """All failures of a journal, oldest first."""
    found = Failures(plan, files)
    for entry in journal:
        found.take(entry)
    return found


def _best(*steps: int | None) -> int | None:
    return max((each for each in steps if each is not None), default=None)
