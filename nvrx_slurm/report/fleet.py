"""Many jobs added up: mean times between failures and to repair, by cause and by node; what was lost, what verdicts
were worth. From journals alone.

A job that does not run is read once: its summary is kept in the user's cache, with the sizes and times of the
journal's files and the result, and the job is read again only when these change.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

import msgspec

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import UNREADABLE, MalformedRecord, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.goodput import PARTS, Goodput
from nvrx_slurm.report.hindsight import Hindsight, WouldBeStop, stops_of, sum_up
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.jobs import read_plan
from nvrx_slurm.report.journal_file import JournalFile
from nvrx_slurm.report.model import FailureKind, Value
from nvrx_slurm.report.recovery import PHASES, STARTUP
from nvrx_slurm.report.snapshot import ended_at, slurm_states
from nvrx_slurm.report.view import JobFold
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.files import journal_parts, write_private

# Of the summaries in the cache: one of another version is read again from the journal.
VERSION = 5


class FailureLine(Value, frozen=True, kw_only=True):
    """One failure. `repaired_s`: until all nodes had stepped again, or workers ran that report no step; None: they
    did not run again."""

    at: float
    kind: FailureKind
    node: str
    repaired_s: float | None = None


class JobSummary(Value, frozen=True, kw_only=True):
    """One job. `busy_us`: node → how long it worked; `phases`: of each recovery, in seconds; `blamed`: node → how
    often a verdict did. `stops`: those of dry runs; `acted`: how many others were acted on."""

    job: str
    name: str
    folder: str
    began: float
    ended: float
    exit_code: int | None
    goodput: Goodput
    failures: tuple[FailureLine, ...] = ()
    phases: tuple[dict[str, float], ...] = ()
    busy_us: dict[str, int] = msgspec.field(default_factory=dict)
    blamed: dict[str, int] = msgspec.field(default_factory=dict)
    stops: tuple[WouldBeStop, ...] = ()
    acted: int = 0


class Cached(Value, frozen=True, kw_only=True):
    """What a summary was made from: name, size, time and inode of each file of the journal, and of the result."""

    files: tuple[tuple[str, int, int, int], ...]
    summary: JobSummary | None


class Cache(Value, frozen=True, kw_only=True):
    version: int = VERSION
    jobs: dict[str, Cached] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Repair:
    """`count` failures; `between_node_s`: the nodes' time of each, on average; `repaired_s`: until steps were made
    again (or workers ran), the median and the mean; None where none was recovered from."""

    count: int
    between_node_s: float
    median_s: float | None
    mean_s: float | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of them. `by_phase`: the sorted seconds of each phase."""

    jobs: tuple[JobSummary, ...]
    goodput: Goodput
    everything: Repair
    by_kind: Mapping[str, Repair]
    by_node: Mapping[str, Repair]
    by_hour: tuple[int, ...]
    by_phase: Mapping[str, tuple[float, ...]]
    evidence: Mapping[str, int]
    verdicts: Hindsight


def read_fleet(folders: Iterable[JobFolder], *, since: float, clock: Clock | None = None) -> Fleet:
    """The jobs that were active since then, those that run up to now. Jobs that cannot be read are left out."""
    folders, now = list(folders), (clock or SystemClock()).wall()
    states = slurm_states(folder for folder in folders if not folder.has_end)
    path, known = cache_path(), Cache()
    # A cache that cannot be read, is of another version, or is torn: then all jobs are read again.
    with contextlib.suppress(OSError, MalformedRecord):
        cache = decode(lambda data: msgspec.msgpack.decode(data, type=Cache), path.read_bytes(), path.name)
        known = cache if cache.version == VERSION else known
    kept: dict[str, Cached] = {}
    found: list[JobSummary] = []
    for folder in folders:
        files = _files(folder)
        if not files:
            continue
        key = str(folder.path.absolute())
        if _runs(folder, states.get(folder.full_id)):
            # Its journal may be silent for hours, and its summary holds for this moment only.
            summary = summarise(folder, now)
        # Another job that was active since then has written its journal, or its result, since then.
        elif max(modified for _, _, modified, _ in files) < since * 1e9:
            continue
        elif (cached := known.jobs.get(key)) is not None and cached.files == files:
            summary = cached.summary
        else:
            summary = summarise(folder)
            kept[key] = Cached(files=files, summary=summary)
        if summary is not None and summary.ended >= since:
            found.append(summary)
    if kept:
        # Jobs of other folders, and older ones, stay.
        # Of folders that were removed, none: else the cache would only grow.
        there = {key: each for key, each in {**known.jobs, **kept}.items() if os.path.isdir(key)}
        with contextlib.suppress(OSError, NvrxError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, msgspec.msgpack.encode(Cache(jobs=there)))
    return add_up(found)


def _runs(folder: JobFolder, state: JobState | None) -> bool:
    """Whether the job is known to run: Slurm says so, or its batch host's process is on this machine."""
    # In doubt it does not: a job that died weeks ago without a result would count as running ever since.
    if state is not None:
        return not state.terminal and state is not JobState.UNKNOWN
    with contextlib.suppress(*UNREADABLE):
        return not folder.has_end and (info := folder.read_info()) is not None and info.host_lives()
    return False


def summarise(folder: JobFolder, now: float | None = None) -> JobSummary | None:
    """One job from its folder; None where its journal has no entry, or it cannot be read. `now`: it runs."""
    history = JobTimeline()
    try:
        plan, result = read_plan(folder), folder.read_result()
        fold = JobFold(plan, [history])
        for entry in JournalFile(folder).read():
            fold.take(entry)
    except UNREADABLE:
        return None
    view = fold.view
    if not view.n or view.started_at is None:
        return None
    until = ended_at(view, result) if now is None else now
    goodput = history.finish(view, until)
    busy: Counter[str] = Counter()
    for span in history.spans:
        if span.cycle is not None:
            busy[span.node] += span.until_us - span.since_us
    failures = []
    for failure in history.failures:
        after, kind, node = failure.recovery(view), failure.cause.kind, failure.cause.node
        repaired_s = None if after is None else after.took_s
        failures.append(FailureLine(at=failure.at, kind=kind, node=node, repaired_s=repaired_s))
    judged = [failure.judged for failure in history.failures if failure.judged is not None]
    return JobSummary(
        job=folder.job_id,
        name=view.name,
        folder=str(folder.path.absolute()),
        began=view.started_at,
        ended=max(view.t, until or 0.0),
        exit_code=view.exit_code if result is None else result.exit_code,
        goodput=goodput,
        failures=tuple(failures),
        phases=tuple(
            {**each.phases, **({STARTUP: each.startup_s} if each.startup_s is not None else {})}
            for each in view.recoveries.values()
        ),
        busy_us=dict(busy),
        blamed=dict(Counter(node for each in judged for node in each.blamed)),
        stops=stops_of(folder, history),
        acted=sum(each.acted and each.verdict == "STOP" for each in judged),
    )


def add_up(jobs: Iterable[JobSummary]) -> Fleet:
    """All jobs in one. Pure."""
    every = tuple(sorted(jobs, key=lambda job: job.began, reverse=True))
    failures = [failure for job in every for failure in job.failures if failure.kind != "user"]
    parts = {part: sum(job.goodput.parts_us.get(part, 0) for job in every) for part in PARTS}
    total = sum(job.goodput.total_us for job in every)
    # Of the other jobs nothing is known to be good or lost.
    judged = [job.goodput for job in every if job.goodput.ratio is not None]
    judged_us = sum(each.judged_us for each in judged)
    widths = {job.goodput.ranks_per_node for job in every}
    busy: Counter[str] = Counter()
    evidence: Counter[str] = Counter()
    for job in every:
        busy.update(job.busy_us)
        evidence.update(job.blamed)
    nodes: defaultdict[str, list[FailureLine]] = defaultdict(list)
    kinds: defaultdict[str, list[FailureLine]] = defaultdict(list)
    hours = [0] * 24
    for failure in failures:
        nodes[failure.node].append(failure)
        kinds[failure.kind].append(failure)
        hours[datetime.fromtimestamp(failure.at, UTC).hour] += 1
        if failure.kind.startswith("node"):
            evidence[failure.node] += 1
    busy_s = sum(busy.values()) / 1e6
    phases = {
        phase: tuple(sorted(each[phase] for job in every for each in job.phases if phase in each))
        for phase in (*PHASES, STARTUP)
    }
    return Fleet(
        jobs=every,
        goodput=Goodput(
            total_us=total,
            parts_us=parts,
            ratio=sum(each.parts_us["new_steps"] for each in judged) / judged_us if judged_us else None,
            steps_new=sum(job.goodput.steps_new for job in every),
            steps_repeated=sum(job.goodput.steps_repeated for job in every),
            ranks_per_node=widths.pop() if len(widths) == 1 else None,
        ),
        everything=_repair(failures, busy_s),
        by_kind={
            kind: _repair(found, busy_s) for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1]))
        },
        by_node={
            node: _repair(found, busy[node] / 1e6)
            for node, found in sorted(nodes.items(), key=lambda item: (-len(item[1]), item[0]))
        },
        by_hour=tuple(hours),
        by_phase={phase: values for phase, values in phases.items() if values},
        evidence=dict(evidence.most_common()),
        verdicts=sum_up(
            [stop for job in every for stop in job.stops],
            acted=sum(job.acted for job in every),
            failures=len(failures),
        ),
    )


def _repair(failures: list[FailureLine], node_s: float) -> Repair:
    known = [each.repaired_s for each in failures if each.repaired_s is not None]
    return Repair(
        count=len(failures),
        between_node_s=node_s / len(failures) if failures else node_s,
        median_s=median(known) if known else None,
        mean_s=fmean(known) if known else None,
    )


def cache_path() -> Path:
    """`~/.cache/nvrx-slurm/fleet.msgpack`, or below XDG_CACHE_HOME."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nvrx-slurm" / "fleet.msgpack"


def _files(folder: JobFolder) -> tuple[tuple[str, int, int, int], ...]:
    """What the journal's files, and the result, are now."""
    found = []
    for path in (*journal_parts(folder.events_path), folder.events_path, folder.path / "result.json"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)
