"""What the service holds: its inquiries in memory and in the state folder, and threads for slow file systems."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

import msgspec

from nvrx_slurm.attribution.service.lifecycle import InquiryRecord
from nvrx_slurm.attribution.service.metrics import Metrics
from nvrx_slurm.attribution.service.wire import State, id_of
from nvrx_slurm.errors import MalformedRecord, UsageError
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.ownership import open_private_folder
from nvrx_slurm.util.threads import in_thread


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """How much is held, and for how long."""

    queued: int = 256
    open: int = 4096
    kept: int = 10_000
    kept_for_s: float = 7 * 86400.0
    followed_for_s: float = 900.0
    """A progressive inquiry that no client settles is answered for good after this."""


@dataclass(slots=True)
class TrackedInquiry:
    """One inquiry. `news` is set, and another put in its place, when there is something new to read."""

    record: InquiryRecord
    news: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def notify(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class InquiryTable:
    """id → entry. A record changes through `put` alone, so that the counts are true."""

    def __init__(self, bounds: RetentionLimits) -> None:
        self.bounds = bounds
        self.counts: Counter[State] = Counter(dict.fromkeys(get_args(State), 0))
        self._followed = 0
        self._entries: dict[str, TrackedInquiry] = {}

    def __iter__(self) -> Iterator[TrackedInquiry]:
        return iter(self._entries.values())

    def get(self, identity: str) -> TrackedInquiry | None:
        return self._entries.get(identity)

    def put(self, identity: str, record: InquiryRecord) -> TrackedInquiry:
        """The entry, new or not, with this record."""
        # Taken out and put back at the end: `forget` relies on the order of the last changes.
        entry = self._entries.pop(identity, None)
        if entry is None:
            entry = TrackedInquiry(record)
        else:
            self._tally(entry.record, -1)
            entry.record = record
        self._entries[identity] = entry
        self._tally(record, 1)
        return entry

    @property
    def open(self) -> int:
        """How many there is still work for. What is merely tracked costs none, and makes way for others."""
        return self._followed + self.counts["queued"] + self.counts["running"]

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way, or wanted now."""
        return self.counts["queued"] + self.counts["running"] > 0

    def forget(self, now: float) -> list[str]:
        """Let go of what is too old, and of the oldest of what is too much, but of nothing that is worked on."""
        over, gone = len(self._entries) - self.bounds.kept, list[str]()
        for identity, entry in self._entries.items():
            record = entry.record
            if len(gone) >= over and now - record.changed_at < self.bounds.kept_for_s:
                break
            if record.state not in ("queued", "running") and not record.is_followed:
                gone.append(identity)
        for identity in gone:
            self._tally(self._entries.pop(identity).record, -1)
        return gone

    def _tally(self, record: InquiryRecord, by: int) -> None:
        self.counts[record.state] += by
        self._followed += by * record.is_followed


log = get_logger("attrsvc")

_NAME = re.compile(r"[0-9a-f]{32}\.json")
# What `write_private` leaves of a file if it is killed over it.
_HALF = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+")


class StateFolder:
    """A state folder. Its methods block; all raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, InquiryRecord]:
        """id → record of all that is kept. A file that cannot be read is left out, with a warning."""
        found: dict[str, InquiryRecord] = {}
        for path in sorted(self._folder.iterdir()):
            # This service holds the lock of the folder, so no process is writing that file now.
            if _HALF.fullmatch(path.name):
                path.unlink(missing_ok=True)
            elif _NAME.fullmatch(path.name):
                try:
                    record = decode_json(InquiryRecord, path.read_bytes(), path.name)
                except (OSError, MalformedRecord) as error:
                    log.warning("%s is left out: %s", path, error)
                else:
                    found[id_of(record.inquiry.key)] = record
        return found

    def save(self, identity: str, record: InquiryRecord) -> None:
        """A reader sees the record before or this one, never half of it."""
        write_private(self._path(identity), msgspec.json.encode(record))

    def drop(self, identities: list[str]) -> None:
        for identity in identities:
            self._path(identity).unlink(missing_ok=True)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity}.json"


@contextlib.contextmanager
def opened(folder: Path, clock: Clock) -> Iterator[StateFolder]:
    """The folder, made if need be (0700), for one service alone. Raises UsageError; UnsafePath for a folder that
    another user can write to, and so answer there for the service."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(open_private_folder(folder.resolve()))
        with locked(folder / ".service.lock", timeout_s=0.0, clock=clock):
            yield StateFolder(folder)
    except TimeoutError:
        raise UsageError(f"--state-dir {folder}: another service uses it; give each its own") from None
    except OSError as error:
        raise UsageError(f"--state-dir {folder}: cannot be written: {error.strerror or error}") from None


class RecordWriter:
    """Keeps records in `results`; without one, in memory alone."""

    def __init__(self, results: StateFolder | None, aside: FileSystemThreads, metrics: Metrics) -> None:
        self._results, self._aside, self._metrics = results, aside, metrics
        self._turn = asyncio.Lock()  # first come, first served: the record on disk is never the older one

    def load(self) -> dict[str, InquiryRecord]:
        """id → record of all that is kept. Blocks; raises OSError."""
        return {} if self._results is None else self._results.load()

    async def save(self, identity: str, record: InquiryRecord) -> None:
        """A record that cannot be written is answered all the same, as long as this process lives."""
        if self._results is not None:
            # Shielded, as is `drop`: a write whose caller is cancelled goes on in its thread, and keeps its turn.
            await asyncio.shield(self._write(partial(self._results.save, identity, record)))

    async def drop(self, identities: list[str]) -> None:
        if self._results is not None and identities:
            await asyncio.shield(self._write(partial(self._results.drop, identities)))

    async def _write(self, work: Callable[[], None]) -> None:
        async with self._turn:
            try:
                await self._aside.run(work)
            except (OSError, FileSystemTimeout) as error:
                self._metrics.unsaved.inc()
                log.error("the state folder cannot be written: %s", error)


_T = TypeVar("_T")

AT_ONCE = 32


class FileSystemTimeout(Exception):
    """The file system does not answer."""

    retry_in_s = 5.0


class FileSystemThreads:
    """Runs work in threads, `at_once` at most, and waits `timeout_s` at most for each, and for its turn."""

    def __init__(self, timeout_s: float, at_once: int = AT_ONCE) -> None:
        self._timeout_s, self._places = timeout_s, asyncio.Semaphore(at_once)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. Raises FileSystemTimeout."""
        bound, loop = asyncio.timeout(self._timeout_s), asyncio.get_running_loop()

        def release(_: object) -> None:
            # A thread may come back after the loop has closed, when nothing waits for its place any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._places.release)

        try:
            async with bound:
                await self._places.acquire()
                future = in_thread(work, "aside")
                # A thread that hangs keeps its place when its caller has given up: there are never more of them.
                future.add_done_callback(release)
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not bound.expired():  # the work itself said so
                raise
            raise FileSystemTimeout(f"the file system has not answered for {self._timeout_s:g} s") from None
