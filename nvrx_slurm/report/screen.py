"""The page in colour, for a terminal: what `status` shows, what the live screen redraws, and the summary at the end.

The live screen (`Monitor`) is the page, the last events, and the last lines of the log, fitted into the terminal.

Colours come from rich, which honours NO_COLOR. The plain page has the same content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text

from nvrx_slurm.journal.records import Entry, Progress
from nvrx_slurm.report import page, plain, recovery
from nvrx_slurm.report.logs import end_of
from nvrx_slurm.report.model import JobView, Recovery
from nvrx_slurm.report.sentences import Lines
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.tables import Mood, Row, Table, mood
from nvrx_slurm.report.words import how_started, names, seconds, spares_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.sanitize import coloured, one_line

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
WIDEST_FACTS = 100
# Columns of padding around a label and its text.
FACT_GAP = 4
# Between two columns of a table; and how narrow one of text may become, the rest in more lines.
GAP, NARROWEST = 2, 12

MOST_NODES = 16
MOST_RANKS = 8
MOST_RECOVERIES = 5
MOST_EVENTS = 6
MOST_LOG_LINES = 6
TAIL_BYTES = 16 << 10
# Lines of the terminal that are not for nodes.
RESERVED_LINES = 16


def show(part: RenderableType) -> None:
    """Print a page or a table."""
    Console(highlight=False).print(part, crop=False)


def show_facts(rows: Sequence[Row], table: Table, console: Console | None = None) -> None:
    """Print labels with their texts, and a table below, in at most `WIDEST_FACTS` columns."""
    out = console or Console(highlight=False)
    out.width = min(out.width, WIDEST_FACTS)
    out.print(_fact_grid(rows, label_style="bold", width=out.width))
    if table.rows:
        out.print()
        out.print(grid(table), crop=False)


def render(shot: Snapshot, *, most_nodes: int = MOST_NODES, most_ranks: int = MOST_RANKS) -> RenderableType:
    """One job on one screen: header, replicas, nodes, ranks, recoveries, what failed last, where the logs are."""
    view = shot.view
    parts: list[RenderableType] = [header(shot)]
    if len(view.replicas) > 1:  # the header shows a single one
        parts += [Text(), grid(page.replicas(view))]
    if view.nodes:
        parts += [Text(), *node_grid(shot, most_nodes)]
        ranks, others = page.ranks(shot, most_ranks)
        if ranks.rows:  # heartbeats are known
            parts += [Text(), grid(ranks), *([Text(f"  {others}", style="dim")] if others else [])]
    if view.recoveries:
        parts += [Text(), recovery_bars(view)]
    return Group(*parts, Text(), footer(shot))


def summary(shot: Snapshot) -> RenderableType:
    """How the job went: rendezvous, each recovery's phases, the way from a death to the next step, where the logs
    are."""
    view = shot.view
    parts: list[RenderableType] = [header(shot)]
    if view.cycles:
        parts += [Text(), grid(page.cycles(view, shot.moment))]
    if view.recoveries:
        parts += [Text(), recovery_bars(view, most=len(view.recoveries))]
    return Group(*parts, Text(), footer(shot))


def header(shot: Snapshot) -> RenderableType:
    """Name, id, state, how long; and what the job waits for."""
    view, kind = shot.view, mood(shot.state)
    title = Text.assemble(
        (f" {MARKS[kind]} {shot.state} ", f"bold reverse {STYLES[kind]}"),
        " ",
        (one_line(view.name or "-"), "bold"),
        (one_line(f"  {shot.folder.job_id}"), "dim"),
        f"  {seconds(shot.elapsed_s)}",
    )
    if view.replicas:
        counters = {"cycle": view.cycle, "step": "-" if view.step is None else view.step, "restarts": view.restarts}
        if shot.exit_code is None:
            counters["spares"] = spares_of(len(view.spares), view.plan.spares if view.plan else None, "/")
        else:
            counters = {"exit code": shot.exit_code, **counters}
        for label, value in counters.items():
            title.append("   ").append(label, "dim").append(f" {value}", "bold")
    waiting = page.waiting(view) if shot.exit_code is None else None
    lines: list[RenderableType] = [title, Rule(style="dim")]
    if shot.state == "pending" or (shot.exit_code and shot.reason):
        why = f": {shot.queue.describe(shot.now)}" if shot.queue else ""
        lines.append(Text(one_line(f"{shot.reason or ''}{why}"), STYLES[kind]))
    if waiting:
        lines.append(Text(one_line(f"◐ {waiting}"), STYLES["busy"]))
    return Group(*lines)


def footer(shot: Snapshot) -> Grid:
    """What failed last, what was decided, where the logs are."""
    wanted = ("failure", "prewarm", "decision", "stacks", "logs", "note")  # of recoveries it has the bars
    rows = [row for row in page.facts(shot) if row.cells[0].split()[0] in wanted and row.cells[1] != "none"]
    return _fact_grid(rows, label_style="dim")


def _fact_grid(rows: Sequence[Row], label_style: str, width: int | None = None) -> Grid:
    """`width`: of the terminal. Where it is given, rows of one line are cut to it."""
    facts = Grid.grid(padding=(0, 2))
    labels = max((cell_len(row.cells[0]) for row in rows), default=0) + FACT_GAP
    facts.add_column(style=label_style, no_wrap=True)
    facts.add_column(overflow="fold")
    for row in rows:
        label, words = row.cells
        text = Text(words)
        if row.cut and width is not None:
            text.truncate(max(1, width - labels - cell_len(row.end)), overflow="ellipsis")
        text.append(row.end)
        text.stylize(STYLES[row.mood])
        facts.add_row(Text(label), text)
    return facts


def grid(table: Table) -> RenderableType:
    """A table without lines: dim column names, each row in the colour of its state. On a terminal that is too narrow
    for it, the plain table, whose lines the terminal breaks."""
    drawn = Grid(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    drawn.add_column("", width=1)
    needed = 1
    for index, name in enumerate(table.columns):
        is_right = name in table.right
        # A name or a number that is broken in two cannot be copied, or read.
        is_whole = index < 2 or is_right
        widest = max(cell_len(cells[index]) for cells in (table.columns, *(row.cells for row in table.rows)))
        needed += GAP + (widest if is_whole else min(widest, NARROWEST))
        drawn.add_column(name.lower(), justify="right" if is_right else "left", overflow="fold", no_wrap=is_whole)
    for row in table.rows:
        style, quiet = STYLES[row.mood], "dim" if row.mood == "dim" else ""
        first, second, *rest = row.cells
        texts = [Text(cell, "dim" if cell == "-" else quiet) for cell in rest]
        drawn.add_row(Text(MARKS[row.mood], style), Text(first, "bold"), Text(second, style), *texts)
    return FittedTable(drawn, needed, table)


@dataclass(frozen=True, slots=True)
class FittedTable:
    """What `grid` has drawn, if there are `needed` columns of the terminal for it; else the plain table."""

    drawn: Grid
    needed: int
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.needed <= options.max_width:
            yield self.drawn
        else:
            yield Text(plain.table(self.table), no_wrap=True, overflow="ignore")


def node_grid(shot: Snapshot, most: int) -> list[RenderableType]:
    """The nodes, the unusual ones first to be kept where there is no room for all; the rest in one line a state."""
    nodes = list(shot.view.nodes.values())
    if len(nodes) <= most:
        return [grid(page.nodes(shot))]
    rank = {"lost": 0, "quarantined": 0, "joining": 1, "ready": 2, "standby": 3, "left": 5}
    nodes.sort(key=lambda node: (rank.get(node.state, 4 - 2 * node.promoted), -node.since))
    shown = {node.name for node in nodes[: max(0, most - 1)]}
    hidden = [node for node in shot.view.nodes.values() if node.name not in shown]
    lines: list[RenderableType] = []
    for state in dict.fromkeys(node.state for node in hidden):
        alike = [node.name for node in hidden if node.state == state]
        lines.append(Text(one_line(f"  and {len(alike)} {state}: {names(alike)}"), "dim"))
    return [grid(page.nodes(shot, shown)), *lines]


def recovery_bars(view: JobView, most: int = MOST_RECOVERIES) -> RenderableType:
    """Each recovery as one bar whose parts are its phases, to scale, the user's own start-up apart."""
    recoveries = list(view.recoveries.values())
    lines: list[RenderableType] = []
    if len(recoveries) > most:
        lines.append(Text(f"  {len(recoveries) - most} earlier recoveries", "dim"))
    for each in recoveries[-most:]:
        lines += _recovery_lines(each)
    return Group(*lines)


def _recovery_lines(each: Recovery) -> tuple[Text, Text, Text]:
    """What was recovered from; a bar as long as all of the way to the first step; and its legend."""
    title = Text.assemble(
        ("↻ ", "yellow"), (one_line(f"{each.replica} cycle {each.cycle}"), "bold"), one_line(f"  {each.why}")
    )
    if each.promoted:
        title.append(one_line(f"; {names(each.promoted)} took over"), STYLES["spare"])
    if steps := recovery.steps(each):
        title.append(f"; {steps}", "dim")
    if how := how_started(each.warm, each.cold):
        title.append(one_line(f"; {how}"), "dim")
    bar, legend = Text("  "), Text("  ")
    parts = recovery.in_order(each)
    whole = sum(took for _, _, took in parts) or 1.0
    for name, label, took in parts:
        is_startup = name == recovery.STARTUP
        style = "dim" if is_startup else PHASE_STYLES.get(name, "white")
        cells = max(1, round(BAR_WIDTH * took / whole)) if took > 0.0 else 0  # what took any time is seen
        bar.append(("░" if is_startup else "█") * cells, style)
        shown = "user's start-up" if is_startup else label
        legend.append("■ ", style).append(one_line(f"{shown} "), "dim").append(f"{seconds(took)}   ")
    legend.rstrip()
    bar.append(f"  {seconds(each.total_s)}", "bold").append(" to recover", "dim")
    if each.to_first_step_s is not None:
        bar.append(f", {seconds(each.to_first_step_s)}", "bold").append(" to the first step", "dim")
    return title, bar, legend


# ---------------------------------------------------------------------------------------- live screen


class Monitor:
    """Draws once in `redraw_s` seconds at most; `tail`: with the last lines of the log. Leaving the context restores
    the cursor."""

    def __init__(self, console: Console, clock: Clock, redraw_s: float, *, tail: bool = True) -> None:
        self._console, self._clock, self._redraw_s, self._tail = console, clock, redraw_s, tail
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._lines = Lines()
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._stepped: tuple[str, int, int] | None = None
        self._drawn_at = float("-inf")

    def __enter__(self) -> Monitor:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def take(self, entry: Entry, view: JobView) -> None:
        """Remember the last events."""
        record = entry.record
        if isinstance(record, Progress):
            # Every rank reports its first step of a cycle; one of them is enough here.
            cycle = (record.replica, record.generation, record.cycle)
            known, self._stepped = cycle == self._stepped, cycle
            if known:
                return
        self._events.append(self._lines.in_words(entry))

    def print_output(self, lines: list[str]) -> None:
        """Leave the lines on the terminal, above the screen."""
        for line in lines:
            self._console.print(Text.from_ansi(coloured(line)), soft_wrap=True)

    def draw(self, shot: Snapshot) -> None:
        """Redraw, unless it was done a moment ago."""
        # Not the whole time: a poll that returns a little early would leave out every second redraw.
        if self._clock.monotonic() - self._drawn_at < self._redraw_s * 0.9:
            return
        self._drawn_at = self._clock.monotonic()
        room = self._console.height - RESERVED_LINES
        shown = render(shot, most_nodes=max(4, room), most_ranks=max(3, room // 4))
        parts = [shown]
        # The lines that are left go to the events, then to the log.
        room = self._console.height - len(self._console.render_lines(shown)) - 1
        events = list(self._events)[-max(0, min(MOST_EVENTS, room - 1)) :] if room > 1 else []
        if events:
            parts += [_title("events"), *(_one_line(event, "dim") for event in events)]
            room -= len(events) + 1
        end = end_of(shot.folder.job_log, TAIL_BYTES) if room > 1 and self._tail else ""
        log = [line.rstrip("\r") for line in end.split("\n") if line][-min(MOST_LOG_LINES, room - 1) :]
        if log:
            parts += [_title("output"), *(_one_line(line) for line in log)]
        self._live.update(Group(*parts), refresh=True)

    def end(self, shot: Snapshot) -> None:
        """Leave the summary on the terminal instead of the screen."""
        self._live.update(Text(), refresh=True)
        self._live.stop()
        self._console.print(summary(shot), crop=False)


def _title(text: str) -> Rule:
    return Rule(Text(text, "dim"), align="left", style="dim")


def _one_line(text: str, style: str = "") -> Text:
    line = Text.from_ansi(coloured(text.rpartition("\r")[2]), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(10_000)
    return line
