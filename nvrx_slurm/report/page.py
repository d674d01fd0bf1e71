"""A snapshot as facts and tables of text, for the plain page and the coloured one alike. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from nvrx_slurm.report import recovery
from nvrx_slurm.report.model import CycleView, InProcess, JobView, RankView, Recovery, ReplicaView, StacksView
from nvrx_slurm.report.ranks import ranks as all_ranks
from nvrx_slurm.report.ranks import worst
from nvrx_slurm.report.snapshot import JobLine, NodeStatus, Snapshot, node_status
from nvrx_slurm.report.tables import Mood, Row, Table, mood, number
from nvrx_slurm.report.words import at_step, names, numbers, plural, ranks_of, ranks_wait, seconds


def facts(shot: Snapshot) -> list[Row]:
    """Label and text: what a reader looks for first."""
    view = shot.view
    cluster = f" on {shot.info.cluster}" if shot.info else ""
    rows = [
        ("job", f"{shot.folder.job_id} ({view.name or '-'}){cluster}", "plain"),
        ("state", _state_line(shot), mood(shot.state)),
        ("step", "-" if view.step is None else str(view.step), "plain"),
        ("cycle", _cycle_line(view), "plain"),
        ("spares", _spares_line(view), "plain"),
        ("restarts", _restarts_line(view), "plain"),
        ("failure", _failure_line(shot), "bad" if view.last_failure else "plain"),
        ("decision", view.last_decision.what if view.last_decision else "none", "plain"),
        ("logs", str(shot.folder.path / "logs"), "dim"),
    ]
    if view.last_in_process:
        rows.insert(6, ("in process", _in_process_line(shot, view.last_in_process), "plain"))
    if view.last_verdict:
        rows.insert(-1, ("verdict", f"{view.last_verdict.what}; nothing followed from it", "dim"))
    if view.last_stacks:
        rows.insert(-1, ("stacks", _stacks_line(shot, view.last_stacks), "plain"))
    if shot.store_error:
        rows.append(("note", f"{shot.store_error}; the page shows what the folder has", "bad"))
    return [Row((label, text), mood=kind) for label, text, kind in rows]


def replicas(view: JobView) -> Table:
    rows = (Row(_replica_cells(view, replica), mood(replica.phase)) for replica in view.replicas.values())
    columns = ("REPLICA", "PHASE", "CYCLE", "NODES", "RANKS", "STEP", "WAITS FOR")
    return Table("replicas", columns, tuple(rows), frozenset({"CYCLE", "NODES", "RANKS", "STEP"}))


def recoveries(view: JobView, last: int | None = None) -> Table:
    """Each recovery's phases, their total, the user's own start-up, and the way from the death to the first step."""
    shown = list(view.recoveries.values())[-last if last else 0 :]
    earlier = any("earlier_attempts" in each.phases for each in shown)
    phases = [name for name in recovery.PHASES if earlier or name != "earlier_attempts"]
    columns = ["REPLICA", "CYCLE", *(recovery.PHASES[name].upper() for name in phases)]
    columns += ["TOTAL", "STARTUP", "TO FIRST STEP", "CAUSE"]
    rows = tuple(Row(_recovery_cells(each, phases)) for each in shown)
    return Table("recoveries", tuple(columns), rows, frozenset(columns[1:-1]))


def cycles(view: JobView, now: float, last: int | None = None) -> Table:
    """The cycles and their outcomes."""
    begin = view.started_at or 0.0
    shown = list(view.cycles.values())[-last if last else 0 :]
    rows = tuple(Row(_cycle_cells(each, begin, now, view.generation > 0), _cycle_mood(each)) for each in shown)
    columns = ("REPLICA", "CYCLE", "OPENED", "RENDEZVOUS", "RAN", "RANKS", "NODES", "ENDED")
    return Table("cycles", columns, rows, frozenset({"CYCLE", "OPENED", "RENDEZVOUS", "RAN", "RANKS"}))


def job_table(lines: Sequence[JobLine]) -> Table:
    """All jobs of a folder."""
    rows = tuple(Row(_job_cells(line), mood(line.state)) for line in lines)
    columns = ("JOB", "NAME", "CLUSTER", "STATE", "NODES", "CYCLE", "RESTARTS", "STEP", "AGE")
    return Table("jobs", columns, rows, frozenset(columns[4:]))


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


# ---------------------------------------------------------------------------------------------- cells


def _state_line(shot: Snapshot) -> str:
    if shot.state == "pending":
        there = "" if shot.folder.path.exists() else f"; its folder {shot.folder.path} does not exist yet"
        return f"pending: {shot.reason or 'not started yet'}{there}"
    took = seconds(shot.elapsed_s)
    if shot.exit_code is not None:
        reason = f": {shot.reason}" if shot.reason and shot.reason != "done" else ""
        return f"{shot.state} with exit code {shot.exit_code} after {took}{reason}"
    if shot.state == "died":
        return f"died: its host process is gone and left no result; last record {_ago(shot.now - shot.moment)}"
    why = waiting(shot.view)
    return f"{shot.state} for {took}" + (f"; {why}" if why else "")


def _cycle_line(view: JobView) -> str:
    generation = f", generation {view.generation}" if view.generation else ""
    if len(view.replicas) < 2:
        return f"{view.cycle}{generation}"
    return ", ".join(f"{replica.id} {replica.cycle}" for replica in view.replicas.values()) + generation


def _spares_line(view: JobView) -> str:
    asked = f" of {view.plan.spares}" if view.plan else ""
    # The spares leave with the job: "0 left" at its end would read as if they had been lost.
    state = "left" if view.unused_spares is None else "not used"
    return f"{len(view.spares)}{asked} {state}" + (f": {names(view.spares)}" if view.spares else "")


def _restarts_line(view: JobView) -> str:
    left = "" if view.restarts_left is None else f", {view.restarts_left} left for failed workers"
    return f"{view.restarts}{left}"


def _in_process_line(shot: Snapshot, last: InProcess) -> str:
    count = plural(shot.view.restarts_in_process, "restart")
    return f"{count}; the last in {seconds(last.total_s)}, {_when(shot, last.at)}: {last.cause}"


def _failure_line(shot: Snapshot) -> str:
    failure = shot.view.last_failure
    if failure is None:
        return "none"
    where = f", {failure.replica} cycle {failure.cycle}" if failure.replica else ", a hot spare"
    stacks = f"; stacks: {shot.folder.path / failure.stacks}" if failure.stacks else ""
    return f"{failure.why}{where}{at_step(failure.step, said=failure.why)}, {_when(shot, failure.at)}{stacks}"


def _stacks_line(shot: Snapshot, last: StacksView) -> str:
    """Where the last stacks lie, and why they were written down."""
    first = next(iter(last.files.values()))
    return f"{shot.folder.path / first} ({ranks_of(last.files)} on {last.node}): {last.why}"


def _when(shot: Snapshot, at: float) -> str:
    if shot.exit_code is None:
        return _ago(shot.now - at)
    return f"{seconds(max(0.0, at - (shot.started_at or at)))} after the start"


def _ago(duration_s: float) -> str:
    return f"{seconds(max(0.0, duration_s))} ago"


def _took(start: float | None, end: float | None) -> str:
    return "-" if start is None or end is None else seconds(max(0.0, end - start))


def _replica_cells(view: JobView, replica: ReplicaView) -> tuple[str, ...]:
    waits = waits_for(view, replica).removeprefix("waits for ")
    size = number(replica.world_size or None)
    cells = (replica.id, replica.phase, str(replica.cycle), str(len(replica.nodes)), size, number(replica.step))
    return (*cells, waits or "-")


def _recovery_cells(each: Recovery, phases: Iterable[str]) -> tuple[str, ...]:
    took = [seconds(each.phases[name]) if name in each.phases else "-" for name in phases]
    startup = "-" if each.startup_s is None else seconds(each.startup_s)
    whole = "-" if each.to_first_step_s is None else seconds(each.to_first_step_s)
    promoted = f" → {names(each.promoted)}" if each.promoted else ""
    cause = f"{each.why}{promoted}"
    return (each.replica, str(each.cycle), *took, seconds(each.total_s), startup, whole, cause)


def _cycle_cells(each: CycleView, begin: float, now: float, generations: bool) -> tuple[str, ...]:
    shown = f"{each.generation}.{each.cycle}" if generations else str(each.cycle)
    opened = f"+{each.opened_at - begin:.3f}s"
    ran = _took(each.started_at, each.ended_at or now)
    ranks = number(each.world_size or None)
    closed = _took(each.opened_at, each.closed_at)
    return (each.replica, shown, opened, closed, ran, ranks, names(each.nodes), each.outcome or "-")


def _cycle_mood(each: CycleView) -> Mood:
    if each.ended_at is None:
        return "good" if each.started_at else "busy"
    return "good" if each.outcome == "done" else "plain"


def _job_cells(line: JobLine) -> tuple[str, ...]:
    age = "-" if line.age_s is None else seconds(line.age_s)
    cells = (line.job, line.name or "-", line.cluster or "-", line.state, line.nodes)
    return (*cells, number(line.cycle), str(line.restarts), number(line.step), age)


def tally(view: JobView) -> str:
    """`4 active, 1 standby, 1 lost`: every node counted once."""
    states = ("joining", "ready", "active", "standby", "quarantined", "lost", "left")
    counts = {state: sum(node.state == state for node in view.nodes.values()) for state in states}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or plural(0, "node")


def nodes(shot: Snapshot, only: Collection[str] | None = None) -> Table:
    """Every node, or only those named."""
    view = shot.view
    shown = (node for node in view.nodes.values() if only is None or node.name in only)
    every = (node_status(view, node, shot.store_now) for node in shown)
    rows = tuple(Row(_node_cells(node, shot.moment), mood(node.state)) for node in every)
    columns = ("NODE", "STATE", "REPLICA", "RANKS", "STEP", "FOR", "BEAT", "NOTE")
    return Table("nodes", columns, rows, frozenset({"STEP", "FOR", "BEAT"}))


def ranks(shot: Snapshot, most: int) -> tuple[Table, str | None]:
    """The ranks that heartbeats report, and a sentence on all others. Where there are too many, those that lag or are
    quiet longest are shown, the worst first; else they are in order. No heartbeat known: no rows."""
    heard_of = {name for name in shot.view.heard if shot.view.last_beat(name)}
    every = [rank for rank in all_ranks(shot.view, shot.store_now) if rank.node in heard_of]
    shown = worst(every, most) if len(every) > most else every
    places = {(rank.replica, rank.rank) for rank in shown}
    others = [rank for rank in every if (rank.replica, rank.rank) not in places]
    columns = ("REPLICA", "RANK", "NODE", "STEP", "LAG", "QUIET", "SECTIONS")
    rows = tuple(Row(_rank_cells(rank)) for rank in shown)
    table = Table("ranks", columns, rows, frozenset({"RANK", "STEP", "LAG", "QUIET"}))
    return table, _others(others) if others else None


def _node_cells(node: NodeStatus, now: float) -> tuple[str, ...]:
    standing = seconds(max(0.0, now - node.since)) if node.since else "-"
    replica = node.replica if node.state in ("active", "ready") else None
    cells = (node.name, node.state, replica or "-", numbers(node.ranks), number(node.step), standing)
    beat = "-" if node.beat_age_s is None else seconds(node.beat_age_s)
    return (*cells, beat, _node_note(node, now) or "-")


def _node_note(node: NodeStatus, now: float) -> str:
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
    return "; ".join(part for part in parts if part)


def _rank_cells(rank: RankView) -> tuple[str, ...]:
    quiet = "-" if rank.quiet_s is None else seconds(rank.quiet_s)
    sections = " › ".join(f"{each.name} {seconds(each.open_s)}" for each in rank.sections)
    cells = (rank.replica, str(rank.rank), rank.node, number(rank.step), number(rank.lag), quiet)
    return (*cells, sections or "-")


def _others(ranks: Sequence[RankView]) -> str:
    """`and 1016 other ranks: at most 2 steps behind, quiet for 812 ms at most`."""
    parts = []
    if lags := [rank.lag for rank in ranks if rank.lag is not None]:
        parts.append(f"at most {plural(max(lags), 'step')} behind")
    if quiets := [rank.quiet_s for rank in ranks if rank.quiet_s is not None]:
        parts.append(f"quiet for {seconds(max(quiets))} at most")
    return f"and {plural(len(ranks), 'other rank')}" + (f": {', '.join(parts)}" if parts else "")
