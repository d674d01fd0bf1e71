"""What a page, a trace or metrics show of a job beside its view: spans, failures with what was done, and the goodput.

A subscriber of `JobFold`, which needs no plan and replays nothing. It does no I/O.
"""

from __future__ import annotations

from collections import defaultdict

from nvrx_slurm.journal.records import Entry, JobStarted
from nvrx_slurm.report.failures import Failures
from nvrx_slurm.report.goodput import Goodput, GoodputMeter
from nvrx_slurm.report.model import JobView
from nvrx_slurm.report.spans import Span


class JobTimeline:
    """Reads one job's journal. `spans`: those of every node, in the order of their ends; with `keeps_spans=False`
    none is kept, for a reader that goes on for weeks."""

    def __init__(self, *, keeps_spans: bool = True) -> None:
        self.spans: list[Span] = []
        self.generations: list[tuple[float, tuple[str, ...]]] = []
        self._meter = GoodputMeter(self.spans if keeps_spans else None)
        self._failures = Failures()
        self.failures = self._failures.timelines
        self._goodput: Goodput | None = None

    def take(self, entry: Entry, view: JobView) -> None:
        self._meter.take(entry, view)
        self._failures.take(entry, view)
        record = entry.record
        if type(record) is JobStarted:
            self.generations.append((entry.t, record.expected))

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
        # Once: the open spans are added to `spans`, and a second call would add them again.
        if self._goodput is None:
            self._goodput = self._meter.result(view, at)
            self.spans += self._meter.spans.pending(at)
        return self._goodput
