"""The trace of a job, checked strictly against the Trace Event Format."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest

from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.trace import WorkerStarts, trace
from nvrx_slurm.report.view import JobFold
from tests.jobs import eventful
from tests.unit.report.recorder import Recorder, ended, to_first_cycle, with_one_recovery
from tests.unit.report.test_goodput import wandering

REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def traced(recorder: Recorder) -> list[dict[str, Any]]:
    return of(recorder.entries)


def of(entries: list[Any]) -> list[dict[str, Any]]:
    history, workers = JobTimeline(), WorkerStarts()
    fold = JobFold(None, [history, workers])
    for entry in entries:
        fold.take(entry)
    history.finish(fold.view)
    return msgspec.json.decode(trace(fold.view, history, workers, fold.view.t))["traceEvents"]


def check(events: list[dict[str, Any]]) -> None:
    """Each event has the fields of its phase, and no negative time; slices of a track nest; each flow begins, and
    ends in a slice; each track has a name."""
    tracks, flows = defaultdict(list), defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert set(event) - {"ph"} == REQUIRED[event["ph"]], event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, event
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert set(tracks) <= named
    for track, slices in tracks.items():
        open_until: list[int] = []
        for ts, minus, name in sorted(slices, key=lambda each: each[:2]):
            while open_until and open_until[-1] <= ts:
                open_until.pop()
            assert not open_until or ts - minus <= open_until[-1], (track, name, ts)
            open_until.append(ts - minus)
    for steps in flows.values():
        assert [each["ph"] for each in steps] == ["s", "t", "f"]
        assert steps[0]["ts"] <= steps[1]["ts"] <= steps[2]["ts"]
        for step in steps:
            inside = tracks[step["pid"], step["tid"]]
            assert any(ts <= step["ts"] <= ts - minus for ts, minus, _ in inside), step


@pytest.mark.parametrize("recorder", [to_first_cycle, with_one_recovery, ended, eventful])
def test_a_trace_keeps_to_the_format(recorder) -> None:
    check(traced(recorder()))


def test_any_history_gives_a_trace_that_keeps_to_the_format() -> None:
    """It is checked for 300 drawn histories."""
    for seed in range(300):
        check(of(wandering(seed)))


def test_nodes_and_ranks_have_tracks_with_what_they_did() -> None:
    """n4 was standby, started up and made steps; its rank 4 has a slice for its cycle, with the steps inside."""
    events = traced(eventful())
    [pid] = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "n4"]
    did = [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, 1)]
    assert did[:4] == ["joins", "standby", "start-up", "steps"]
    [tid] = {
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == "main-0 rank 4" and e["pid"] == pid
    }
    of_rank = [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
    assert of_rank == ["cycle 1", "steps", "cycle 2", "steps", "cycle 3", "steps"]


def test_flows_go_from_each_failure_to_its_recovery() -> None:
    """Three failures give three flows; nodes and steps have counters."""
    events = traced(eventful())
    assert [e["id"] for e in events if e["ph"] == "f"] == [1, 2, 3]
    nodes = [e["args"]["active"] for e in events if e["ph"] == "C" and e["name"] == "nodes"]
    assert max(nodes) == 4 and nodes[-1] == 0
    rates = [e["args"]["steps/s"] for e in events if e["ph"] == "C" and e["name"] == "steps/s of main-0"]
    assert rates[0] == pytest.approx((83 - 1) / 60.0, rel=0.01)
