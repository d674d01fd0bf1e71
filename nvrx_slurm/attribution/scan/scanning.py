"""Scans log files, several at a time, and stops when told to."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan.blocks import blocks, excerpt, plain
from nvrx_slurm.attribution.scan.files import Unreadable, opened, pieces
from nvrx_slurm.attribution.scan.matching import Matcher, Sheet
from nvrx_slurm.attribution.scan.model import TAIL_LINES, Hit, LogFile, Scan
from nvrx_slurm.attribution.scan.prefilter import Prefilter, Searcher, prefilter_of
from nvrx_slurm.attribution.scan.prefixes import by_srun, first_stamp
from nvrx_slurm.attribution.scan.tracebacks import lines_back
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

_HEAD_BYTES = 16 << 10
_LOOK_S = 0.02
"""How often a stop is looked for while nothing comes: it is honoured even when every file hangs in a dead server."""


@dataclass(slots=True)
class _Read:
    """What came of one file, so far."""

    hits: list[Hit] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    tail: tuple[str, ...] = ()
    first_t: float | None = None
    last_t: float | None = None
    problem: str | None = None


def scan(
    logs: Sequence[LogFile], catalogue: Catalogue, *, stop: threading.Event | None = None, jobs: int = 1
) -> Scan:
    """Reads all of `logs`, `jobs` at a time, and tells which of their lines the rules recognise.

    Memory is bounded: about 8 MiB for each of `jobs`, and what is kept. Once `stop` is set it returns within 50 ms
    with what it has, and says so in `problems`. What cannot be read is a problem, not an error. Flight recorder dumps
    are passed on in `files`, unread. Raises ConfigError for a rule without literals.
    """
    return _Scanning(logs, catalogue, stop or threading.Event()).all(jobs)


class _Scanning:
    """Threads that take one file after the other. They share the order of files and a queue of results."""

    def __init__(self, logs: Sequence[LogFile], catalogue: Catalogue, stop: threading.Event) -> None:
        self._logs, self._catalogue = logs, catalogue
        self._stop, self._abandoned = stop, threading.Event()
        self._next = itertools.count()
        self._done: queue.SimpleQueue[tuple[int, _Read | BaseException]] = queue.SimpleQueue()

    def all(self, jobs: int) -> Scan:
        if self._logs:
            threading.Thread(target=self._begin, args=(jobs,), name="scan", daemon=True).start()
        done: dict[int, _Read] = {}
        while len(done) < len(self._logs) and not self._stop.is_set():
            try:
                number, read = self._done.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(read, BaseException):
                self._abandoned.set()
                raise read
            done[number] = read
        return self._scan(done)

    def _begin(self, jobs: int) -> None:
        """Compiling the rules takes a while, and a stop does not wait for it."""
        try:
            prefilter = prefilter_of(self._catalogue)
        except BaseException as error:
            self._done.put((0, error))
            return
        for _ in range(1, min(jobs, len(self._logs))):
            threading.Thread(target=self._work, args=(prefilter,), name="scan", daemon=True).start()
        self._work(prefilter)

    def _work(self, prefilter: Prefilter) -> None:
        searcher = Searcher(prefilter)
        while not self._stopped() and (number := next(self._next)) < len(self._logs):
            try:
                self._done.put((number, self._read(self._logs[number], searcher)))
            except BaseException as error:  # told to whoever waits, not to a thread's hook
                self._done.put((number, error))

    def _stopped(self) -> bool:
        return self._stop.is_set() or self._abandoned.is_set()

    def _read(self, file: LogFile, searcher: Searcher) -> _Read:
        read = _Read()
        if file.kind == "flight_recorder":
            return read
        try:
            with opened(file.path) as raw:
                self._read_text(file, raw, searcher, read)
        except Unreadable as problem:
            read.problem = str(problem)
        except Exception as error:  # what the other files tell is not lost for it
            log.exception("%s", file.path)
            read.problem = f"cannot be understood: {type(error).__name__}: {error}"
        return read

    def _read_text(self, file: LogFile, raw: IO[bytes], searcher: Searcher, read: _Read) -> None:
        changed_at = os.fstat(raw.fileno()).st_mtime
        head, stream = _peeked(_kept_whole(pieces(raw), read))
        sheet = Sheet(file, file.rank is None and by_srun(plain(head)), changed_at)
        matcher = Matcher(searcher, sheet, self._stopped)
        end = b""
        for block in blocks(stream):
            if self._stopped():
                break
            matcher.read(block)
            read.bytes_read += len(block.raw)
            end = block.window(len(block.text))
        lines = list(itertools.islice((line for line in lines_back(end) if line.strip()), 2 * TAIL_LINES))
        read.hits, read.counts = matcher.hits(), matcher.counts()
        read.tail = tuple(excerpt(line) for line in reversed(lines[:TAIL_LINES]))
        read.first_t = first_stamp(plain(head).split(b"\n"), changed_at)
        read.last_t = first_stamp(lines, changed_at)

    def _scan(self, done: dict[int, _Read]) -> Scan:
        in_order = [(str(file.path), done[number]) for number, file in enumerate(self._logs) if number in done]
        problems = [f"{path} {read.problem}" for path, read in in_order if read.problem]
        if len(done) < len(self._logs):
            problems.append(f"stopped before the end: {len(done)} of {len(self._logs)} files are read")
        return Scan(
            hits=tuple(hit for _, read in in_order for hit in read.hits),
            counts={(path, rule): count for path, read in in_order for rule, count in read.counts.items()},
            bytes_read=sum(read.bytes_read for _, read in in_order),
            files=tuple(self._logs),
            problems=tuple(problems),
            tails={path: read.tail for path, read in in_order if read.tail},
            first_t={path: read.first_t for path, read in in_order if read.first_t is not None},
            last_t={path: read.last_t for path, read in in_order if read.last_t is not None},
        )


def _kept_whole(stream: Iterator[bytes], read: _Read) -> Iterator[bytes]:
    """A stream that ends where it breaks: what came before is read all the same, and the break is a problem."""
    try:
        yield from stream
    except (Unreadable, OSError) as error:
        read.problem = str(error)


def _peeked(stream: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """A stream's first 16 KiB, and all of it."""
    taken: list[bytes] = []
    size = 0
    while size < _HEAD_BYTES and (piece := next(stream, None)) is not None:
        taken.append(piece)
        size += len(piece)
    return b"".join(taken)[:_HEAD_BYTES], itertools.chain(taken, stream)
