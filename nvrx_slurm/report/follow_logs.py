"""Following the ranks' output until the job has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.logs import Chunk, Reader
from nvrx_slurm.report.presence import Presence
from nvrx_slurm.report.source import Journal
from nvrx_slurm.util.clock import Clock, SystemClock

LOOK_S = 0.1
"""How long to wait between looks at the files; a journal event ends the wait."""

LAST_WORDS_S = 10.0
"""How long after the job's end in the journal its agents and its host may still write."""

NEW_FILES_EVERY = 10
"""Looks at the files for each look for new ones, which costs a listing; a journal event calls for one at once."""


def follow_logs(
    folder: JobFolder,
    reader: Reader,
    *,
    live: bool = True,
    clock: Clock | None = None,
    gone: Callable[[], bool] | None = None,
) -> Iterator[Chunk]:
    """The output so far and to come, through all cycles, until the job has ended and nobody runs it any more."""
    clock = clock or SystemClock()
    journal = Journal(folder, live=live, clock=clock)
    gone = gone or Presence(folder, clock=clock).gone
    ended_at: float | None = None
    over, looks = False, 0
    try:
        while True:
            yield from reader.read()
            if over:
                yield from reader.rest()
                return
            news = journal.poll(LOOK_S)
            looks += 1
            now = clock.monotonic()
            ended_at = (ended_at or now) if journal.ended else None  # a requeued job begins again
            over = not news and (gone() or now - (ended_at or now) >= LAST_WORDS_S)  # then one look more
            if news or over or looks % NEW_FILES_EVERY == 0:
                reader.look()
    finally:
        journal.close()
