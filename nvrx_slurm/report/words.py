"""Journal entries, durations and lists of names, in words. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import msgspec

from nvrx_slurm import records
from nvrx_slurm.records import AnyRecord


def describe(record: AnyRecord) -> str:
    """What the record says, in one line without its name: `n2: tether lost, at step 80`."""
    return _WORDS[type(record)](record)


def event_name(record: AnyRecord | type[msgspec.Struct]) -> str:
    """The name in the journal of a record, or of its kind: `node_lost`."""
    return str(record.__struct_config__.tag)


def seconds(duration_s: float) -> str:
    """`312 ms`, `4.21 s`, `42.1 s`, `4m 10s`, `3h 04m`, `2d 03h`: three digits that matter, never a bare number."""
    if duration_s < 0.0995:
        return f"{duration_s * 1000:.1f} ms"
    if duration_s < 0.9995:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 59.95:
        return f"{duration_s:.{2 if duration_s < 9.995 else 1}f} s"
    whole = round(duration_s)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def names(nodes: Iterable[str]) -> str:
    """Node names as Slurm folds them, where that is shorter: `n[0-3,5]`; nothing is `-`."""
    folded = [_fold_group(prefix, list(group)) for prefix, group in groupby(map(_split, nodes), key=lambda p: p[0])]
    return ",".join(folded) or "-"


def numbers(values: Iterable[int]) -> str:
    """Ranks as ranges: `0-3,6`; nothing is `-`."""
    return ",".join(_ranges([str(value) for value in sorted(values)])) or "-"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` for one that has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def at_step(step: int | None) -> str:
    """`, at step 80`, or nothing."""
    return "" if step is None else f", at step {step}"


def worker_end(record: records.WorkerFailed) -> str:
    """How a worker ended: `rank 3 on n2 was killed by SIGKILL`."""
    who = f"rank {record.rank} on {record.node}"
    if record.error is not None:
        return f"{who} could not start: {record.error}"
    if record.signal is not None:
        return f"{who} was killed by {signal_name(record.signal)}"
    return f"{who} exited with code {record.exit_code}"


def node_loss(record: records.NodeLost) -> str:
    """How a node was lost: `n2 lost: tether lost`."""
    return f"{record.node} lost: {record.cause.replace('_', ' ')}"


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ------------------------------------------------------------------------------------------- folding


def _split(name: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?)(\d*)", name)
    assert match is not None  # every string matches
    return match[1], match[2]


def _fold_group(prefix: str, group: list[tuple[str, str]]) -> str:
    digits = [number for _, number in group]
    if len(digits) == 1:
        return prefix + digits[0]
    if "" in digits:
        return ",".join(prefix + number for number in digits)
    return f"{prefix}[{','.join(_ranges(digits))}]"


def _ranges(digits: list[str]) -> list[str]:
    """Runs of consecutive numbers of the same width, in the order given."""
    runs: list[list[str]] = []
    for number in digits:
        if runs and int(number) == int(runs[-1][-1]) + 1 and _same_width(number, runs[-1][-1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _same_width(number: str, other: str) -> bool:
    padded = number.startswith("0") or other.startswith("0")
    return not padded or len(number) == len(other)


# ------------------------------------------------------------------------------------------- records


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


def _node_left(record: records.NodeLeft) -> str:
    survivors = f"; survivors: {numbers(record.survivors)}" if record.survivors else ""
    return f"{record.node}: {record.reason}{survivors}"


def _round_closed(record: records.RoundClosed) -> str:
    promoted = f", promoted {names(record.promoted)}" if record.promoted and record.cycle else ""
    world = f"{names(record.nodes)}, world size {record.world_size}"
    return f"{_round(record)}: {world}{promoted}; {record.active} active, {record.standby} standby"


def _restart_decided(record: records.RestartDecided) -> str:
    left = f" ({plural(record.restarts_left, 'restart')} left)"
    return f"{record.action} for {_round(record)}: {record.cause}{at_step(record.step)}{left}"


def _recovered(record: records.Recovered) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds(took)}" for name, took in record.phases.items())
    return f"{_round(record)} in {seconds(record.total_s)} ({parts})"


def _job_ended(record: records.JobEnded) -> str:
    missing = f"; never answered: {names(record.missing)}" if record.missing else ""
    return f"exit code {record.exit_code}: {record.reason}{missing}"


_WORDS: dict[type[Any], Callable[[Any], str]] = {
    records.JobStarted: _job_started,
    records.ControllerStarted: lambda r: f"epoch {r.epoch} on {r.host}, process {r.pid}",
    records.NodeJoined: lambda r: f"{r.node} at {r.addr}",
    records.NodeReady: _node_ready,
    records.WorkersStarted: _workers_started,
    records.Progress: lambda r: f"{r.node} rank {r.rank} of {_round(r)} told its first step, {r.step}",
    records.WorkerFailed: lambda r: f"{worker_end(r)}, {_round(r)}{at_step(r.step)}",
    records.WorkersDone: lambda r: f"{r.node} for {_round(r)}{at_step(r.step)}",
    records.NodeLeft: _node_left,
    records.NodeLost: lambda r: f"{r.node}: {r.cause.replace('_', ' ')}{at_step(r.step)}",
    records.Signalled: lambda r: r.reason.replace("_", " "),
    records.Tick: lambda r: "a deadline passed",
    records.RoundOpened: _round,
    records.RoundClosed: _round_closed,
    records.RestartDecided: _restart_decided,
    records.Recovered: _recovered,
    records.ReplicaEnded: lambda r: f"{_round(r)}: {r.outcome}",
    records.Shutdown: lambda r: f"exit code {r.exit_code}: {r.reason}",
    records.JobEnded: _job_ended,
    records.Fence: lambda r: f"{r.node} (agent {r.incarnation}) must kill its workers and join anew",
}
