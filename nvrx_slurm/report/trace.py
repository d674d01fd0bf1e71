"""A job as a trace for Perfetto and chrome://tracing: the JSON form of the Trace Event Format. Pure.

Each node is a process of the trace, with a track for itself and one for each rank; the job is a process of its own,
with a track for the cycles of each replica and counters. A flow goes from a failure by its decision to the recovery.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are microseconds since the first entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.model import CycleKey, JobView
from nvrx_slurm.report.recovery import in_order
from nvrx_slurm.report.spans import AT_WORK
from nvrx_slurm.util.sanitize import one_line

JOB_PID = 1
NODE_TID = 1
FIRST_RANK_TID = 100
# The first track of failures: those that overlap need several.
FAILURES_TID = 1 << 20

# The kind of a span → its slice, where that has another name.
NAMES: dict[str, str] = {
    "stepping": "steps",
    "unstepped": "runs",
    "starting": "start-up",
    "ready": "rendezvous",
    "detecting": "undetected",
    "deciding": "decision",
    "stopping": "teardown",
    "joining": "joins",
}

Event = dict[str, Any]


class WorkerStarts:
    """When each rank's worker started, and where. A subscriber of `JobFold`."""

    def __init__(self) -> None:
        self.started: dict[CycleKey, dict[int, tuple[str, float]]] = {}

    def take(self, entry: Entry, view: JobView) -> None:
        record = entry.record
        if isinstance(record, records.WorkersStarted):
            key = (record.replica, view.generation, record.cycle)
            ranks = self.started.setdefault(key, {})
            ranks.update((rank, (record.node, entry.t)) for rank in record.pids)


def trace(view: JobView, history: JobTimeline, workers: WorkerStarts, until: float) -> bytes:
    """The whole file. `history` has been finished; `until`: the last moment of the job, or now."""
    encoder = msgspec.json.Encoder()
    about = encoder.encode({"job": one_line(view.job), "name": one_line(view.name)})
    # One by one: a large job has half a million events, and as objects they would take a gigabyte.
    events = b",\n".join(map(encoder.encode, _events(view, history, workers, until)))
    data = b'{"displayTimeUnit":"ms","otherData":' + about + b',"traceEvents":[\n' + events + b"\n]}\n"
    return data.replace(b"##[", b"#\\u0023[")  # a runner of GitHub Actions would obey it


def _events(view: JobView, history: JobTimeline, workers: WorkerStarts, until: float) -> Iterator[Event]:
    began = round(min((at for at, _ in history.generations), default=until) * 1e6)

    def us(t: float) -> int:
        return max(0, round(t * 1e6) - began)

    nodes = list(dict.fromkeys([*(n for _, expected in history.generations for n in expected), *view.nodes]))
    pids = {node: JOB_PID + 1 + index for index, node in enumerate(nodes)}
    yield from _named(JOB_PID, 0, f"job {one_line(view.job)} ({one_line(view.name)})", {})
    replicas = list(dict.fromkeys(key[0] for key in view.cycles))
    for index, replica in enumerate(replicas):
        yield from _thread(JOB_PID, FIRST_RANK_TID + index, f"cycles of {one_line(replica)}", index)
    for index, node in enumerate(nodes):
        yield from _named(pids[node], index + 1, one_line(node), {NODE_TID: "node"})
    for span in history.spans:
        if span.node in pids:
            args: dict[str, object] = {}
            if span.cycle is not None:
                args = {"replica": one_line(span.cycle[0]), "generation": span.cycle[1], "cycle": span.cycle[2]}
            ts, dur = span.since_us - began, span.until_us - span.since_us
            yield _slice(pids[span.node], NODE_TID, NAMES.get(span.kind, span.kind), ts, dur, "node", **args)
    yield from _of_ranks(view, history, workers, pids, began, us, us(until))
    yield from _of_cycles(view, replicas, us, us(until))
    yield from _of_failures(view, history, pids, replicas, us)
    yield from _counters(view, history, began, us, us(until))


def _named(pid: int, order: int, name: str, threads: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}
    for tid, label in threads.items():
        yield from _thread(pid, tid, label, tid)


def _thread(pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _slice(pid: int, tid: int, name: str, ts: int, dur: int, category: str, **args: object) -> Event:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _of_ranks(
    view: JobView,
    history: JobTimeline,
    workers: WorkerStarts,
    pids: dict[str, int],
    began: int,
    us: Callable[[float], int],
    until: int,
) -> Iterator[Event]:
    """A slice for each worker, from its start to the end of its cycle on its node, its steps inside."""
    ends: dict[tuple[CycleKey, str], int] = {}
    for span in history.spans:
        if span.cycle is not None and span.kind in (*AT_WORK, "detecting", "deciding"):
            ends[span.cycle, span.node] = span.until_us - began
    known: set[tuple[int, int]] = set()
    for key, ranks in workers.started.items():
        cycle = view.cycles.get(key)
        for rank, (node, at) in ranks.items():
            if node not in pids:
                continue
            pid, tid, start = pids[node], FIRST_RANK_TID + rank, us(at)
            if (pid, tid) not in known:
                known.add((pid, tid))
                yield from _thread(pid, tid, f"{one_line(key[0])} rank {rank}", tid)
            end = ends.get((key, node), until)
            args = {"replica": one_line(key[0]), "rank": rank, "generation": key[1], "cycle": key[2]}
            yield _slice(pid, tid, f"cycle {key[2]}", start, max(0, end - start), "rank", **args)
            first = None if cycle is None or cycle.first_step_at is None else us(cycle.first_step_at)
            if cycle is not None and first is not None and start <= first < end:
                steps = {"first_step": cycle.first_step, "last_step": view.last_step(cycle)}
                yield _slice(pid, tid, "steps", first, end - first, "rank", **steps)


def _of_cycles(view: JobView, replicas: list[str], us: Callable[[float], int], until: int) -> Iterator[Event]:
    for key, cycle in view.cycles.items():
        tid, opened = FIRST_RANK_TID + replicas.index(key[0]), us(cycle.opened_at)
        ended = until if cycle.ended_at is None else us(cycle.ended_at)
        args = {
            "generation": cycle.generation,
            "world_size": cycle.world_size,
            "outcome": one_line(cycle.outcome or ""),
            "promoted": [one_line(node) for node in cycle.promoted],
        }
        yield _slice(JOB_PID, tid, f"cycle {cycle.cycle}", opened, max(0, ended - opened), "cycle", **args)
        found = view.recoveries.get(key)
        # What comes before the rendezvous opened is in the cycle before: a slice must lie within its parent.
        at = us(found.noticed_at) if found else 0
        for name, label, took in in_order(found) if found else ():
            end = at + round(took * 1e6)
            start = max(at, opened)
            if min(end, ended) > start:
                took_us = min(end, ended) - start
                yield _slice(JOB_PID, tid, one_line(label), start, took_us, "recovery", phase=one_line(name))
            at = end


def _of_failures(
    view: JobView, history: JobTimeline, pids: dict[str, int], replicas: list[str], us: Callable[[float], int]
) -> Iterator[Event]:
    """An instant and a slice for each failure; a flow from it to the decision, and on to the recovery."""
    ends: list[int] = []  # of each track of failures
    for number, failure in enumerate(history.failures, 1):
        at, cause = us(failure.at), failure.cause
        args = {
            "why": one_line(cause.why),
            "kind": one_line(cause.kind),
            "node": one_line(cause.node),
            "rank": cause.rank,
        }
        if failure.first_line:
            args["first_line"] = one_line(failure.first_line)
        if cause.node in pids:
            where = {"pid": pids[cause.node], "tid": NODE_TID, "ts": at}
            yield {"ph": "i", "s": "p", "name": one_line(cause.why), "cat": "failure", **where, "args": args}
        decided_at = None if failure.decided_at is None else us(failure.decided_at)
        until = at + 1 if decided_at is None else max(at + 1, decided_at)
        track = next((index for index, end in enumerate(ends) if end <= at), len(ends))
        if track == len(ends):
            yield from _thread(JOB_PID, FAILURES_TID + track, "failures", track)
        ends[track : track + 1] = [until + 1]  # the decision's slice too
        marks = FAILURES_TID + track
        yield _slice(JOB_PID, marks, "failure", at, until - at, "failure", **args, reports=1 + failure.more)
        flow = {"cat": "recovery", "name": "failure to recovery", "id": number}
        after = failure.recovery(view)
        if decided_at is None or after is None or failure.key is None or failure.decided is None:
            continue
        action = {
            "action": one_line(failure.decided.action),
            "by": one_line(failure.decided.by),
            "cause": one_line(failure.decided.cause),
        }
        yield _slice(JOB_PID, marks, "decision", until, 1, "failure", **action)
        yield {"ph": "s", "pid": JOB_PID, "tid": marks, "ts": at, **flow}
        yield {"ph": "t", "pid": JOB_PID, "tid": marks, "ts": until, **flow}
        tid = FIRST_RANK_TID + replicas.index(failure.key[0])
        cycle = view.cycles[after.replica, after.generation, after.cycle]
        # A flow ends within a slice: that of the cycle, which may have ended before all its workers ran.
        end = max(until, us(min(after.recovered_at, cycle.ended_at or after.recovered_at)))
        yield {"ph": "f", "bp": "e", "pid": JOB_PID, "tid": tid, "ts": end, **flow}


def _counters(
    view: JobView, history: JobTimeline, began: int, us: Callable[[float], int], until: int
) -> Iterator[Event]:
    """How many nodes are active and how many stand by; steps a second of each replica, one value a cycle."""
    changes: dict[int, list[int]] = {}
    for span in history.spans:
        index = 0 if span.kind in AT_WORK else 1 if span.kind == "standby" else None
        if index is not None:
            changes.setdefault(span.since_us - began, [0, 0])[index] += 1
            changes.setdefault(span.until_us - began, [0, 0])[index] -= 1
    active = standby = 0
    for ts, (by_active, by_standby) in sorted(changes.items()):
        active, standby = active + by_active, standby + by_standby
        counts = {"active": active, "standby": standby}
        yield {"ph": "C", "name": "nodes", "pid": JOB_PID, "tid": 0, "ts": ts, "args": counts}
    for key, cycle in view.cycles.items():
        if cycle.first_step_at is None or cycle.first_step is None:
            continue
        first = us(cycle.first_step_at)
        end = until if cycle.ended_at is None else us(cycle.ended_at)
        last = view.last_step(cycle)
        rate = 0.0 if last is None or end <= first else max(0, last - cycle.first_step) / ((end - first) / 1e6)
        name = f"steps/s of {one_line(key[0])}"
        yield {"ph": "C", "name": name, "pid": JOB_PID, "tid": 0, "ts": first, "args": {"steps/s": round(rate, 6)}}
        yield {"ph": "C", "name": name, "pid": JOB_PID, "tid": 0, "ts": end, "args": {"steps/s": 0.0}}
