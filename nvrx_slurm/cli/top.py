"""`nvrx-slurm top`: jobs and their ranks on a live screen."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.job_argument import folder_of_user, found_jobs, jobs_argument
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.cli.recorded_signals import exit_on_sigterm
from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.util.terminal import as_is

if TYPE_CHECKING:
    from nvrx_slurm.journal.folder import JobFolder
    from nvrx_slurm.report.live_jobs import FollowedJobs
    from nvrx_slurm.report.top import Action, ScreenLine, Top

MOST_JOBS = 50
REFRESH_S = 2.0
DUMP_S = 30.0
LOG_LINES = 500
KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown",
    "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\r": "enter", "\n": "enter",
    "\x7f": "backspace", "\x08": "backspace", "\x1b": "esc", "\x03": "q", "\x04": "q",
}  # fmt: skip
# A control sequence as a whole (ECMA-48, and `[[A` of the Linux console), or one character.
KEY = re.compile(r"\x1b(?:\[\[?[0-?]*[ -/]*[@-~]|O.)|.", re.DOTALL)
STYLES = {"good": "32", "busy": "33", "spare": "36", "bad": "31", "dim": "2", "plain": ""}


@click.command()
@jobs_argument
@folder_option
def top(job_ids: tuple[str, ...], folder: Path) -> None:
    """Jobs on a live screen. Without JOB: your jobs that have not ended.

    \b
    arrows  choose a row          enter  open a job
    /       filter, enter keeps   s, r   sort by the next column, reverse
    d       stacks of the rank    l      its output, as it comes
    esc     back                  q      quit

    Colours follow NO_COLOR. Works in 80 × 24, and over ssh.
    """
    from nvrx_slurm.report.jobs import my_jobs
    from nvrx_slurm.report.live_jobs import FollowedJobs
    from nvrx_slurm.report.snapshot import not_ended

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; `nvrx-slurm status` and `nvrx-slurm metrics` print once")
    jobs = found_jobs(job_ids, folder) if job_ids else not_ended(my_jobs(folder_of_user(folder)))[:MOST_JOBS]
    if not jobs:
        raise UsageError("no job is running or queued; name one: nvrx-slurm top JOB")
    exit_on_sigterm()  # the terminal is restored on the way out
    with FollowedJobs(jobs) as followed, Terminal() as terminal:
        run(followed, terminal)


def run(followed: FollowedJobs, terminal: Terminal) -> None:
    """Look, draw, and do what the keys say, until one of them is q."""

    from nvrx_slurm.report.top import Top
    from nvrx_slurm.util.clock import SystemClock

    screen, clock = Top(), SystemClock()
    look_at = 0.0
    while True:
        if clock.monotonic() >= look_at:
            shots = followed.look()
            screen.show([(shot, history.goodput(shot.view, shot.until)) for shot, history in shots])
            look_at = clock.monotonic() + REFRESH_S
            if (log := screen.refresh()) is not None:
                terminal.ask(followed, log)
        terminal.draw(screen)
        # Keys, answers and a change of the window's size end the wait; else the next look does.
        for key in terminal.keys(max(0.0, look_at - clock.monotonic())):
            action = screen.press(key)
            if action is not None and action.kind == "quit":
                return
            if action is not None:
                terminal.ask(followed, action)
        for action, title, text in terminal.answers():
            screen.answer(action, title, text)


class Terminal:
    """The user's terminal: keys one by one, and an alternate screen, of which only lines that change are written."""

    def __init__(self) -> None:
        self._out = as_is(sys.stdout)  # it moves the cursor; each line of the screen is free of control characters
        self._drawn: list[ScreenLine] = []
        self._size = os.terminal_size((0, 0))
        self._answers: queue.SimpleQueue[tuple[Action, str, str]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        self._coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Terminal:
        import termios
        import tty

        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        # Python goes on with a `select` that a signal interrupts (PEP 475): a byte in the pipe ends it.
        self._resized = signal.signal(signal.SIGWINCH, lambda number, frame: self._wake())
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        self._write("\x1b[?25h\x1b[?1049l")
        signal.signal(signal.SIGWINCH, self._resized)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def draw(self, screen: Top) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        if size != self._size:
            self._size, self._drawn = size, []
            self._write("\x1b[2J")
        lines = screen.lines(size.columns, size.lines)
        changed = [
            f"\x1b[{row};1H{self._styled(line)}\x1b[K"
            for row, line in enumerate(lines, 1)
            if row > len(self._drawn) or self._drawn[row - 1] != line
        ]
        self._drawn = lines
        if changed:
            self._write("".join(changed))

    def keys(self, wait_s: float) -> Iterator[str]:
        """What was pressed, by name; waits so long for it, at most."""
        ready, _, _ = select.select([sys.stdin, self._wake_r], [], [], wait_s)
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        if sys.stdin not in ready:
            return
        # Not through `sys.stdin`: `select` knows nothing of what lies in a buffer of Python's.
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:  # the terminal is closed
            yield "q"
        for key in KEY.findall(data.decode(errors="replace")):
            # A sequence without a meaning here, such as that of the right arrow, is not `esc` and some letters.
            if name := KEYS.get(key, key if len(key) == 1 else ""):
                yield name

    def ask(self, followed: FollowedJobs, action: Action) -> None:
        """Get stacks or a log in a thread of its own: the screen goes on."""
        job = next(job for job in followed.jobs if str(job.folder.path) == action.job)
        # A daemon: `q` does not wait for stacks, which take up to `DUMP_S`.
        threading.Thread(target=self._answer, args=(job.folder, action), daemon=True).start()

    def answers(self) -> Iterator[tuple[Action, str, str]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._answers.get_nowait()

    def _answer(self, folder: JobFolder, action: Action) -> None:
        what = "stacks" if action.kind == "stacks" else "last lines"
        title = f"{what} of {action.replica} rank {action.rank}, job {folder.job_id}"
        try:
            text = stacks_of(folder, action) if action.kind == "stacks" else log_of(folder, action)
        except (NvrxError, OSError) as error:
            text = str(error)
        self._answers.put((action, title, text))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"!")

    def _styled(self, line: ScreenLine) -> str:
        if not self._coloured:
            return line.text
        codes = [STYLES[line.mood], "1" if line.is_head else "", "7" if line.chosen else ""]
        style = ";".join(filter(None, codes))
        return f"\x1b[{style}m{line.text}\x1b[0m" if style else line.text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def stacks_of(folder: JobFolder, action: Action) -> str:
    """The present stacks of the rank. Raises UsageError, StoreUnreachable, WaitTimeout."""
    from nvrx_slurm.api.stack_request import StackRequest

    request = StackRequest(folder, ranks=(action.rank,), replica=action.replica)
    found = [stacks for node in request.answers(DUMP_S) for stacks in node.stacks]
    return "\n".join(stacks.text for stacks in found) or "no worker of it has answered"


def log_of(folder: JobFolder, action: Action) -> str:
    """The last lines that the rank has printed. Raises UsageError."""
    from nvrx_slurm.report.jobs import read_plan
    from nvrx_slurm.report.logs import Reader, Selection, choose

    wanted = Selection(replica=action.replica, rank=action.rank, cycle=None, streams=("out", "err"))
    reader = Reader(folder, choose(wanted, read_plan(folder), folder, may_come=False))
    reader.skip_to_last(LOG_LINES)
    return b"".join(chunk.data for chunk in reader.read()).decode(errors="backslashreplace") or "nothing so far"
