"""The page in colour, for a terminal: what `status` shows, what the live screen redraws, and the summary at the end.

Colours come from rich, which honours NO_COLOR. The plain page has the same content.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text

from nvrx_slurm.report import page, recovery
from nvrx_slurm.report.model import JobView, NodeView, Recovery
from nvrx_slurm.report.snapshot import JobLine, Snapshot
from nvrx_slurm.report.tables import Mood, Row, Table, mood
from nvrx_slurm.report.words import names, seconds
from nvrx_slurm.util.sanitize import one_line

__all__ = ["grid", "render", "show", "show_jobs", "summary"]

STYLES: dict[Mood, str] = {
    "good": "green",
    "busy": "yellow",
    "spare": "cyan",
    "bad": "red",
    "dim": "dim",
    "plain": "",
}
MARKS: dict[Mood, str] = {"good": "●", "busy": "◐", "spare": "○", "bad": "✗", "dim": "·", "plain": " "}
PHASE_STYLES = {
    "earlier_attempts": "red",
    "decided": "magenta",
    "torn_down": "yellow",
    "closed": "cyan",
    "spawned": "green",
}
BAR_WIDTH = 32
MOST_NODES = 16
MOST_RANKS = 8
MOST_RECOVERIES = 5


def show(shot: Snapshot, console: Console | None = None) -> None:
    """Print a job's page."""
    (console or Console(highlight=False)).print(render(shot))


def show_jobs(lines: Sequence[JobLine], console: Console | None = None) -> None:
    """Print the table of all jobs."""
    (console or Console(highlight=False)).print(grid(page.job_table(lines)))


def show_facts(rows: Sequence[Row], table: Table, console: Console | None = None) -> None:
    """Print labels with their texts, and a table below."""
    facts = Grid.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for row in rows:
        label, text = row.cells
        facts.add_row(Text(label), Text(text, style=STYLES[row.mood]))
    out = console or Console(highlight=False)
    out.print(facts)
    if table.rows:
        out.print()
        out.print(grid(table))


def render(shot: Snapshot, *, most_nodes: int = MOST_NODES, most_ranks: int = MOST_RANKS) -> RenderableType:
    """One job on one screen: header, replicas, nodes, ranks, recoveries, what failed last, where the logs are."""
    view = shot.view
    parts: list[RenderableType] = [header(shot)]
    if len(view.replicas) > 1:  # the header shows a single one
        parts += [Text(), grid(page.replicas(view))]
    if view.nodes:
        parts += [Text(), node_grid(shot, most_nodes), *rank_grid(shot, most_ranks)]
    if view.recoveries:
        parts += [Text(), recovery_bars(view)]
    return Group(*parts, Text(), *footer(shot))


def summary(shot: Snapshot) -> RenderableType:
    """How the job went: rounds, each recovery's phases, the way from a death to the next step, where the logs are."""
    view = shot.view
    parts: list[RenderableType] = [header(shot)]
    if view.cycles:
        parts += [Text(), grid(page.cycles(view, shot.moment))]
    if view.recoveries:
        parts += [Text(), recovery_bars(view, most=len(view.recoveries))]
    return Group(*parts, Text(), *footer(shot))


def header(shot: Snapshot) -> RenderableType:
    """Name, id, state, how long; and what the job waits for."""
    kind = mood(shot.state)
    title = Text.assemble(
        (f" {MARKS[kind]} {shot.state} ", f"bold reverse {STYLES[kind]}"),
        " ",
        (one_line(shot.view.name or "-"), "bold"),
        (one_line(f"  {shot.folder.job_id}"), "dim"),
        f"  {seconds(shot.elapsed_s)}",
    )
    for label, text in _counters(shot):
        title.append("   ")
        title.append(label, "dim").append(f" {text}", "bold")
    waiting = page.waiting(shot.view) if shot.exit_code is None else None
    lines: list[RenderableType] = [title, Rule(style="dim")]
    if shot.state == "pending" or (shot.exit_code and shot.reason):
        lines.append(Text(one_line(shot.reason or ""), STYLES[kind]))
    if waiting:
        lines.append(Text(one_line(f"◐ {waiting}"), STYLES["busy"]))
    return Group(*lines)


def footer(shot: Snapshot) -> list[RenderableType]:
    """What failed last, what was decided, where the logs are."""
    wanted = ("failure", "decision", "stacks", "logs", "note")
    rows = [row for row in page.facts(shot) if row.cells[0] in wanted and row.cells[1] != "none"]
    table = Grid.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(row.cells[0]), Text(row.cells[1], STYLES[row.mood]))
    return [table]


def grid(table: Table) -> Grid:
    """A table without lines: dim column names, each row in the colour of its state."""
    drawn = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    drawn.add_column("", width=1)
    for name in table.columns:
        drawn.add_column(name.lower(), justify="right" if name in table.right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*_cells(row))
    return drawn


def node_grid(shot: Snapshot, most: int) -> RenderableType:
    """The nodes, the unusual ones first to be kept where there is no room for all; the rest in one line a state."""
    view = shot.view
    shown = _worth_showing(list(view.nodes.values()), most)
    kept = page.nodes(shot, shown)
    hidden = [node for node in view.nodes.values() if node.name not in shown]
    if not hidden:
        return grid(kept)
    rest = Text(style="dim")
    for state in dict.fromkeys(node.state for node in hidden):
        alike = [node.name for node in hidden if node.state == state]
        rest.append(one_line(f"  and {len(alike)} {state}: {names(alike)}") + "\n")
    rest.rstrip()
    return Group(grid(kept), rest)


def rank_grid(shot: Snapshot, most: int) -> list[RenderableType]:
    """The ranks that heartbeats report, the others in one line; nothing where no heartbeat is known."""
    table, others = page.ranks(shot, most)
    if not table.rows:
        return []
    rest = [Text(f"  {others}", style="dim")] if others else []
    return [Text(), grid(table), *rest]


def recovery_bars(view: JobView, most: int = MOST_RECOVERIES) -> RenderableType:
    """Each recovery as one bar whose parts are its phases, to scale, the user's own start-up apart."""
    recoveries = list(view.recoveries.values())
    lines: list[RenderableType] = []
    if len(recoveries) > most:
        lines.append(Text(f"  {len(recoveries) - most} earlier recoveries", "dim"))
    for each in recoveries[-most:]:
        lines += [_recovery_title(each), _bar(each), _legend(each)]
    return Group(*lines)


# ---------------------------------------------------------------------------------------------- parts


def _counters(shot: Snapshot) -> list[tuple[str, str]]:
    view = shot.view
    if not view.replicas:
        return []
    spares = f"{len(view.spares)}/{view.plan.spares}" if view.plan else str(len(view.spares))
    step = "-" if view.step is None else str(view.step)
    rows = [("cycle", str(view.cycle)), ("step", step), ("restarts", str(view.restarts)), ("spares", spares)]
    return rows if shot.exit_code is None else [("exit code", str(shot.exit_code)), *rows[:3]]


def _cells(row: Row) -> list[Text]:
    style, quiet = STYLES[row.mood], "dim" if row.mood == "dim" else ""
    first, second, *rest = row.cells
    texts = [Text(cell, "dim" if cell == "-" else quiet) for cell in rest]
    return [Text(MARKS[row.mood], style), Text(first, "bold"), Text(second, style), *texts]


def _worth_showing(nodes: list[NodeView], most: int) -> set[str]:
    if len(nodes) <= most:
        return {node.name for node in nodes}
    rank = {"lost": 0, "quarantined": 0, "joining": 1, "ready": 2, "standby": 3, "left": 5}
    ordered = sorted(nodes, key=lambda node: (rank.get(node.state, 4 - 2 * node.promoted), -node.since))
    return {node.name for node in ordered[: max(0, most - 1)]}


def _recovery_title(each: Recovery) -> Text:
    title = Text.assemble(
        ("↻ ", "yellow"), (one_line(f"{each.replica} cycle {each.cycle}"), "bold"), one_line(f"  {each.why}")
    )
    if each.promoted:
        title.append(one_line(f"; {names(each.promoted)} took over"), STYLES["spare"])
    if each.step_before is not None and each.first_step is not None:
        title.append(f"; last reported step {each.step_before}, resumed at {each.first_step}", "dim")
    return title


def _bar(each: Recovery) -> Text:
    """The bar is as long as all of the way to the first step; each phase that took any time gets a cell at least."""
    parts = [(PHASE_STYLES.get(name, "white"), took) for name, took in each.phases.items()]
    if each.startup_s is not None:
        parts.append(("dim", each.startup_s))
    whole = sum(took for _, took in parts) or 1.0
    bar = Text("  ")
    for style, took in parts:
        cells = max(1, round(BAR_WIDTH * took / whole)) if took > 0.0 else 0
        bar.append("█" * cells if style != "dim" else "░" * cells, style)
    bar.append(f"  {seconds(each.total_s)}", "bold")
    bar.append(" to recover", "dim")
    if each.to_first_step_s is not None:
        bar.append(f", {seconds(each.to_first_step_s)}", "bold").append(" to the first step", "dim")
    return bar


def _legend(each: Recovery) -> Text:
    legend = Text("  ")
    styles = [PHASE_STYLES.get(name, "white") for name in each.phases] + ["dim"]
    for style, (name, took) in zip(styles, recovery.in_words(each), strict=False):
        label = "user's start-up" if name == recovery.STARTUP else name
        legend.append("■ ", style).append(one_line(f"{label} "), "dim").append(f"{seconds(took)}   ")
    legend.rstrip()
    return legend
