"""What the time of a job's nodes was spent on: new steps, steps made twice, and each part of what failures cost.
Pure.

The unit is the time that one node is held: eight nodes for an hour are eight node-hours. Every microsecond of every
node, from the first start to the end, is of exactly one part, so the parts add up to the total (see `spans`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report.model import CycleKey, JobView, Value
from nvrx_slurm.report.spans import NodeSpans, Span


class Part(NamedTuple):
    """A part of the time, in words; and which time it is."""

    words: str
    meaning: str


# Every part, in the order of tables.
PARTS = {
    "new_steps": Part("new steps", "a worker made steps that no earlier cycle had made"),
    "unreported": Part(
        "ran, without reporting steps",
        "workers ran that report no steps, so nothing says how much of it was done twice",
    ),
    "repeated_steps": Part("steps made twice", "steps between the checkpoint and the failure, made again"),
    "in_process": Part("restarts in process", "from a fault into the function again, without a new process"),
    "detection": Part("detection", "from the last sign of life or progress until a process noticed the failure"),
    "decision": Part("decision", "from there until the rendezvous opened, and while one waited for a verdict"),
    "teardown": Part("teardown", "old workers were stopped, and what they left was removed"),
    "rendezvous": Part("rendezvous", "nodes that were ready waited for the others"),
    "startup": Part("start-up", "workers started, imported, loaded a checkpoint, up to the first step"),
    "joining": Part("agents join", "the job had the node, and its agent had not joined"),
    "standby": Part("standby", "hot spares"),
    "excluded": Part("drained or quarantined", "present nodes that get no ranks"),
    "lost": Part("lost nodes", "dead nodes that Slurm still counts as the job's"),
    "suspended": Part("suspended", "Slurm had suspended the job"),
    "ending": Part("ending", "the work of the node was done, or the job ended"),
    "queue": Part(
        "queue between generations", "the job had ended and waited in Slurm's queue for its next generation"
    ),
}

# The kind of a span → its part, where that has another name. Running workers go by the steps that they made.
OF_KIND = {
    "ready": "rendezvous",
    "starting": "startup",
    "detecting": "detection",
    "deciding": "decision",
    "stopping": "teardown",
}


class Goodput(Value, frozen=True, kw_only=True):
    """`parts_us`: every part of `PARTS` → microseconds of nodes; they add up to `total_us`. `ratio`: new steps' share
    of `judged_us`; None where the job reports no steps. `steps_new` and `steps_repeated` count the steps of all
    replicas. `ranks_per_node`: of the job's roles; None where they differ."""

    total_us: int
    parts_us: dict[str, int]
    ratio: float | None
    steps_new: int
    steps_repeated: int
    ranks_per_node: int | None = None

    @property
    def judged_us(self) -> int:
        """The total without the time of workers that report no steps: of that it is not known what it was worth."""
        return self.total_us - self.parts_us["unreported"]

    @property
    def of_what(self) -> str:
        """What the ratio is the share of, in words."""
        left_out = ", without workers that report none" if self.parts_us["unreported"] else ""
        return f"of all node-hours made new steps{left_out}"

    @property
    def node_hours(self) -> float:
        return self.total_us / 3.6e9

    @property
    def rank_hours(self) -> float | None:
        """GPU-hours, where each rank has one GPU."""
        return None if self.ranks_per_node is None else self.node_hours * self.ranks_per_node

    def hours(self, part: str) -> float:
        """Of one part. Raises KeyError."""
        return self.parts_us[part] / 3.6e9

    def share(self, part: str) -> float:
        """Of the total, from 0 to 1."""
        return self.parts_us[part] / self.total_us if self.total_us else 0.0


@dataclass(slots=True)
class _Cycle:
    """The steps of one cycle, and how long its nodes were restarted in process."""

    first: int | None = None
    last: int | None = None
    in_process_us: int = 0


class GoodputMeter:
    """Adds up the spans of `NodeSpans`, and reads the steps of each cycle. A subscriber of `JobFold`. `ended`: where
    each span is added, too."""

    def __init__(self, ended: list[Span] | None = None) -> None:
        self.spans = NodeSpans(ended)
        self._cycles: defaultdict[CycleKey, _Cycle] = defaultdict(_Cycle)

    def take(self, entry: Entry, view: JobView) -> None:
        self.spans.take(entry, view)
        record = entry.record
        match record:
            case records.WorkersStarted() | records.NodeJoined():  # of every node, in every cycle
                return
            case records.Progress(step=step):
                cycle = self._cycles[record.replica, view.generation, record.cycle]
                if cycle.first is None or step < cycle.first:
                    cycle.first = step
                if cycle.last is None or step > cycle.last:
                    cycle.last = step
            case records.NodeReady():
                self._reached((record.replica, view.generation, record.cycle - 1), record.step)
            case records.WorkerFailed() | records.WorkerHung() | records.WorkersDone():
                self._reached((record.replica, view.generation, record.cycle), record.step)
            case records.NodeLost() | records.NodeLeft():
                replica = (
                    view.replicas.get(view.nodes[record.node].replica or "") if record.node in view.nodes else None
                )
                if replica is not None:
                    self._reached((replica.id, view.generation, replica.cycle), record.step)
            case records.RestartedInProcess():
                cycle = self._cycles[record.replica, view.generation, record.cycle]
                nodes = len(view.replicas[record.replica].nodes) if record.replica in view.replicas else 0
                # The record has one restart, the last; `times` is how many it stands for.
                cycle.in_process_us += round(record.restart.total_s * 1e6) * max(record.times, 0) * nodes

    def result(self, view: JobView, at: float | None = None) -> Goodput:
        """What it all comes to so far; `at`: the moment, of a job that goes on. More entries may follow."""
        for replica in view.replicas.values():  # what heartbeats have reported since
            self._reached((replica.id, view.generation, replica.cycle), replica.step)
        # A copy: more entries may follow, and the open spans are not over.
        spent = self.spans.spent_us.copy()
        for span in self.spans.pending(at):
            spent[span.kind, span.cycle] += span.until_us - span.since_us
        parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        for (kind, at_work), took in spent.items():
            if kind not in ("stepping", "unstepped"):
                parts[OF_KIND.get(kind, kind)] += took
            elif at_work is not None:
                self._cycles[at_work]  # the loop below reads its time
        cycles = self._cycles
        best: dict[str, int] = {}
        steps_new = steps_repeated = 0
        reports = {_role(key) for key, cycle in cycles.items() if cycle.first is not None}
        # By generation and cycle: which steps are new depends on all cycles before.
        for key, cycle in sorted(cycles.items(), key=lambda item: item[0][1:]):
            # Where other cycles of the role report steps, workers that have reported none were still starting.
            parts["startup" if _role(key) in reports else "unreported"] += spent["unstepped", key]
            stepping = spent["stepping", key]
            # The slowest rank's way, for every node: it may be more than the nodes have had.
            in_process = min(stepping, cycle.in_process_us)
            stepping -= in_process
            parts["in_process"] += in_process
            if cycle.first is None or cycle.last is None:
                parts["unreported"] += stepping
                continue
            # Steps are counted as if each took as long as the others of its cycle.
            made = cycle.last - cycle.first + 1
            # The first cycle repeats nothing, wherever the checkpoint that it was given begins.
            known = best.get(key[0], cycle.first - 1)
            again = min(max(min(cycle.last, known) - cycle.first + 1, 0), made)
            # In whole microseconds: what the division drops counts for new steps, and the parts still add up.
            repeated = stepping * again // made
            parts["repeated_steps"] += repeated
            parts["new_steps"] += stepping - repeated
            steps_new, steps_repeated = steps_new + made - again, steps_repeated + again
            best[key[0]] = max(known, cycle.last)
        total = sum(parts.values())
        judged = total - parts["unreported"]
        widths = {role.workers_per_node for role in view.plan.roles} if view.plan else set()
        return Goodput(
            total_us=total,
            parts_us=parts,
            ratio=parts["new_steps"] / judged if judged and reports else None,
            steps_new=steps_new,
            steps_repeated=steps_repeated,
            ranks_per_node=widths.pop() if len(widths) == 1 else None,
        )

    def _reached(self, key: CycleKey, step: int | None) -> None:
        cycle = self._cycles[key]
        if step is not None and cycle.first is not None:
            cycle.last = max(step, cycle.first) if cycle.last is None else max(cycle.last, step)


def _role(key: CycleKey) -> str:
    return key[0].rpartition("-")[0]
