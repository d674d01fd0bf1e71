"""The screen of `top`: its jobs, or one job's ranks, as lines; and what each key does to it. No I/O, no clock.

screen = Top()
screen.show([(snapshot, goodput), …])
action = screen.press("enter")
screen.lines(width, height)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nvrx_slurm.report import page
from nvrx_slurm.report.goodput import Goodput
from nvrx_slurm.report.model import RankView
from nvrx_slurm.report.ranks import ranks
from nvrx_slurm.report.snapshot import Snapshot, line_of
from nvrx_slurm.report.tables import Mood, mood, number
from nvrx_slurm.report.words import percent, seconds, spares_of
from nvrx_slurm.util.sanitize import one_line, shown

JOBS = ("JOB", "STATE", "NODES", "STEP", "RESTARTS", "GOODPUT", "AGE", "NAME")
RANKS = ("RANK", "NODE", "STEP", "LAG", "QUIET", "REPLICA", "SECTIONS")
NODES = ("NODE", "STATE", "RANKS", "STEP", "BEAT", "NOTE")
KEYS = {
    "jobs": "q quit   enter open   / filter   s sort   r reverse",
    "job": "q quit   esc jobs   / filter   s sort   r reverse   d stacks   l log",
    "text": "q quit   esc back   arrows scroll   / find",
}

# Keys → how many rows the cursor moves down.
MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10, " ": 10}
END = 1 << 30  # a cursor behind the last row

Mode = Literal["jobs", "job", "text"]


class ScreenLine(NamedTuple):
    """A line of the screen. `chosen`: the cursor is on it."""

    text: str
    mood: Mood = "plain"
    chosen: bool = False
    is_head: bool = False


class Action(NamedTuple):
    """What the caller has to do: `quit`; or get the stacks or the log of a rank, and `answer` it."""

    kind: Literal["quit", "stacks", "log"]
    job: str = ""  # as in `Top`
    replica: str = ""
    rank: int = 0
    is_refresh: bool = False  # of what is on the screen


class _Row(NamedTuple):
    """`order`: a value for each column, to sort by. The cells of a rank are made when it is seen (`_cells`): a job
    has thousands."""

    cells: tuple[str, ...]
    mood: Mood
    order: tuple[Any, ...]
    rank: RankView | None = None
    job: str = ""


def _cells(row: _Row) -> tuple[str, ...]:
    if (rank := row.rank) is None:
        return row.cells
    quiet = "–" if rank.quiet_s is None else seconds(rank.quiet_s)
    sections = " › ".join(f"{each.name} {seconds(each.open_s)}" for each in rank.sections)
    cells = (str(rank.rank), rank.node, number(rank.step), number(rank.lag), quiet, rank.replica, sections)
    return tuple(map(one_line, cells))


@dataclass(slots=True)
class Top:
    """The state of the screen. Rows are sorted and filtered when they are drawn."""

    mode: Mode = "jobs"
    job: str = ""  # the path of its folder: two base folders may have jobs of one id
    filter: str = ""
    typing: bool = False
    reverse: bool = False
    sort: dict[str, int] = field(default_factory=lambda: {"jobs": 6, "job": 0})
    cursor: int = 0
    offset: int = 0
    text: list[str] = field(default_factory=list)
    title: str = ""
    message: str = ""
    _is_at_end: bool = False  # the last line of the text is on the screen
    _log: Action | None = None  # what is to be read again: the log on the screen
    _shots: dict[str, tuple[Snapshot, Goodput]] = field(default_factory=dict)
    _of_ranks: dict[str, tuple[RankView, ...]] = field(default_factory=dict)  # of a job, until the next `show`

    def show(self, jobs: Sequence[tuple[Snapshot, Goodput]]) -> None:
        """How the jobs stand now."""
        self._shots = {str(shot.folder.path): (shot, goodput) for shot, goodput in jobs}
        self._of_ranks = {}
        # A list of one job is no choice.
        if len(self._shots) == 1 and not self.job:
            self.mode, self.job = "job", next(iter(self._shots))

    def answer(self, action: Action, title: str, text: str) -> None:
        """What an action has found takes the screen until escape. A log begins at its end, and stays there."""
        # The user has left the log meanwhile.
        if action.is_refresh and not (self.mode == "text" and self.title == title):
            return
        is_at_end = self._is_at_end if action.is_refresh else action.kind == "log"
        self.text = shown(text).splitlines() or ["nothing"]
        self._log = action._replace(is_refresh=True) if action.kind == "log" else None
        if not action.is_refresh:
            self.mode, self.title, self.message = "text", title, ""
            self.cursor = self.offset = 0
            self.filter = ""
        if is_at_end:
            self.cursor = END

    def refresh(self) -> Action | None:
        """The log on the screen is to be read again. None until it is answered."""
        log, self._log = self._log, None
        return log if self.mode == "text" else None

    def press(self, key: str) -> Action | None:
        """What a key does. Returns what is left for the caller to do."""
        if self.typing:
            self._type(key)
            return None
        self.message = ""
        match key:
            case "q":
                return Action("quit")
            case _ if key in MOVES:
                self.cursor += MOVES[key]
            case "home":
                self.cursor = 0
            case "end":
                self.cursor = END
            case "/":
                self.typing, self.filter = True, ""
            case "s" if self.mode != "text":
                self.sort[self.mode] = (self.sort[self.mode] + 1) % len(self._columns())
            case "r":
                self.reverse = not self.reverse
            case "enter" if self.mode == "jobs":
                if row := self._chosen():
                    self.mode, self.job, self.filter, self.cursor = "job", row.job, "", 0
            case "esc" | "backspace":
                # One step back: out of the filter, of the text, of the job.
                if self.filter:
                    self.filter = ""
                elif self.mode == "text":
                    self.mode = "job"
                elif self.mode == "job" and len(self._shots) > 1:
                    self.mode, self.job = "jobs", ""
                self.cursor = self.offset = 0
            case "d" | "l" if self.mode == "job":
                row = self._chosen()
                if row is None or row.rank is None:
                    self.message = "no rank is chosen: ranks are known while the job runs"
                    return None
                kind: Literal["stacks", "log"] = "stacks" if key == "d" else "log"
                self.message = f"{kind} of {row.rank.replica} rank {row.rank.rank} …"
                return Action(kind, self.job, row.rank.replica, row.rank.rank)
        return None

    def lines(self, width: int, height: int) -> list[ScreenLine]:
        """The whole screen: `height` lines, none wider than `width` characters."""
        head = self._head()
        said = f"   filter: {self.filter}" if self.filter else ""
        by = "" if self.mode == "text" else f"   by {self._columns()[self._sorted_by()].lower()}"
        foot = f"/{self.filter}▏" if self.typing else self.message or f"{KEYS[self.mode]}{by}{said}"
        room = max(1, height - len(head) - 1)
        body = self._body(room, width)
        filled = [*head, *body, *[ScreenLine("")] * (room - len(body))]
        return [line._replace(text=line.text[:width]) for line in [*filled[: height - 1], ScreenLine(foot, "dim")]]

    # ---- keys

    def _type(self, key: str) -> None:
        if key in ("enter", "esc"):
            self.typing = False
            self.filter = self.filter if key == "enter" else ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self.filter += key
        self.cursor = 0

    def _chosen(self) -> _Row | None:
        rows = self._rows()
        return rows[min(max(self.cursor, 0), len(rows) - 1)] if rows else None

    # ---- lines

    def _head(self) -> list[ScreenLine]:
        if self.mode == "text":
            return [ScreenLine(one_line(self.title), is_head=True)]
        if self.mode == "jobs":
            live = sum(not shot.is_over for shot, _ in self._shots.values())
            return [
                ScreenLine(f"nvrx-slurm top   {len(self._shots)} jobs, {live} live", is_head=True),
                ScreenLine(""),
            ]
        if self.job not in self._shots:
            return [ScreenLine(one_line(f"job {self.job}"), is_head=True)]
        shot, goodput = self._shots[self.job]
        view = shot.view
        spares = spares_of(len(view.spares), view.plan.spares if view.plan else None, "/")
        first = f"{shot.folder.job_id}  {shot.state}  {seconds(shot.elapsed_s)}  {view.name}"
        second = f"step {number(view.step)}  cycle {view.cycle}  restarts {view.restarts}  spares {spares}"
        last = f"failed last: {view.last_failure.why}" if view.last_failure else "nothing has failed"
        waits = page.waiting(view) if shot.exit_code is None else None
        return [
            ScreenLine(one_line(first), mood(shot.state), is_head=True),
            ScreenLine(one_line(f"{second}  goodput {percent(goodput.ratio)}  {page.tally(view)}")),
            ScreenLine(one_line(waits or last), "busy" if waits else "dim"),
        ]

    def _body(self, room: int, width: int) -> list[ScreenLine]:
        if self.mode == "text":
            words = self.filter.lower()
            whole = (line for line in self.text if words in line.lower())
            found = [line[at : at + width] for line in whole for at in range(0, max(1, len(line)), max(1, width))]
            last = max(0, len(found) - room)
            self.cursor = min(max(self.cursor, 0), last)
            self._is_at_end = self.cursor == last
            return [ScreenLine(line) for line in found[self.cursor : self.cursor + room]]
        rows, columns = self._rows(), self._columns()
        self.cursor = min(max(self.cursor, 0), max(0, len(rows) - 1))
        seen = max(1, room - 1)
        self.offset = min(max(self.offset, self.cursor - seen + 1), self.cursor, max(0, len(rows) - seen))
        visible = [row._replace(cells=_cells(row)) for row in rows[self.offset : self.offset + seen]]
        widths = [
            max(len(name), *(len(row.cells[index]) for row in visible), 0) if visible else len(name)
            for index, name in enumerate(columns)
        ]
        head = "  " + "  ".join(name.ljust(width) for name, width in zip(columns, widths, strict=True))
        lines = [ScreenLine(head, "dim")]
        for index, row in enumerate(visible, self.offset):
            cells = "  ".join(cell.ljust(width) for cell, width in zip(row.cells, widths, strict=True))
            is_chosen = index == self.cursor
            lines.append(ScreenLine(f"{'>' if is_chosen else ' '} {cells}", row.mood, is_chosen))
        return lines

    def _columns(self) -> tuple[str, ...]:
        if self.mode == "jobs":
            return JOBS
        return RANKS if self._ranks() else NODES

    def _sorted_by(self) -> int:
        return self.sort[self.mode] % len(self._columns())

    def _rows(self) -> list[_Row]:
        rows = self._jobs() if self.mode == "jobs" else self._of_job()
        words = self.filter.lower().split()
        if words:
            rows = [row for row in rows if all(word in " ".join(_cells(row)).lower() for word in words)]
        by = self._sorted_by()
        return sorted(rows, key=lambda row: row.order[by], reverse=self.reverse)

    def _jobs(self) -> list[_Row]:
        rows = []
        for job, (shot, goodput) in self._shots.items():
            line = line_of(shot)
            age = "–" if line.age_s is None else seconds(line.age_s)
            step = number(line.step)
            cells = (
                line.job,
                line.state,
                line.nodes,
                step,
                str(line.restarts),
                percent(goodput.ratio),
                age,
                line.name,
            )
            order = (
                line.job,
                line.state,
                -len(shot.view.present),
                -(line.step or 0),
                -line.restarts,
                # A job of which it is not known comes last: a ratio is at most 1.
                2.0 if goodput.ratio is None else goodput.ratio,
                line.age_s or 0.0,
                line.name,
            )
            rows.append(_Row(tuple(map(one_line, cells)), mood(line.state), order, job=job))
        return rows

    def _ranks(self) -> tuple[RankView, ...]:
        if self.job not in self._shots:
            return ()
        if self.job not in self._of_ranks:
            shot, _ = self._shots[self.job]
            self._of_ranks[self.job] = ranks(shot.view, shot.store_now) if shot.view.heard else ()
        return self._of_ranks[self.job]

    def _of_job(self) -> list[_Row]:
        """Its ranks, as heartbeats report them; without any, its nodes."""
        if self.job not in self._shots:
            return []
        shot, _ = self._shots[self.job]
        rows = []
        for rank in self._ranks():
            lag, quiet_s = rank.lag or 0, rank.quiet_s or 0.0
            sections = tuple([(each.name, each.open_s) for each in rank.sections])
            order = (rank.rank, rank.node, rank.step or -1, -lag, -quiet_s, rank.replica, sections)
            kind: Mood = "bad" if quiet_s > 60.0 else "busy" if lag > 1 else "plain"
            rows.append(_Row((), kind, order, rank=rank))
        if rows:
            return rows
        for index, row in enumerate(page.nodes(shot).rows):
            name, state, _, of_ranks, step, _, beat, note = row.cells
            cells = (name, state, of_ranks, step, beat, note)
            rows.append(_Row(cells, row.mood, (index, *cells[1:])))
        return rows
