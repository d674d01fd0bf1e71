"""One job under one flow: follow its journal, match it with the expectations, and inject the faults that are due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from nvrx_slurm.api.handle import Job
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.cluster.queue_place import QueueReporter
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.lab.flow.matching import FlowMatcher
from nvrx_slurm.lab.flow.model import Fault, Flow
from nvrx_slurm.lab.flow.outcome import FlowFinding, InjectedFault, finding_of
from nvrx_slurm.lab.flow.stages.base import Stage
from nvrx_slurm.lab.flow.stages.faults import Scene
from nvrx_slurm.lab.flow.topology import JobTopology
from nvrx_slurm.lab.flow.triggers import FaultScheduler
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.presence import ask_slurm
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("ci")

LONGEST_WAIT_S = 0.5

# Everything is met and nothing is open; something is not met; the job ended by itself; `limits.wall` has passed; the
# whole run has no more time.
End = Literal["met", "missed", "ended", "bound", "out_of_time"]


class FlowRun:
    """One job under one flow. `entries`: its journal so far; `injected`: the faults that have happened; `findings`:
    those that did not."""

    def __init__(
        self, flow: Flow, stage: Stage, poller: StatePoller, clock: Clock, notify: Callable[[str], None] = log.info
    ) -> None:
        self.flow, self.poller = flow, poller
        self.folder = JobFolder(poller.job.folder)
        self.matcher, self.scheduler = FlowMatcher(flow), FaultScheduler(flow.faults)
        self.entries: list[Entry] = []
        self.injected: list[InjectedFault] = []
        self.findings: list[FlowFinding] = []
        self._stage, self._clock = stage, clock
        self.queue = QueueReporter(poller.job.job_id, lambda why: notify(f"is pending: {why}"), clock=clock)
        self._topology = JobTopology(self.folder.read_plan())
        self._journal = stage.journal(self.folder)
        # How far the journal's clock is ahead of this process's monotonic one: by the wall clock, until the store's
        # time can be read. Never by the wall clock at each use: it may be set while a job runs.
        self._ahead_s = clock.wall() - clock.monotonic()
        self._is_set = False

    def run(self, until: float) -> End:
        """Follow the job until all is decided, or it is `until` on the monotonic clock."""
        self._take(self._journal.poll())
        # A job that starts at once has entries by now, and was never seen pending.
        if not self.entries:
            self.scheduler.in_state(self._now(), "pending")
        while (end := self._end(until)) is None:
            moments = [until + self._ahead_s, self.matcher.next_deadline(), self.scheduler.next_at()]
            # The next entry may come at any time; so poll returns with it, or when something is due without one.
            wait_s = min(moment for moment in moments if moment is not None) - self._now()
            self._take(self._journal.poll(max(0.0, min(wait_s, self.poller.pause_s(), LONGEST_WAIT_S))))
            if self.poller.state is JobState.PENDING:
                self.queue.look()
            # Before `look`: a fault that is injected now is what a `within` may count from.
            for fault in self.scheduler.due(self._now()):
                self._inject(fault)
            self.matcher.look(self._now())
        return end

    def drain(self) -> None:
        """Take in the last entries of a job that is over; what they leave open is not met any more."""
        self._take(self._journal.catch_up())
        self._journal.close()
        self.matcher.job_over()

    def _end(self, until: float) -> End | None:
        # First: a miss ends the flow also where its job has just ended.
        if self.matcher.miss is not None or self.findings:
            return "missed"
        if self.matcher.settled:
            return "met"
        if self.poller.is_over(hint=self._journal.ended):
            return "ended"
        return "bound" if self._clock.monotonic() >= until else None

    def _take(self, items: Iterable[Entry | ReceivedHeartbeat]) -> None:
        for item in items:
            if isinstance(item, Entry):
                # The store's own clock, once it can be read: that of another host may differ from this one's.
                if not self._is_set and (t := self._journal.store_time()) is not None:
                    self._ahead_s, self._is_set = t - self._clock.monotonic(), True
                self.entries.append(item)
                self._topology.feed(item)
                self.matcher.feed(item)
            self.scheduler.feed(item, self.matcher.bindings)

    def _inject(self, fault: Fault) -> None:
        what = f"fault {fault.number} ({fault.describe()})"
        bindings = {**self.matcher.bindings, **self.scheduler.bindings}
        scene = Scene(self.poller.job, self.folder, self._topology, bindings)
        try:
            result = self._stage.inject(fault.action, fault.arguments, scene)
        except FaultFailed as error:
            finding = finding_of(self.flow, "fault", f"{what} did not happen: {error}", line=fault.line)
            self.findings.append(finding)
            return
        log.info("%s happened: %s", what, result.proof)
        # The stage reports wall time; the journal has the store's clock.
        t = self._now() - (self._clock.wall() - result.at)
        named = {fault.binds: result.bound} if fault.binds is not None and result.bound is not None else {}
        self.injected.append(
            InjectedFault(number=fault.number, what=fault.describe(), t=t, proof=result.proof, bindings=named)
        )
        self.matcher.fault_happened(t, {**self.scheduler.bindings, **named})
        self.scheduler.fault_happened(fault, t, named)

    def _now(self) -> float:
        """The time on the journal's clock."""
        return self._clock.monotonic() + self._ahead_s


# How long between two questions: when the journal says that the job has ended, and otherwise.
SOON_S, SELDOM_S = 0.2, 2.0


class StatePoller:
    """One job, asked about no more often than needed. `state`: the last answer; None: there was none yet."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.job, self._clock = job, clock
        self.state: JobState | None = None
        self._asked_at = clock.monotonic()
        self._pause_s = SELDOM_S

    def is_over(self, *, hint: bool) -> bool:
        """Whether the job is over; `hint`: the journal says so."""
        self._pause_s = SOON_S if hint else SELDOM_S
        if self.pause_s() <= 0.0:
            self.ask()
        return self.state is not None and self.state.terminal

    def ask(self) -> JobState | None:
        """The job's state now; None: no answer."""
        local = self.job.cluster == "local"
        states = LocalCluster(self.job.folder.parent).states if local else ask_slurm
        self.state = states([self.job.job_id]).get(self.job.job_id)
        self._asked_at = self._clock.monotonic()
        return self.state

    def pause_s(self) -> float:
        """How long until the next question."""
        return max(0.0, self._asked_at + self._pause_s - self._clock.monotonic())
