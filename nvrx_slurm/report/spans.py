"""What each node's time was spent on: one span after the other, without a gap, from the journal alone. Pure.

A subscriber of `JobFold`. A node's first span begins when the job gets its nodes (`job_started`), and its last one
ends with the generation. So the spans of a node add up to the time that the job held it: `goodput` counts on that,
and the page and the trace draw them.

Times are whole microseconds since the epoch, as precise as the journal is: sums of them have no rounding.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import msgspec

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report.model import CycleKey, JobView

# What a node does.
#
# `queue`: the job waits for its nodes again, between two generations. `joining`: its agent has not joined yet.
# `standby`: a hot spare; `excluded`: quarantined or drained. `ready`: it waits for the rendezvous to close.
# `starting`: from the close to the start of its workers, and on to their first step; `unstepped`: its workers
# run, and no rank of the cycle has ever reported a step. `stepping`: from the first step on. `detecting`: its
# cycle has failed, and no process has noticed; `deciding`: it was noticed, and nothing has followed yet, or a
# rendezvous waits for a verdict. `stopping`: its old workers are torn down. `lost`: it is gone, and still in the
# allocation. `ending`: its work is done, or the job ends.
Kind = Literal[
    "queue",
    "joining",
    "standby",
    "excluded",
    "ready",
    "starting",
    "unstepped",
    "stepping",
    "detecting",
    "deciding",
    "stopping",
    "lost",
    "suspended",
    "ending",
]

# A cycle of the node's replica runs. These end where it fails.
AT_WORK = ("starting", "unstepped", "stepping")


# Structs of msgspec, without garbage collection: a large job has hundreds of thousands.
class Span(msgspec.Struct, frozen=True, gc=False):
    """`cycle`: the one that the node works for; None where it works for none."""

    node: str
    kind: Kind
    since_us: int
    until_us: int
    cycle: CycleKey | None


class _Open(msgspec.Struct, gc=False):
    """The last span of a node, which has not ended yet."""

    kind: Kind
    since: int
    cycle: CycleKey | None
    started: int | None = None  # when its workers had started
    was: Kind | None = None  # before the job was suspended


# A node's state in the view → its span, where it works for no cycle.
OF_STATE: dict[str, Kind] = {
    "joining": "joining",
    "ready": "ready",
    "standby": "standby",
    "quarantined": "excluded",
    "drained": "excluded",
    "lost": "lost",
    "left": "lost",
}


class NodeSpans:
    """`spent_us`: kind and cycle → microseconds of the spans that have ended, of all nodes. These are also added to
    `ended`, if it is given; `pending` are those that have not ended."""

    def __init__(self, ended: list[Span] | None = None) -> None:
        self.spent_us: defaultdict[tuple[Kind, CycleKey | None], int] = defaultdict(int)
        self._spans = ended
        self._open: dict[str, _Open] = {}
        self._first_steps: dict[CycleKey, int] = {}
        self._last_us = 0
        self._ended_us: int | None = None
        self._led_from = (0, 0)  # the last start of a controller: its number, and the moment of the entry before it

    def pending(self, at: float | None = None) -> list[Span]:
        """The spans that have not ended, up to the last entry, or up to `at`, of a job that goes on."""
        until = self._last_us if at is None else max(self._last_us, round(at * 1e6))
        return [span for node in self._open for span in self._until(node, until)]

    def take(self, entry: Entry, view: JobView) -> None:
        before, now = self._last_us, round(entry.t * 1e6)
        # The store's clock may be set back, or another store's is behind. No span is negative.
        if now < before:
            now = before
        self._last_us = now
        record = entry.record
        match record:
            case records.Progress():
                span, cycle = self._open.get(record.node), (record.replica, view.generation, record.cycle)
                self._first_steps.setdefault(cycle, now)
                if span is not None and span.kind == "starting" and span.cycle == cycle:
                    self._emit(Span(record.node, "starting", span.since, now, cycle))
                    self._open[record.node] = _Open("stepping", now, cycle)
            case records.WorkersStarted():
                span = self._open.get(record.node)
                cycle = (record.replica, view.generation, record.cycle)
                if span is not None and span.kind == "starting" and span.cycle == cycle:
                    span.started = now
            case records.NodeReady() | records.NodeJoined() | records.NodeUndrained() | records.NodeDrained():
                self._follow(record.node, view, now)
            case records.Fence() | records.Quarantined():
                self._follow(record.node, view, now)
            case records.WorkerFailed():
                self._fail(record.replica, view, now, record.ago_s)
            case records.WorkerHung():
                self._fail(record.replica, view, now, record.silent_s + record.ago_s)
            case records.NodeIsolated():
                self._fail(record.replica, view, now, record.for_s)
            case records.NodeLost() | records.NodeLeft():
                span = self._open.get(record.node)
                if span is not None and span.cycle is not None and span.kind in AT_WORK and view.shutdown is None:
                    ago_s = record.ago_s + record.silent_s if isinstance(record, records.NodeLost) else 0.0
                    self._fail(span.cycle[0], view, now, ago_s)
                self._follow(record.node, view, now)
            case records.WorkersDone():
                span = self._open.get(record.node)
                if span is not None and span.kind in AT_WORK:
                    self._change(record.node, "ending", now, span.cycle)
            case records.AttributionJudged() if (waited_us := round(record.waited_s * 1e6)) > 0:
                # A rendezvous that could close has waited so long for the verdict.
                for node, span in self._of(record.replica):
                    if span.kind == "ready":
                        self._change(node, "deciding", max(span.since, now - waited_us), span.cycle)
                        self._change(node, "ready", now, span.cycle)
            case records.RendezvousOpened():
                busy = (*AT_WORK, "detecting", "deciding", "ending")
                for node, span in self._of(record.replica):
                    if span.kind in busy:
                        self._change(node, "stopping", now, span.cycle)
            case records.RendezvousClosed():
                key = (record.replica, view.generation, record.cycle)
                for node in record.nodes:
                    self._change(node, "starting", now, key)
                for node, span in list(self._open.items()):
                    if span.kind in ("ready", "standby"):
                        self._follow(node, view, now)
            case records.ReplicaEnded():
                for node, span in self._of(record.replica):
                    if span.kind != "lost":
                        self._change(node, "ending", now, span.cycle)
            case records.JobSuspended():
                for node, span in list(self._open.items()):
                    if span.kind not in ("lost", "suspended"):
                        # The suspension cuts the span in two. The second half is of the same kind, and its workers
                        # have started if they had.
                        self._change(node, "suspended", now, span.cycle)
                        self._open[node].was, self._open[node].started = span.kind, span.started
            case records.JobResumed():
                for node, span in list(self._open.items()):
                    if span.was is not None:
                        self._change(node, span.was, now, span.cycle)
                        self._open[node].started = span.started and now
            case records.Shutdown():
                for node, span in list(self._open.items()):
                    if span.kind != "lost":
                        self._change(node, "ending", now, span.cycle)
            case records.JobEnded():
                self._end(now)
            case records.ControllerStarted():
                self._led_from = entry.n, before
            case records.JobStarted():
                # The entry just before it is of the same generation: it names the controller that has begun it.
                number, led_us = self._led_from
                if self._ended_us is None and self._open:
                    # The generation before has left no end: its last entry is its end.
                    self._end(led_us if number == entry.n - 1 else before)
                ended = self._ended_us
                self._open, self._ended_us = {}, None
                for node in record.expected:
                    if ended is not None:
                        self._emit(Span(node, "queue", ended, now, None))
                    self._open[node] = _Open("joining", now, None)

    # ---- what records do

    def _end(self, at: int) -> None:
        """A generation ends; what its agents still post changes nothing."""
        self._ended_us = self._last_us = at
        for node in list(self._open):
            self._close(node, at)
        self._open = {}

    def _follow(self, node: str, view: JobView, now: int) -> None:
        """The node's span is what the view says of it."""
        there = view.nodes.get(node)
        state = "joining" if there is None else there.state
        kind = OF_STATE.get(state)
        if kind is None or self._ended_us is not None:  # active, and so of its cycle
            return
        if view.shutdown is not None and kind != "lost":
            kind = "ending"
        known = self._open.get(node)
        if view.shutdown is not None and state == "left" and (known is None or known.kind != "lost"):
            kind = "ending"
        if known is None:
            self._open[node] = _Open(kind, now, None)
        elif known.kind != kind:
            cycle: CycleKey | None = None  # of the rendezvous that a node that is ready waits for
            if kind == "ready" and (replica := view.replicas.get(view.nodes[node].replica or "")) is not None:
                cycle = (replica.id, view.generation, replica.cycle)
            self._change(node, kind, now, cycle)

    def _fail(self, replica: str, view: JobView, now: int, ago_s: float) -> None:
        """A cycle of the replica has failed, so long ago. The first report of it counts."""
        if view.shutdown is not None:
            return
        failed = now - round(ago_s * 1e6)
        for node, span in self._of(replica):
            # The first report has ended these spans: later ones of the same failure find none.
            if span.kind in AT_WORK:
                at = min(max(failed, span.since), now)
                self._close(node, at)
                self._emit(Span(node, "detecting", at, now, span.cycle))
                self._open[node] = _Open("deciding", now, span.cycle)

    # ---- the spans

    def _of(self, replica: str) -> list[tuple[str, _Open]]:
        return [
            (node, span) for node, span in self._open.items() if span.cycle is not None and span.cycle[0] == replica
        ]

    def _change(self, node: str, kind: Kind, now: int, cycle: CycleKey | None) -> None:
        self._close(node, now)
        if self._ended_us is None:
            self._open[node] = _Open(kind, now, cycle)

    def _close(self, node: str, at: int) -> None:
        if node in self._open:
            for span in self._until(node, at):
                self._emit(span)

    def _until(self, node: str, at: int) -> list[Span]:
        """What the node's open span is, if it ends here. Of one in which workers started, only then is it known from
        when on they ran, and from when on the cycle made steps."""
        span = self._open[node]
        if at <= span.since:
            return []
        if span.kind != "starting" or span.started is None or span.cycle is None:
            return [Span(node, span.kind, span.since, at, span.cycle)]
        # None of its ranks has reported a step: it goes by those of the other nodes, if these have.
        first = self._first_steps.get(span.cycle)
        runs_from = max(span.started if first is None else first, span.since)
        if runs_from >= at:
            return [Span(node, "starting", span.since, at, span.cycle)]
        runs = Span(node, "unstepped" if first is None else "stepping", runs_from, at, span.cycle)
        if runs_from == span.since:
            return [runs]
        return [Span(node, "starting", span.since, runs_from, span.cycle), runs]

    def _emit(self, span: Span) -> None:
        if span.until_us > span.since_us:
            self.spent_us[span.kind, span.cycle] += span.until_us - span.since_us
            if self._spans is not None:
                self._spans.append(span)
