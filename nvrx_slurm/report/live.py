"""Watching a job until it has ended: a live screen on a terminal, the journal's lines elsewhere."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.cluster.base import folder_name
from nvrx_slurm.errors import EXIT_RETRY
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.jobs import find_job, read_plan
from nvrx_slurm.report.model import Heard
from nvrx_slurm.report.presence import Outside, Presence
from nvrx_slurm.report.sentences import Lines
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import JobView, new_view
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.sanitize import one_line
from nvrx_slurm.util.terminal import as_is, is_unread

if TYPE_CHECKING:
    from rich.console import Console

    from nvrx_slurm.report.monitor import Monitor

REDRAW_S = 0.125
QUEUE_LOOK_S = 0.5
GIVE_UP_S = 300.0
"""How long a job is watched that reports nothing while Slurm answers nothing. A restart of slurmctld is shorter."""


def watch(base: Path, job_id: str, *, console: Console | None = None, clock: Clock | None = None) -> int:
    """Show a job until it has ended, and then how it went. Returns the job's exit code.

    It waits for a job in Slurm's queue. 75 if no process runs the job any more and it left no exit code.
    On a terminal a live screen; elsewhere the journal's lines. Raises UsageError for an unknown job, SlurmUnreachable
    where Slurm answers nothing and the job reports nothing for `GIVE_UP_S`, and BrokenPipeError as soon as nothing
    can read the output: the terminal is closed, or the reader of the pipe is gone.
    """
    clock = clock or SystemClock()
    try:
        if console is None and not sys.stdout.isatty():
            return _Watch(base, job_id, _Printer(), clock).run()
        from rich.console import Console

        console = console or Console(highlight=False, file=as_is(sys.stdout))  # the live screen moves the cursor
        if not console.is_terminal:
            return _Watch(base, job_id, _Printer(console), clock).run()
        from nvrx_slurm.report.monitor import Monitor

        with Monitor(console, clock, REDRAW_S) as monitor:
            return _Watch(base, job_id, monitor, clock).run()
    except OSError as error:  # a write to a closed terminal fails with EIO, also when the screen is taken down
        if is_unread(sys.stdout):
            raise BrokenPipeError(errno.EPIPE, "nothing reads the output any more") from error
        raise


class _Printer:
    """Prints each event when it comes, and a plain summary at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self._file = console.file if console else sys.stdout
        self._lines = Lines()
        self._said: str | None = None

    def take(self, items: list[Entry | Heard], folder: JobFolder) -> None:
        for item in items:
            if isinstance(item, Entry):
                print(self._lines.in_words(item), file=self._file, flush=True)

    def draw(self, shot: Snapshot) -> None:
        if shot.state == "pending" and shot.reason != self._said:
            self._said = shot.reason
            print(one_line(f"pending: {shot.reason}"), file=self._file, flush=True)

    def end(self, shot: Snapshot) -> None:
        from nvrx_slurm.report import plain

        print(f"\n{plain.summary(shot)}", file=self._file, flush=True)


class _Watch:
    """One watched job: reads its journal on, keeps its view, and passes both to the display."""

    def __init__(self, base: Path, job_id: str, face: _Printer | Monitor, clock: Clock) -> None:
        self._base, self._job_id, self._face, self._clock = base, job_id, face, clock

    def run(self) -> int:
        folder = self._await_folder()
        journal = Journal(folder, beats=True, clock=self._clock)
        try:
            shot = self._until_ended(folder, journal)
        finally:
            journal.close()
        self._face.end(shot)
        return EXIT_RETRY if shot.exit_code is None else shot.exit_code

    def _await_folder(self) -> JobFolder:
        """The job's folder, once there is one. Waits as long as Slurm has the job in its queue."""
        path = self._base / folder_name(self._job_id)
        presence = Presence(JobFolder(path), clock=self._clock, gives_up_s=GIVE_UP_S)
        while not path.is_dir():
            _check_is_read()
            outside = presence.ask()
            if outside.over or outside.slurm_says in (None, "UNKNOWN"):
                return find_job(self._base, self._job_id)
            self._face.draw(snapshot.snap(new_view(), JobFolder(path), outside=outside, clock=self._clock))
            self._clock.sleep(QUEUE_LOOK_S)
        return JobFolder(path)

    def _until_ended(self, folder: JobFolder, journal: Journal) -> Snapshot:
        presence = Presence(folder, clock=self._clock, gives_up_s=GIVE_UP_S)
        view: JobView | None = None
        outside = Outside()
        while True:
            _check_is_read()
            items = journal.poll(0.0 if outside.over else REDRAW_S)
            if view is None and items:  # the plan is there before the journal is
                view = new_view(read_plan(folder))
            for item in items:
                assert view is not None
                snapshot.grow(view, item)
            self._face.take(items, folder)
            shot = snapshot.snap(
                view or new_view(),
                folder,
                outside=outside,
                store_now=journal.store_time(),
                store_error=journal.store_error,
                clock=self._clock,
            )
            if not items and (outside.over or journal.ended):
                return shot
            self._face.draw(shot)
            if items:
                presence.heard()
            outside = Outside() if items else presence.ask()


def _check_is_read() -> None:
    """A quiet job prints nothing, so no write would fail, and the watch would go on without a reader."""
    if is_unread(sys.stdout):
        raise BrokenPipeError(errno.EPIPE, "nothing reads the output any more")
