"""Watching a job until it has ended: a live screen on a terminal, the journal's lines elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.cluster.ending import MAY_GO_ON
from nvrx_slurm.cluster.states import state_of_word
from nvrx_slurm.errors import EXIT_RETRY
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.jobs import error_without_folder, find_job, named_job, read_plan
from nvrx_slurm.report.logs import MergedReader
from nvrx_slurm.report.model import JobView
from nvrx_slurm.report.presence import OutsideState, Presence, still_in_slurm
from nvrx_slurm.report.sentences import Lines
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import JobFold, new_view
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.sanitize import one_line, shown
from nvrx_slurm.util.terminal import as_is, is_unread

if TYPE_CHECKING:
    from rich.console import Console

    from nvrx_slurm.report.screen import Monitor

_OF_A_RANK = re.compile(rb"\[[\w.-]+ \d+\] ")
REDRAW_S = 0.125
QUEUE_LOOK_S = 0.5
REQUEUE_LOOK_S = 2.0
# How long a job that Slurm has started may be without a folder: its batch host imports from a shared file system.
FOLDER_S = 30.0
# How long a job is watched that reports nothing while Slurm answers nothing. A restart of slurmctld is shorter.
GIVE_UP_S = 300.0


def watch(base: Path, job_id: str, *, output: bool = False, clock: Clock | None = None) -> int:
    """Show a job until it has ended, and then how it went. Returns the job's exit code.

    It waits for a job in Slurm's queue. 75 if no process runs the job any more and it left no exit code.
    On a terminal a live screen; elsewhere the journal's lines. `output`: beside them, or above the screen, each line
    that a worker prints, marked as in the job's merged log; then the job has ended when its last process has.

    Raises UsageError for an unknown job, SlurmUnreachable where Slurm answers nothing and the job reports nothing for
    `GIVE_UP_S`, and BrokenPipeError as soon as nothing can read the output: the terminal is closed, or the reader of
    the pipe is gone.
    """
    clock = clock or SystemClock()
    try:
        if not sys.stdout.isatty():
            return _until_ended(base, job_id, EventPrinter(), clock, output)
        from rich.console import Console

        console = Console(highlight=False, file=as_is(sys.stdout))  # the live screen moves the cursor
        if not console.is_terminal:
            return _until_ended(base, job_id, EventPrinter(console), clock, output)
        from nvrx_slurm.report.screen import Monitor

        with Monitor(console, clock, REDRAW_S, tail=not output) as monitor:
            return _until_ended(base, job_id, monitor, clock, output)
    except OSError as error:  # a write to a closed terminal fails with EIO, also when the screen is taken down
        if is_unread(sys.stdout):
            raise BrokenPipeError(errno.EPIPE, "nothing reads the output any more") from error
        raise


class EventPrinter:
    """Prints each event when it comes, and a plain summary at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self._file = console.file if console else sys.stdout
        self._lines = Lines()
        self._said: str | None = None

    def take(self, entry: Entry, view: JobView) -> None:
        print(self._lines.in_words(entry), file=self._file, flush=True)

    def print_output(self, lines: list[str]) -> None:
        print("\n".join(map(shown, lines)), file=self._file, flush=True)

    def draw(self, shot: Snapshot) -> None:
        said = f"{shot.reason} {shot.queue.reason if shot.queue else ''}"
        if shot.state == "pending" and said != self._said:
            self._said = said
            why = f": {shot.queue.describe(shot.now)}" if shot.queue else ""
            print(one_line(f"pending: {shot.reason or 'not started yet'}{why}"), file=self._file, flush=True)

    def end(self, shot: Snapshot) -> None:
        from nvrx_slurm.report import plain

        print(f"\n{plain.summary(shot)}", file=self._file, flush=True)


class WorkersLines:
    """What the workers print, from the job's merged log, in which the job's own processes write too."""

    def __init__(self, folder: JobFolder) -> None:
        self._log, self._partial = MergedReader(folder), b""

    def new(self) -> list[str]:
        """The whole lines since the last call."""
        self._log.look()
        data = self._partial + b"".join(chunk.data for chunk in self._log.read())
        *lines, self._partial = data.split(b"\n")
        return [line.decode(errors="backslashreplace") for line in lines if _OF_A_RANK.match(line)]


def _until_ended(base: Path, job_id: str, face: EventPrinter | Monitor, clock: Clock, output: bool) -> int:
    """Wait for the job's folder, then read its journal on until the job has ended. Returns its exit code."""
    folder = named_job(base, job_id)
    presence = Presence(folder, clock=clock, gives_up_s=GIVE_UP_S)
    started_at: float | None = None
    while not os.path.isdir(folder.path):  # its batch host makes it, soon after the job has left Slurm's queue
        _check_is_read()
        outside = OutsideState()
        with contextlib.suppress(OSError):  # a base folder that cannot be entered
            outside = presence.ask()
        if outside.slurm_says in (None, "UNKNOWN"):
            folder = find_job(base, job_id)
            break
        if state_of_word(outside.slurm_says) not in snapshot.QUEUED:
            started_at = clock.monotonic() if started_at is None else started_at
            is_late = outside.over or clock.monotonic() - started_at >= FOLDER_S
            if is_late and not os.path.isdir(folder.path):
                raise error_without_folder(base, job_id, outside.slurm_says)
        face.draw(snapshot.snap(new_view(), folder, outside=outside, clock=clock))
        clock.sleep(QUEUE_LOOK_S)
    with contextlib.closing(Journal(folder, beats=True, clock=clock)) as journal:
        shot = _read_on(folder, journal, face, clock, WorkersLines(folder) if output else None)
    face.end(shot)
    return EXIT_RETRY if shot.exit_code is None else shot.exit_code


def _read_on(
    folder: JobFolder, journal: Journal, face: EventPrinter | Monitor, clock: Clock, printed: WorkersLines | None
) -> Snapshot:
    """Draw the job after each piece of news. Returns its last state."""
    presence = Presence(folder, clock=clock, gives_up_s=GIVE_UP_S)
    fold: JobFold | None = None
    outside = OutsideState()
    # Between two generations: from an end after which Slurm may requeue the job, until its journal goes on.
    between, ask_at = False, float("-inf")
    while True:
        _check_is_read()
        # Nothing more is waited for once no process runs the job.
        items = journal.poll(0.0 if outside.over else REDRAW_S)
        if fold is None and items:  # the plan is in the folder before the journal is
            fold = JobFold(read_plan(folder), [face])
        for item in items:
            assert fold is not None
            fold.take(item)
        if printed is not None and (lines := printed.new()):
            face.print_output(lines)
        view = fold.view if fold else new_view()
        shot = snapshot.snap(
            view,
            folder,
            outside=outside,
            store_now=journal.store_time(),
            store_error=None if journal.ended else journal.store_error,  # the store ends with its job
            clock=clock,
        )
        # 1. It reports: it lives, and nothing else need be asked.
        if items:
            face.draw(shot)
            presence.heard()
            outside, between, ask_at = OutsideState(), False, float("-inf")
            continue
        # 2. It is silent, and has not ended. Where the workers' output is shown, the last process has to end: agents
        # write the last lines of their workers after they have reported that they leave.
        if not (between or outside.over or (journal.ended and printed is None)):
            face.draw(shot)
            outside = presence.ask()
            continue
        # 3. It has ended, for good or until Slurm requeues it.
        result = folder.read_result()
        # The next generation removes the result of the one before, and journals its first entry seconds later.
        if result is not None:
            between = result.exit_code in MAY_GO_ON
        if not between:
            return shot
        # Until Slurm has cleared the job away, it has not ended: `wait` waits too.
        if clock.monotonic() >= ask_at:
            ask_at = clock.monotonic() + REQUEUE_LOOK_S
            if result is None:  # the next generation runs, or has died before it journaled anything
                outside = presence.ask()
                is_over = outside.over
            else:
                outside = OutsideState(slurm_says=still_in_slurm(folder, clock=clock))
                is_over = outside.slurm_says is None
            if is_over:
                return snapshot.snap(view, folder, outside=outside, clock=clock)
        face.draw(shot)


def _check_is_read() -> None:
    """A quiet job prints nothing, so no write would fail, and the watch would go on without a reader."""
    if is_unread(sys.stdout):
        raise BrokenPipeError(errno.EPIPE, "nothing reads the output any more")
