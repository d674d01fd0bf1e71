"""The journal's copy in the job folder: `events.jsonl`, written by a thread of its own.

The store is the source; this copy is what is left when the job and its store are gone. A new controller looks up the
newest whole entry, cuts off a torn line, and goes on from there, so no entry is missing. A controller that was frozen
in a commit, and replaced meanwhile, may still append the entries of that commit: readers leave them out. What a full
disk does not take is kept, and tried again with the next entries and at the end.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.records import Entry, entries_from_json, entry_from_json, entry_to_json
from nvrx_slurm.util.files import journal_parts, open_log
from nvrx_slurm.util.log import get_logger

log = get_logger("controller")

ROTATE_BYTES = 64 << 20
_TAIL_BYTES = 1 << 20


def last_number(path: Path) -> int:
    """The number of the newest whole entry in the file, after a torn last line has been cut off; 0: there is none."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _TAIL_BYTES))
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(start + whole)
    # Whole lines alone are decoded at once, which takes a fraction of the time: a new controller waits for this.
    first = data.find(b"\n") + 1 if start else 0
    # Not of the last line: a controller that was replaced may have written that.
    return max((entry.n for entry in entries_from_json(data[first:whole])), default=0)


def read_copy(path: Path) -> list[Entry]:
    """Every whole entry of the copy once, its rotated parts first."""
    entries = list[Entry]()
    for part in [*journal_parts(path), path]:
        for line in part.read_bytes().splitlines() if part.exists() else ():
            try:
                entries.append(entry_from_json(line))
            except MalformedRecord:
                log.warning("a torn line in the journal's copy is left out")
    return in_order(entries)


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Without those that a controller has copied after the one that replaced it."""
    kept = list[Entry]()
    for entry in entries:
        if not kept or entry.n > kept[-1].n:
            kept.append(entry)
    return kept


class Mirror:
    """Appends entries to `path` in order; a slow file system delays the copy, never the controller."""

    def __init__(self, path: Path, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._queue: queue.SimpleQueue[Sequence[Entry] | None] = queue.SimpleQueue()
        self._kept = bytearray()  # lines that are not in the file yet
        self._file: int | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._write, name="mirror", daemon=True)

    def start(self, journal: Sequence[Entry]) -> None:
        """Catch up with the journal as the store has it, then follow."""
        # The controller before may have been killed between a commit and its copy.
        last = self.last_number()
        self._queue.put([entry for entry in journal if entry.n > last])
        self._thread.start()

    def last_number(self) -> int:
        """The number of the newest whole entry in the copy; 0: it is empty."""
        parts = self._path.parent.glob("events.*.jsonl")
        return last_number(self._path) or max(map(last_number, parts), default=0)

    def add(self, entries: Sequence[Entry]) -> None:
        """Copy entries that the store has taken."""
        self._queue.put(entries)

    def close(self, timeout_s: float) -> None:
        """Write out what is queued; logs an error if that takes longer than `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error(
                "%s could not be written in %.0f s; the end of the journal is missing there", self._path, timeout_s
            )

    def _write(self) -> None:
        while (entries := self._queue.get()) is not None:
            if entries:
                self._kept += b"".join(entry_to_json(entry) + b"\n" for entry in entries)
                self._append()
        # Once more, for what a full disk has not taken.
        self._append()
        if self._kept:
            log.error("%s: the last %d entries of the journal are missing there", self._path, self._kept.count(b"\n"))
        if self._file is not None:
            os.close(self._file)

    def _append(self) -> None:
        """Write what is kept; what cannot be written stays kept, for the next time."""
        if not self._kept:
            return
        try:
            if self._file is None or os.fstat(self._file).st_size > self._rotate_bytes:
                # A full file is renamed first, and closed only once there is another: so one is always open.
                full = self._file
                if full is not None and self._path.exists():
                    # After the newest, not by their count: a user may have packed or removed old ones.
                    parts = journal_parts(self._path)
                    number = int(parts[-1].name.split(".")[1]) + 1 if parts else 1
                    self._path.rename(self._path.with_name(f"events.{number}.jsonl"))
                file = open_log(self._path)
                if full is not None:
                    os.close(full)
                self._file = file
            self._write_kept(self._file)
        except OSError as error:
            if not self._warned:
                log.error("%s: %s; what is missing there comes later, and the store has it", self._path, error)
        self._warned = bool(self._kept)

    def _write_kept(self, file: int) -> None:
        """Only whole lines stay in the file, after any error. Raises OSError."""
        before, written = os.fstat(file).st_size, 0
        try:
            while written < len(self._kept):
                written += os.write(file, self._kept[written:])
        except OSError:
            written = self._kept.rfind(b"\n", 0, written) + 1
            os.ftruncate(file, before + written)
            raise
        finally:
            del self._kept[:written]
