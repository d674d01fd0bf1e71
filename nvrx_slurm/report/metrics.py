"""A job as metrics, by the conventions of OpenMetrics; docs/observability.md lists them.

Every value comes from the journal, and from heartbeats while the job runs. Nothing is counted twice when a reader
starts again: the counters are those of the journal. Labels are a few words each: a job's id, a state, a cause, a
phase. No label holds a rank, a node, a path, an argument or a message.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report import ranks
from nvrx_slurm.report.goodput import PARTS
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.model import FailureKind, NodeState
from nvrx_slurm.report.recovery import PHASES, STARTUP
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.util.sanitize import one_line

# Of a job: `jobs.state_of`.
STATES = (
    "pending", "starting", "joining", "running", "recovering", "stopping", "completed", "failed", "cancelled",
    "timeout", "lost", "stopped", "died",
)  # fmt: skip

BUCKETS_S = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

# The values of the labels, in order → the value.
Values = Mapping[Any, float]

Reading = tuple[Snapshot, JobTimeline]
_Family = TypeVar("_Family", bound=GaugeMetricFamily | CounterMetricFamily)


class JobCollector(Collector):
    """What prometheus-client asks: the metrics of jobs. `read` is called for each scrape; two scrapes at once wait
    for each other."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read
        self._one_at_a_time = threading.Lock()

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        # The server answers each scrape in a thread of its own, and a reader of a journal is for one thread.
        with self._one_at_a_time:
            # Every job has the same families: one exposition may name each of them once.
            for family in (family for shot, history in self._read() for family in _families(shot, history)):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return list(families.values())


def label(text: str) -> str:
    """A name as the value of a label: of one line, and nothing that a runner of GitHub Actions obeys."""
    return one_line(text).replace("##[", "# #[")


def registry_of(read: Callable[[], Iterable[Reading]]) -> CollectorRegistry:
    """A registry of what `read` finds at each exposition."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(read))
    return registry


def _families(shot: Snapshot, history: JobTimeline) -> Iterator[Metric]:
    view, job = shot.view, label(shot.folder.job_id)
    goodput = history.goodput(view, shot.until)

    def fill(family: _Family, values: Values) -> _Family:
        for key, value in values.items():
            family.add_metric((job, *key), value)
        return family

    def gauge(name: str, about: str, values: Values, *labels: str) -> GaugeMetricFamily:
        return fill(GaugeMetricFamily(f"nvrx_{name}", about, labels=("job_id", *labels)), values)

    def counter(name: str, about: str, values: Values, *labels: str) -> CounterMetricFamily:
        return fill(CounterMetricFamily(f"nvrx_{name}", about, labels=("job_id", *labels)), values)

    info = InfoMetricFamily("nvrx_job", "The job's name, and where it runs.", labels=("job_id",))
    info.add_metric((job,), {"name": label(view.name), "cluster": label(shot.info.cluster) if shot.info else ""})
    yield info
    yield gauge(
        "job_state", "1 for the state that the job is in.", {(each,): each == shot.state for each in STATES}, "state"
    )
    if shot.started_at is not None:
        yield gauge("job_start_time_seconds", "When the job started, since the epoch.", {(): shot.started_at})
    yield gauge("job_generation", "How often the job was requeued.", {(): view.generation})
    if shot.exit_code is not None:
        yield gauge("job_exit_code", "How the job ended.", {(): shot.exit_code})

    if goodput.ratio is not None:
        about = "Share of the nodes' time that made new steps, without workers that report none."
        yield gauge("job_goodput_ratio", about, {(): goodput.ratio})
    spent = {(part,): goodput.parts_us[part] / 1e6 for part in PARTS}
    # A gauge: what seemed to be new steps turns out to be detection once a failure is noticed.
    yield gauge("job_node_seconds", "Time of the job's nodes by what it was spent on.", spent, "part")
    steps = {("new",): goodput.steps_new, ("repeated",): goodput.steps_repeated}
    yield counter(
        "job_steps", "Steps made, of all replicas, by whether an earlier cycle had made them.", steps, "kind"
    )

    # Every state, cause and verdict has its series, at 0 too: a series that begins with its first event has no rate.
    states = Counter(node.state for node in view.nodes.values())
    of_states: Values = {(each,): states[each] for each in get_args(NodeState)}
    yield gauge("nodes", "Nodes of the allocation by state.", of_states, "state")
    reached: dict[tuple[str], float] = {}
    for replica in view.replicas.values():
        if replica.step is not None:
            reached[(label(replica.role),)] = max(replica.step, reached.get((label(replica.role),), 0))
    yield gauge("step", "The last step that a rank of the role has reported.", reached, "role")
    yield gauge("cycle", "The highest cycle of a replica.", {(): view.cycle})

    # Until it is settled, another cause may be found: then the counter of the first one would go down.
    causes = Counter(failure.cause.kind for failure in history.failures if failure.is_settled(view))
    kinds = get_args(FailureKind)
    yield counter("failures", "Failures by cause.", {(kind,): causes[kind] for kind in kinds}, "cause")
    recovered = Counter(each.kind for each in view.recoveries.values())
    yield counter(
        "recoveries", "Recoveries by the cause of the failure.", {(k,): recovered[k] for k in kinds}, "cause"
    )
    # A job that had no recovery has empty distributions, so that rates begin at zero.
    took: dict[str, list[float]] = {phase: [] for phase in (*PHASES, STARTUP)}
    whole_s: list[float] = []
    for key, each in view.recoveries.items():
        for phase, took_s in each.phases.items():
            if phase in took:
                took[phase].append(took_s)
        # Until the last node has stepped these grow with each node, and a bucket must not go down. A cycle that has
        # ended, or is of an older version's controller, may have no last node.
        is_final = each.last_to_step is not None or view.cycles[key].ended_at is not None
        if is_final and each.startup_s is not None and each.to_first_step_s is not None:
            took[STARTUP].append(each.startup_s)
            whole_s.append(each.to_first_step_s)
    by_phase = HistogramMetricFamily("nvrx_recovery_seconds", "Recoveries by phase.", labels=("job_id", "phase"))
    for phase, values in took.items():
        _observe(by_phase, (job, phase), values)
    yield by_phase
    whole = HistogramMetricFamily(
        "nvrx_recovery_whole_seconds", "From a failure to the first step of all nodes.", labels=("job_id",)
    )
    _observe(whole, (job,), whole_s)
    yield whole
    yield counter("restarts", "Restarts that a failure led to.", {(): view.restarts})
    yield counter("restarts_in_process", "Restarts inside the processes.", {(): view.restarts_in_process})
    if (left := view.restarts_left(shot.moment)) is not None:
        yield gauge("restarts_left", "Restarts that the budget for failed workers still allows.", {(): left})
    verdicts = Counter(
        (str(each.verdict), "yes" if each.judged.acted else "no")
        for each in history.failures
        if each.judged is not None and each.verdict is not None
    )
    of_verdicts: Values = {
        (verdict, acted): verdicts[verdict, acted] for verdict in Verdict for acted in ("yes", "no")
    }
    yield counter("verdicts", "Verdicts of attribution, by whether they decided.", of_verdicts, "verdict", "acted")
    yield counter("journal_entries", "Entries of the journal.", {(): view.n})

    # The rest is known while the job runs.
    ages = [age for node in view.present if (age := ranks.beat_age_s(view, node, shot.store_now)) is not None]
    if ages:
        yield gauge(
            "heartbeat_age_max_seconds", "Age of the oldest of the present nodes' last heartbeats.", {(): max(ages)}
        )
        median = statistics.median(ages)
        yield gauge(
            "heartbeat_age_median_seconds", "Half of the present nodes' last heartbeats are younger.", {(): median}
        )
    every = ranks.ranks(view, shot.store_now) if view.heard else ()
    if lags := [rank.lag for rank in every if rank.lag is not None]:
        yield gauge("rank_lag_max_steps", "How many steps the slowest rank is behind the fastest.", {(): max(lags)})
    if quiet := [rank.quiet_s for rank in every if rank.quiet_s is not None]:
        yield gauge("rank_quiet_max_seconds", "How long ago the quietest rank made progress.", {(): max(quiet)})


def _observe(family: HistogramMetricFamily, labels: tuple[str, ...], values: list[float]) -> None:
    buckets = [(str(bound), float(sum(value <= bound for value in values))) for bound in BUCKETS_S]
    family.add_metric(labels, [*buckets, ("+Inf", float(len(values)))], sum(values))
