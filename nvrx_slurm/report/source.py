"""Where a reader's entries come from: first the folder, then the store while the job runs, then the folder again.

Entries are numbered without a gap, so changing the source loses none and repeats none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, JobEnded, JobStarted
from nvrx_slurm.report.journal_file import JournalFile
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.presence import Presence
from nvrx_slurm.util.clock import Clock, SystemClock

if TYPE_CHECKING:
    from nvrx_slurm.report.journal_stream import JournalStream

# How often the journal's file is looked at where no store answers: it may lie on another host's file system.
FILE_POLL_S = 0.1

RECONNECT_S = 1.0
WAIT_S = 0.5


class Journal:
    """A reader's place in one job's journal.

    `live=False` reads the folder only. `beats=True` passes the agents' heartbeats on too, which only the store has.
    """

    def __init__(
        self,
        folder: JobFolder,
        *,
        after: int = 0,
        live: bool = True,
        beats: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._folder = folder
        self._live, self._beats = live, beats
        self._clock = clock or SystemClock()
        self._file = JournalFile(folder, after=after)
        self._stream: JournalStream | None = None
        self._connect_at = 0.0
        self._fresh = True
        self.n = after
        self.ended = False
        self.store_error: str | None = None
        """Why the store is not read although it should be there; None: it is, or need not be."""

    def close(self) -> None:
        """Close the connection to the store. A later `poll` may open another one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def poll(self, wait_s: float = 0.0) -> list[Entry | ReceivedHeartbeat]:
        """What is new. If nothing is, waits for it, `wait_s` at most; an empty list may come sooner."""
        if self._fresh:  # the folder has most of it, and costs the store nothing
            self._fresh = False
            if found := self._from_file():
                return found
        if (stream := self._connect()) is not None:
            try:
                return self._accept(stream.read(wait_s))
            except StoreUnreachable as error:
                self._gave_up(error)
        found = self._from_file()
        if not found and wait_s > 0:
            self._clock.sleep(min(wait_s, FILE_POLL_S))
            found = self._from_file()
        return found

    def catch_up(self) -> list[Entry | ReceivedHeartbeat]:
        """Everything so far, without waiting."""
        found = self.poll()
        # An error behind the first part must not lose it: it is not read again. If it lasts, the next call raises it.
        with contextlib.suppress(OSError):
            while more := self.poll():
                found += more
                if any(isinstance(item, ReceivedHeartbeat) for item in more):
                    break  # agents go on sending heartbeats: what has arrived is recent enough
        return found

    def store_time(self) -> float | None:
        """The store's clock, to which the times of heartbeats compare; None while it is not read."""
        if self._stream is None:
            return None
        try:
            return self._stream.time()
        except StoreUnreachable as error:
            self._gave_up(error)
            return None

    def _from_file(self) -> list[Entry | ReceivedHeartbeat]:
        # The store may have given more than the folder has: its mirror is behind.
        self._file.skip_to(self.n)
        return self._accept(self._file.read())

    def _accept(self, items: Iterable[Entry | ReceivedHeartbeat]) -> list[Entry | ReceivedHeartbeat]:
        new: list[Entry | ReceivedHeartbeat] = []
        for item in items:
            if isinstance(item, Entry):
                # The folder's journal and the store's overlap: each has entries that the other has given already. And
                # an entry that stands again behind a newer one is a copy.
                if item.n <= self.n:
                    continue
                self.n = item.n
                if isinstance(item.record, (JobEnded, JobStarted)):  # a requeued job starts again after it ended
                    self.ended = isinstance(item.record, JobEnded)
            new.append(item)
        return new

    def _connect(self) -> JournalStream | None:
        """The stream to read, if there is one; tries again for one once a second."""
        is_due = self._live and not self.ended and self._clock.monotonic() >= self._connect_at
        if self._stream is not None or not is_due:
            return self._stream
        self._connect_at = self._clock.monotonic() + RECONNECT_S
        address = self._folder.read_store()
        if address is None:
            self.store_error = None
            return None
        from nvrx_slurm.report.journal_stream import JournalStream  # a job that has ended needs no signatures

        self._stream = JournalStream(address, after=self.n, beats=self._beats)
        return self._stream

    def _gave_up(self, error: StoreUnreachable) -> None:
        self.store_error = str(error)
        self._connect_at = self._clock.monotonic() + RECONNECT_S
        self.close()


def so_far(folder: JobFolder, *, live: bool = True) -> list[Entry]:
    """The entries that there are now, oldest first. Raises OSError if the folder cannot be read."""
    with contextlib.closing(Journal(folder, live=live)) as journal:
        return [item for item in journal.catch_up() if isinstance(item, Entry)]


def follow(folder: JobFolder) -> Iterator[Entry]:
    """All entries, those to come included, until the job has ended.

    Each exactly once, also when the store is lost. Also ends, after a last look, when no process runs the job any
    more. Each wait inside is bounded.
    """
    presence, last_look = Presence(folder), False
    with contextlib.closing(Journal(folder)) as journal:
        while True:
            items = journal.poll(0.0 if last_look else WAIT_S)
            yield from (item for item in items if isinstance(item, Entry))
            if not items and (journal.ended or last_look):
                return
            # What the last process wrote before it ended may not have been there at the look before.
            last_look = not items and presence.gone()
