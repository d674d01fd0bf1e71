"""The live screen: the page, the last events, and the last lines of the log, fitted into the terminal."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, Progress
from nvrx_slurm.report import screen
from nvrx_slurm.report.model import Heard
from nvrx_slurm.report.sentences import Lines
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.sanitize import coloured

MOST_EVENTS = 6
MOST_LOG_LINES = 6
TAIL_BYTES = 16 << 10
RESERVED_LINES = 16
"""Lines of the terminal that are not for nodes."""


class Monitor:
    """Draws once in `redraw_s` seconds at most. Leaving the context restores the cursor."""

    def __init__(self, console: Console, clock: Clock, redraw_s: float) -> None:
        self._console, self._clock, self._redraw_s = console, clock, redraw_s
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._lines = Lines()
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._stepped: tuple[str, int, int] | None = None
        self._folder: JobFolder | None = None
        self._drawn_at = float("-inf")

    def __enter__(self) -> Monitor:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()

    def take(self, items: list[Entry | Heard], folder: JobFolder) -> None:
        """Remember the last events."""
        self._folder = folder
        for item in items:
            if isinstance(item, Entry) and self._is_new(item):
                self._events.append(self._lines.in_words(item))

    def draw(self, shot: Snapshot) -> None:
        """Redraw, unless it was done a moment ago."""
        if self._clock.monotonic() - self._drawn_at < self._redraw_s * 0.9:
            return
        self._drawn_at = self._clock.monotonic()
        self._live.update(self._fitted(shot), refresh=True)

    def end(self, shot: Snapshot) -> None:
        """Leave the summary on the terminal instead of the screen."""
        self._live.update(Text(), refresh=True)
        self._live.stop()
        self._console.print(screen.summary(shot))

    def _is_new(self, entry: Entry) -> bool:
        """Every rank reports its first step of a cycle; one of them is enough here."""
        if not isinstance(entry.record, Progress):
            return True
        cycle = (entry.record.replica, entry.record.generation, entry.record.cycle)
        known, self._stepped = cycle == self._stepped, cycle
        return not known

    def _fitted(self, shot: Snapshot) -> RenderableType:
        height = self._console.height
        room = height - RESERVED_LINES
        page = screen.render(shot, most_nodes=max(4, room), most_ranks=max(3, room // 4))
        used = len(self._console.render_lines(page))
        parts = [page]
        room = height - used - 1
        events = list(self._events)[-max(0, min(MOST_EVENTS, room - 1)) :] if room > 1 else []
        if events:
            parts += [_title("events"), *(_one_line(event, "dim") for event in events)]
            room -= len(events) + 1
        log = self._log_tail(min(MOST_LOG_LINES, room - 1)) if room > 1 else []
        if log:
            parts += [_title("output"), *(_one_line(line) for line in log)]
        return Group(*parts)

    def _log_tail(self, most: int) -> list[str]:
        if self._folder is None or not self._folder.job_log.is_file():
            return []
        with self._folder.job_log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="backslashreplace")
        return [line.rstrip("\r") for line in text.split("\n") if line][-most:]


def _title(text: str) -> Rule:
    return Rule(Text(text, "dim"), align="left", style="dim")


def _one_line(text: str, style: str = "") -> Text:
    line = Text.from_ansi(coloured(text.rpartition("\r")[2]), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(10_000)
    return line
