"""Each journal entry as one line. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import AnyRecord, Entry, entry_to_json
from nvrx_slurm.report.words import (
    at_step,
    event_name,
    isolation,
    names,
    numbers,
    plural,
    ranks_of,
    ranks_wait,
    seconds,
    slurm_state,
    worker_end,
    worker_hang,
)
from nvrx_slurm.util.sanitize import one_line

MOST_PHASES = 3


def describe(record: AnyRecord) -> str:
    """The record in one line, without its name: `n2: connection to its agent closed, at step 80`."""
    return SENTENCES[type(record)](record)


def _round(record: Any) -> str:
    return f"{record.replica} cycle {record.cycle}"


def _job_started(record: records.JobStarted) -> str:
    again = f", generation {record.generation}" if record.generation else ""
    expected = f"{plural(len(record.expected), 'node')} {names(record.expected)}"
    return f"{record.name} ({record.job}){again} on {expected}"


def _node_ready(record: records.NodeReady) -> str:
    took = f", tore down in {seconds(record.teardown_s)}" if record.teardown_s else ""
    return f"{record.node} for {_round(record)}{took}"


def _workers_started(record: records.WorkersStarted) -> str:
    pids = ", ".join(f"{rank}={pid}" for rank, pid in sorted(record.pids.items()))
    return f"{record.node} for {_round(record)}: rank=pid {pids}, in {seconds(record.spawn_s)}"


def _restarted_in_process(record: records.RestartedInProcess) -> str:
    restart = record.restart
    many = f", {record.times} restarts" if record.times > 1 else ""
    out = f", without {ranks_of(restart.missing)}" if restart.missing else ""
    # The phases that took longest, longest first.
    slowest = ", ".join(
        f"{phase.replace('_', ' ')} {seconds(took)}"
        for phase, took in sorted(restart.phases.items(), key=lambda phase: phase[1], reverse=True)[:MOST_PHASES]
    )
    took = f"{seconds(restart.total_s)} ({slowest})" if slowest else seconds(restart.total_s)
    where = f"{_round(record)}, iteration {restart.iteration}{many}: world size {restart.world_size}{out}"
    return f"{where}, in {took}: {restart.cause}"


def _node_left(record: records.NodeLeft) -> str:
    survivors = f"; survivors: {numbers(record.survivors)}" if record.survivors else ""
    return f"{record.node}: {record.reason}{survivors}"


def _worker_hung(record: records.WorkerHung) -> str:
    stacks = f"; stacks: {record.stacks}" if record.stacks else ""
    return f"{worker_hang(record)}, {_round(record)}{stacks}"


def _learned(record: records.Learned) -> str:
    seen = (f"{name} {seconds(longest)} at most of {count}" for name, (count, longest) in sorted(record.seen.items()))
    return f"{record.role} on {record.node}: {', '.join(seen) or 'nothing yet'}"


def _stacks_dumped(record: records.StacksDumped) -> str:
    written = f"stacks of {ranks_of(record.files)}" if record.files else "no stacks"
    is_named = record.request is None or record.request in record.why
    request = "" if is_named else f" (request {record.request})"
    parts = [f"{record.node}: {written}: {record.why}{request}", *_places(record.where), *record.problems]
    return "; ".join(parts)


def _places(where: dict[int, str]) -> list[str]:
    """`ranks 0-2 in train.py:41 in step`: ranks in the same line are one item."""
    by_place: dict[str, list[int]] = {}
    for rank, place in sorted(where.items()):
        by_place.setdefault(place, []).append(rank)
    return [f"{ranks_of(ranks)} in {place}" for place, ranks in by_place.items()]


def _dump_of(record: records.DumpAsked | records.DumpOrdered) -> str:
    whose = ranks_of(record.ranks) if record.ranks else "all ranks"
    return f"{whose} of {record.replica}" if record.replica else whose


def _node_lost(record: records.NodeLost) -> str:
    held = f"; {ranks_wait(record.safe_after_s)}" if record.safe_after_s else ""
    return f"{record.node}: {record.why}{at_step(record.step)}{held}"


def _stacks_first(record: records.RendezvousOpened | records.Shutdown) -> str:
    return f"; stacks are written down first: {record.dump}" if record.dump else ""


def _shutdown(record: records.Shutdown) -> str:
    saving = "; workers may save what they can first" if record.checkpoint else ""
    return f"exit code {record.exit_code}: {record.reason}{saving}{_stacks_first(record)}"


def _rendezvous_closed(record: records.RendezvousClosed) -> str:
    promoted = f", promoted {names(record.promoted)}" if record.promoted and record.cycle else ""
    world = f"{names(record.nodes)}, world size {record.world_size}"
    return f"{_round(record)}: {world}{promoted}; {record.active} active, {record.standby} standby"


def _whose(record: Any) -> str:
    """The rank or replica that failed."""
    return _round(record) if record.rank is None else f"rank {record.rank} of {_round(record)}"


def _attributed(record: records.Attributed) -> str:
    said = record.attribution
    fault = "" if said.fault == "unknown" else f" ({said.fault}, {said.confidence:.0%})"
    because = said.problem or said.explanation
    reason = f": {because}" if because else ""
    return f"{said.source} says {said.verdict}{fault} of {_whose(record)}, after {seconds(said.latency_s)}{reason}"


def _attribution_asked(record: records.AttributionAsked) -> str:
    waits = "; the rendezvous waits for them" if record.holds else ""
    return f"{names(record.sources)} about {_whose(record)} on {record.node}{waits}"


def _attribution_judged(record: records.AttributionJudged) -> str:
    waited = f", waited for {seconds(record.waited_s)}" if record.waited_s else ""
    blamed = f"; {names(record.blamed)} used only where no other node is left" if record.blamed else ""
    return f"{record.verdict} for {_whose(record)}{waited}: {record.why}{blamed}"


def _restart_decided(record: records.RestartDecided) -> str:
    left = f" ({plural(record.restarts_left, 'restart')} left)"
    by = "" if record.by == "policy" else f", by {record.by}"
    cause = f"{record.cause}{at_step(record.step, said=record.cause)}"
    return f"{record.action}{by} for {_round(record)}: {cause}{left}{backoff(record)}"


def backoff(record: records.RestartDecided) -> str:
    """`; waits 4.00 s before cycle 7: 4 cycles in a row failed soon after the start`; empty without a pause."""
    if not record.delay_s:
        return ""
    row = f"{plural(record.crashes, 'cycle')} in a row failed soon after the start"
    return f"; waits {seconds(record.delay_s)} before cycle {record.cycle + 1}: {row}"


def _recovered(record: records.Recovered) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds(took)}" for name, took in record.phases.items())
    return f"{_round(record)} in {seconds(record.total_s)} ({parts})"


def _job_ended(record: records.JobEnded) -> str:
    missing = f"; never answered: {names(record.missing)}" if record.missing else ""
    return f"exit code {record.exit_code}: {record.reason}{missing}"


SENTENCES: dict[type[Any], Callable[[Any], str]] = {
    records.JobStarted: _job_started,
    records.ControllerStarted: lambda r: f"epoch {r.epoch} on {r.host}, process {r.pid}",
    records.NodeJoined: lambda r: f"{r.node} at {r.addr}",
    records.NodeReady: _node_ready,
    records.WorkersStarted: _workers_started,
    records.Progress: lambda r: f"{r.node} rank {r.rank} of {_round(r)} reported its first step, {r.step}",
    records.RestartedInProcess: _restarted_in_process,
    records.WorkerFailed: lambda r: f"{worker_end(r)}, {_round(r)}{at_step(r.step)}",
    records.WorkerHung: _worker_hung,
    records.NodeIsolated: lambda r: f"{isolation(r)}, {_round(r)}",
    records.Learned: _learned,
    records.StacksDumped: _stacks_dumped,
    records.WorkersDone: lambda r: f"{r.node} for {_round(r)}{at_step(r.step)}",
    records.NodeLeft: _node_left,
    records.NodeLost: _node_lost,
    records.NodeFenced: lambda r: f"{r.node}'s workers are proven dead: {r.proof}",
    records.SlurmNodeState: lambda r: f"Slurm says of {r.node}: {slurm_state(r)}",
    records.DumpAsked: lambda r: f"{r.by} asks for stacks of {_dump_of(r)} (request {r.request})",
    records.Signalled: lambda r: r.reason.replace("_", " "),
    records.Attributed: _attributed,
    records.AttributionAsked: _attribution_asked,
    records.AttributionJudged: _attribution_judged,
    records.RecordsRefused: lambda r: f"{plural(r.count, 'record')} in {r.stream} set aside: {r.why}",
    records.Tick: lambda r: "a deadline passed",
    records.RendezvousOpened: lambda r: f"{_round(r)}{_stacks_first(r)}",
    records.RendezvousClosed: _rendezvous_closed,
    records.RestartDecided: _restart_decided,
    records.Recovered: _recovered,
    records.ReplicaEnded: lambda r: f"{_round(r)}: {r.outcome}",
    records.Shutdown: _shutdown,
    records.JobEnded: _job_ended,
    records.Fence: lambda r: f"{r.node} (agent {r.incarnation}) must kill its workers and join again",
    records.Quarantined: lambda r: f"{r.node}: {r.reason}; it gets no ranks any more",
    records.DumpOrdered: lambda r: f"{_dump_of(r)} (request {r.request})",
}
"""Kind of record → its sentence."""


NAME_WIDTH = 20
TIME_WIDTH = 12


class Lines:
    """Turns entries into lines. Times count from the first entry given: pass the journal from its start."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def in_words(self, entry: Entry) -> str:
        """`+4.953s      node_lost            n2: connection to its agent closed, at step 80`."""
        if self._begin is None:
            self._begin = entry.t
        time = f"+{entry.t - self._begin:.3f}s"
        return f"{time:<{TIME_WIDTH}} {event_name(entry.record):<{NAME_WIDTH}} {one_line(describe(entry.record))}"

    def as_json(self, entry: Entry) -> str:
        """The line as `events.jsonl` has it."""
        return entry_to_json(entry).decode()
