"""Jobs that are followed by readers that stay: the live screen of many jobs, and the metrics' server.

Each look reads what is new of each journal, and costs nothing for what is old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from nvrx_slurm.errors import UNREADABLE
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.jobs import read_plan
from nvrx_slurm.report.presence import ASK_SLURM_EVERY_S, OutsideState, Presence, still_in_slurm
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import JobFold
from nvrx_slurm.util.clock import SystemClock


class FollowedJob:
    """One job, read on at each look."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.history = JobTimeline(keeps_spans=False)
        self._journal = Journal(folder, beats=True)
        self._fold: JobFold | None = None
        self._presence, self._clock = Presence(folder), SystemClock()
        self._outside, self._ask_at = OutsideState(), float("-inf")

    def close(self) -> None:
        self._journal.close()

    def look(self) -> Snapshot:
        """The job now. Raises OSError, SlurmUnreachable."""
        # At the first look, not before: a job in the queue has no plan yet.
        if self._fold is None:
            self._fold = JobFold(read_plan(self.folder), [self.history])
        items = self._journal.catch_up()
        for item in items:
            self._fold.take(item)
        # A job that reports lives: Slurm need not be asked.
        if items:
            self._presence.heard()
        has_ended = self._journal.ended and not snapshot.begins_again(
            self._fold.view, self.folder.read_info(), self.folder.read_result()
        )
        if not has_ended:
            self._outside = self._presence.ask()
        elif self._clock.monotonic() >= self._ask_at:  # it may be requeued: only Slurm can say so
            self._ask_at = self._clock.monotonic() + ASK_SLURM_EVERY_S
            self._outside = OutsideState(slurm_says=still_in_slurm(self.folder))
        return snapshot.snap(
            self._fold.view,
            self.folder,
            outside=self._outside,
            store_now=self._journal.store_time(),
            store_error=None if self._journal.ended else self._journal.store_error,
        )


class FollowedJobs:
    """Several of them. Leaving the context closes their connections."""

    def __init__(self, folders: Iterable[JobFolder]) -> None:
        self.jobs = [FollowedJob(folder) for folder in folders]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            job.close()

    def look(self) -> list[tuple[Snapshot, JobTimeline]]:
        """Each job as it is now. Of several one that cannot be read is left out: `ls` says what is wrong with it."""
        found = []
        for job in self.jobs:
            try:
                found.append((job.look(), job.history))
            except UNREADABLE:
                if len(self.jobs) == 1:
                    raise
        return found
