"""A snapshot as facts and tables of text, for the plain page and the coloured one alike. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from nvrx_slurm.report import recovery
from nvrx_slurm.report.model import JobView, ReplicaView
from nvrx_slurm.report.ranks import ranks as all_ranks
from nvrx_slurm.report.ranks import worst
from nvrx_slurm.report.snapshot import JobLine, NodeStatus, Snapshot, node_status
from nvrx_slurm.report.tables import Mood, Row, Table, mood, number
from nvrx_slurm.report.words import (
    at_step,
    names,
    numbers,
    others_lost_it,
    plural,
    ranks_of,
    ranks_wait,
    seconds,
    spares_of,
)
from nvrx_slurm.util.durations import words


def facts(shot: Snapshot) -> list[Row]:
    """Label and text: what a reader looks for first."""
    view = shot.view
    cluster = f" on {shot.info.cluster}" if shot.info else ""
    generation = f", generation {view.generation}" if view.generation else ""
    cycle = str(view.cycle)
    if len(view.replicas) > 1:
        cycle = ", ".join(f"{replica.id} {replica.cycle}" for replica in view.replicas.values())
    spares = spares_of(len(view.spares), view.plan.spares if view.plan else None)
    # The spares leave with the job: "0 left" at its end would read as if they had been lost.
    spares += " left" if view.unused_spares is None else " not used"
    left = view.restarts_left(shot.moment)
    asked = f"; {view.restarts_asked} more for users" if view.restarts_asked else ""
    rows = [
        ("job", f"{shot.folder.job_id} ({view.name or '-'}){cluster}", "plain"),
        ("state", _state(shot), mood(shot.state)),
        *_in_slurm(shot),
        ("step", number(view.step), "plain"),
        ("cycle", cycle + generation, "plain"),
        ("spares", spares + (f": {names(view.spares)}" if view.spares else ""), "plain"),
        ("restarts", f"{view.restarts}{'' if left is None else f', {left} left for failed workers'}{asked}", "plain"),
    ]
    if last := view.last_in_process:
        count = plural(view.restarts_in_process, "restart")
        text = f"{count}; the last in {seconds(last.total_s)}, {_when(shot, last.at)}: {last.cause}"
        rows.append(("in process", text, "plain"))
    failure, text = view.last_failure, "none"
    if failure is not None:
        where = f", {failure.replica} cycle {failure.cycle}" if failure.replica else ", a hot spare"
        stacks = f"; stacks: {shot.folder.path / failure.stacks}" if failure.stacks else ""
        key = failure.replica or "", view.generation, (failure.cycle or 0) + 1
        # One failure, one step: the last that any rank had reported, once all nodes have said so.
        steps = recovery.steps(view.recoveries[key]) if key in view.recoveries else ""
        at = f", {steps}" if steps else at_step(failure.step, said=failure.why)
        at += f", {_when(shot, failure.at)}"
        followed = f"; {others}" if (others := others_lost_it(failure.peers_lost)) else ""
        text = f"{failure.why}{where}{at}{followed}{stacks}"
    rows.append(("failure", text, "bad" if failure else "plain"))
    if view.recoveries:
        rows.append(("recovery", recovery.describe(list(view.recoveries.values())[-1]), "plain"))
    rows += _prewarm(view)
    rows.append(("decision", view.last_decision.what if view.last_decision else "none", "plain"))
    if view.last_verdict:
        rows.append(("verdict", f"{view.last_verdict.what}; nothing followed from it", "dim"))
    if dumped := view.last_stacks:
        first = shot.folder.path / next(iter(dumped.files.values()))
        rows.append(("stacks", f"{first} ({ranks_of(dumped.files)} on {dumped.node}): {dumped.why}", "plain"))
    rows.append(("logs", str(shot.folder.path / "logs"), "dim"))
    if shot.store_error:
        rows += [("note", text, "bad") for text in _out_of_touch(shot, shot.store_error)]
    return [Row((label, text), mood=kind) for label, text, kind in rows]


def _out_of_touch(shot: Snapshot, store_error: str) -> Iterator[str]:
    yield f"{store_error}; what follows is from the job folder"
    info, plan = shot.info, shot.view.plan
    if info is not None and plan is not None and info.cluster == "slurm" and info.allocation is None:
        after = words(plan.fault_tolerance.control_plane_grace)
        yield f"if the batch host, {info.host}, is lost, agents stop the workers {after} later, and requeue the job"


def _prewarm(view: JobView) -> list[tuple[str, str, Mood]]:
    """Where warm processes wait, and why workers start cold on other nodes; a row for each role."""
    rows: list[tuple[str, str, Mood]] = []
    here = [view.nodes[name] for name in view.present]
    for role in sorted({role for node in here for role in node.prewarm}):
        by_reason: dict[str | None, list[str]] = {}
        for node in here:
            if role in node.prewarm:
                by_reason.setdefault(node.prewarm[role], []).append(node.name)
        warm = by_reason.pop(None, [])
        parts = [f"a warm process on {names(warm)}"] if warm else []
        parts += [f"cold on {names(nodes)}: {why}" for why, nodes in by_reason.items()]
        rows.append((f"prewarm {role}" if len(view.replicas) > 1 else "prewarm", "; ".join(parts), "plain"))
    return rows


def _in_slurm(shot: Snapshot) -> list[tuple[str, str, Mood]]:
    """What Slurm says, where the state of the job alone would mislead."""
    if shot.slurm_state == "SUSPENDED":
        return [("slurm", "the job is suspended: all its processes stand still", "bad")]
    if shot.exit_code is None or shot.slurm_state is None or shot.folder.read_result() is None:
        return []
    waits = "in its queue again" if shot.slurm_state in ("PENDING", "REQUEUED") else "still completing"
    return [("slurm", f"the job has ended; Slurm has it {waits} ({shot.slurm_state})", "dim")]


def replicas(view: JobView) -> Table:
    rows = []
    for each in view.replicas.values():
        waits = waits_for(view, each).removeprefix("waits for ") or "-"
        size = number(each.world_size or None)
        cells = (each.id, each.phase, str(each.cycle), str(len(each.nodes)), size, number(each.step), waits)
        rows.append(Row(cells, mood(each.phase)))
    columns = ("REPLICA", "PHASE", "CYCLE", "NODES", "RANKS", "STEP", "WAITS FOR")
    return Table(columns, tuple(rows), frozenset({"CYCLE", "NODES", "RANKS", "STEP"}))


def recoveries(view: JobView) -> Table:
    """Each recovery's phases, their total, the user's own start-up, and the way from the death to the first step."""
    shown = view.recoveries.values()
    earlier = any("earlier_attempts" in each.phases for each in shown)
    phases = [name for name in recovery.PHASES if earlier or name != "earlier_attempts"]
    columns = ["REPLICA", "CYCLE", *(recovery.PHASES[name].upper() for name in phases)]
    columns += ["TOTAL", "STARTUP", "TO FIRST STEP", "FAILED AT", "RESUMED FROM", "LOST", "CAUSE"]
    rows = []
    for each in shown:
        took = [*(each.phases.get(name) for name in phases), each.total_s, each.startup_s, each.to_first_step_s]
        promoted = f" → {names(each.promoted)}" if each.promoted else ""
        counts = map(number, (each.step_before, each.first_step, each.steps_lost))
        rows.append(Row((each.replica, str(each.cycle), *map(_duration, took), *counts, f"{each.why}{promoted}")))
    return Table(tuple(columns), tuple(rows), frozenset(columns[1:-1]))


def cycles(view: JobView, now: float) -> Table:
    """The cycles and their outcomes."""
    rows = []
    for each in view.cycles.values():
        shown = f"{each.generation}.{each.cycle}" if view.generation else str(each.cycle)
        closed, ran = _between(each.opened_at, each.closed_at), _between(each.started_at, each.ended_at or now)
        opened = f"+{each.opened_at - (view.started_at or 0.0):.3f}s"
        size = number(each.world_size or None)
        cells = (each.replica, shown, opened, closed, ran, size, names(each.nodes), each.outcome or "-")
        kind: Mood = "good" if each.outcome == "done" else "plain"
        if each.ended_at is None:
            kind = "good" if each.started_at else "busy"
        rows.append(Row(cells, kind))
    columns = ("REPLICA", "CYCLE", "OPENED", "RENDEZVOUS", "RAN", "RANKS", "NODES", "ENDED")
    return Table(columns, tuple(rows), frozenset({"CYCLE", "OPENED", "RENDEZVOUS", "RAN", "RANKS"}))


def array_facts(shot: Snapshot) -> list[Row]:
    """What there is to say of a whole job array, beside its tasks."""
    return [row for row in facts(shot) if row.cells[0] in ("job", "state", "slurm")]


def job_table(lines: Sequence[JobLine]) -> Table:
    """All jobs of a folder."""
    rows = []
    for line in lines:
        cells = (line.job, line.name or "-", line.cluster or "-", line.state, line.nodes)
        counts = (number(line.cycle), str(line.restarts), number(line.step), _duration(line.age_s))
        rows.append(Row((*cells, *counts), mood(line.state)))
    columns = ("JOB", "NAME", "CLUSTER", "STATE", "NODES", "CYCLE", "RESTARTS", "STEP", "AGE")
    return Table(columns, tuple(rows), frozenset(columns[4:]))


def my_job_table(lines: Sequence[JobLine]) -> Table:
    """A user's jobs, of all folders."""
    rows = []
    for line in lines:
        cells = (line.job, line.state, line.name or "-", line.cluster or "-", line.nodes)
        counts = (number(line.step), str(line.restarts), _duration(line.age_s))
        rows.append(Row((*cells, *counts, line.pending or "-", str(Path(line.folder).parent)), mood(line.state)))
    columns = ("JOB", "STATE", "NAME", "CLUSTER", "NODES", "STEP", "RESTARTS", "AGE", "WAITS FOR", "FOLDER")
    return Table(columns, tuple(rows), frozenset(columns[4:8]))


def waiting(view: JobView) -> str | None:
    """What the job waits for, in one sentence; None: nothing."""
    said = [f"{replica.id} {what}" for replica in view.replicas.values() if (what := waits_for(view, replica))]
    return "; ".join(said) or None


def waits_for(view: JobView, replica: ReplicaView) -> str:
    """What keeps the replica in its phase: `n2, n3 to join`; empty: nothing."""
    waiting_for = view.waits_for(replica.id)
    if waiting_for:
        return f"waits for {names(waiting_for)} {_UNTIL.get(replica.phase, 'to answer')}"
    if replica.phase == "joining" and (unproven := view.unproven(replica.id)):
        return f"waits for proof of the death of {names(unproven)}"
    return "waits for another node" if replica.phase == "joining" else ""


_UNTIL = {
    "joining": "to join",
    "starting": "to start workers",
    "stopping": "to end old workers",
}


def tally(view: JobView) -> str:
    """`4 active, 1 standby, 1 lost`: every node counted once."""
    states = ("joining", "ready", "active", "standby", "quarantined", "drained", "lost", "left")
    counts = {state: sum(node.state == state for node in view.nodes.values()) for state in states}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "0 nodes"


def nodes(shot: Snapshot, only: Collection[str] | None = None) -> Table:
    """Every node, or only those named."""
    rows = []
    for each in shot.view.nodes.values():
        if only is not None and each.name not in only:
            continue
        node = node_status(shot.view, each, shot.store_now)
        standing = seconds(max(0.0, shot.moment - node.since)) if node.since else "-"
        replica = node.replica if node.state in ("active", "ready") else None
        cells = (node.name, node.state, replica or "-", numbers(node.ranks), number(node.step), standing)
        rows.append(Row((*cells, _duration(node.beat_age_s), _note(node, shot.moment)), mood(node.state)))
    columns = ("NODE", "STATE", "REPLICA", "RANKS", "STEP", "FOR", "BEAT", "NOTE")
    return Table(columns, tuple(rows), frozenset({"STEP", "FOR", "BEAT"}))


def _note(node: NodeStatus, now: float) -> str:
    parts = [node.why]
    if node.held_until is not None and node.held_until > now:
        parts.append(ranks_wait(node.held_until - now))
    if node.slurm_says:
        parts.append(f"Slurm says {node.slurm_says}")
    if node.promoted:
        parts.append(f"promoted from standby to group rank {node.group_rank}")
    if node.done and node.state == "active":
        parts.append("its workers are done")
    if node.teardown:
        parts.append(f"tears down: {node.teardown}")
    return "; ".join(part for part in parts if part) or "-"


def ranks(shot: Snapshot, most: int) -> tuple[Table, str | None]:
    """The ranks that heartbeats report, and a sentence on all others: `and 1016 other ranks: at most 2 steps behind,
    quiet for 812 ms at most`. Where there are too many, those that lag or are quiet longest are shown, the worst
    first; else they are in order. No heartbeat known: no rows."""
    heard_of = {name for name in shot.view.heard if shot.view.last_heartbeat(name)}
    every = [rank for rank in all_ranks(shot.view, shot.store_now) if rank.node in heard_of]
    shown = worst(every, most) if len(every) > most else every
    rows = []
    for rank in shown:
        sections = " › ".join(f"{each.name} {seconds(each.open_s)}" for each in rank.sections) or "-"
        progress = (number(rank.step), number(rank.lag), _duration(rank.quiet_s))
        rows.append(Row((rank.replica, str(rank.rank), rank.node, *progress, sections)))
    columns = ("REPLICA", "RANK", "NODE", "STEP", "LAG", "QUIET", "SECTIONS")
    table = Table(columns, tuple(rows), frozenset({"RANK", "STEP", "LAG", "QUIET"}))
    others = set(every).difference(shown)
    if not others:
        return table, None
    parts = []
    if lags := [rank.lag for rank in others if rank.lag is not None]:
        parts.append(f"at most {plural(max(lags), 'step')} behind")
    if quiets := [rank.quiet_s for rank in others if rank.quiet_s is not None]:
        parts.append(f"quiet for {seconds(max(quiets))} at most")
    return table, f"and {plural(len(others), 'other rank')}" + (f": {', '.join(parts)}" if parts else "")


def _state(shot: Snapshot) -> str:
    if shot.state == "pending":
        there = "" if os.path.exists(shot.folder.path) else f"; its folder {shot.folder.path} does not exist yet"
        queued = f": {shot.queue.describe(shot.now)}" if shot.queue else ""
        return f"pending: {shot.reason or 'not started yet'}{queued}{there}"
    took = "" if shot.tasks else seconds(shot.elapsed_s)  # of an array each has started and ended for itself
    if shot.exit_code is not None:
        reason = f": {shot.reason}" if shot.reason and shot.reason != "done" else ""
        when = f" after {took}" if shot.info or shot.view.n else " before it started"
        return f"{shot.state} with exit code {shot.exit_code}{when if took else ''}{reason}"
    if shot.state == "died" and shot.info is None and not shot.view.n:
        return "died: it never started, and this Slurm does not know it; cancelled in the queue, or another Slurm's"
    if shot.state == "died":
        return f"died: its host process is gone and left no result; last record {_ago(shot.now - shot.moment)}"
    why = waiting(shot.view)
    return shot.state + (f" for {took}" if took else "") + (f"; {why}" if why else "")


def _when(shot: Snapshot, at: float) -> str:
    if shot.exit_code is None:
        return _ago(shot.now - at)
    return f"{seconds(max(0.0, at - (shot.started_at or at)))} after the start"


def _ago(duration_s: float) -> str:
    return f"{seconds(max(0.0, duration_s))} ago"


def _duration(took_s: float | None) -> str:
    return "-" if took_s is None else seconds(took_s)


def _between(start: float | None, end: float | None) -> str:
    return "-" if start is None or end is None else seconds(max(0.0, end - start))
