"""Nodes and ranks as tables: where each stands, and who is late. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nvrx_slurm.report.model import RankView
from nvrx_slurm.report.ranks import ranks as all_ranks
from nvrx_slurm.report.ranks import worst
from nvrx_slurm.report.snapshot import NodeStatus, Snapshot, node_status
from nvrx_slurm.report.tables import Row, Table, mood, number
from nvrx_slurm.report.words import numbers, plural, ranks_wait, seconds


def nodes(shot: Snapshot, only: Collection[str] | None = None) -> Table:
    """Every node, or only those named."""
    view = shot.view
    shown = (node for node in view.nodes.values() if only is None or node.name in only)
    every = (node_status(view, node, shot.store_now) for node in shown)
    rows = tuple(Row(_node_cells(node, shot.moment), mood(node.state)) for node in every)
    columns = ("NODE", "STATE", "REPLICA", "RANKS", "STEP", "FOR", "BEAT", "NOTE")
    return Table("nodes", columns, rows, frozenset({"STEP", "FOR", "BEAT"}))


def ranks(shot: Snapshot, most: int) -> tuple[Table, str | None]:
    """The ranks that beats tell of, and how all others do, in one sentence. Where there are too many, those that lag
    or are quiet longest are shown, the worst first; else they stand in order. No beat known: no rows."""
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
    told = []
    if lags := [rank.lag for rank in ranks if rank.lag is not None]:
        told.append(f"at most {plural(max(lags), 'step')} behind")
    if quiets := [rank.quiet_s for rank in ranks if rank.quiet_s is not None]:
        told.append(f"quiet for {seconds(max(quiets))} at most")
    return f"and {plural(len(ranks), 'other rank')}" + (f": {', '.join(told)}" if told else "")
