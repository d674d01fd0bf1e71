"""Scans log files, one after the other."""

from __future__ import annotations

import itertools
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan.blocks import KEPT_OF_A_LINE_BYTES, LogBlock, blocks, excerpt, readable
from nvrx_slurm.attribution.scan.files import Unreadable, opened, pieces
from nvrx_slurm.attribution.scan.matching import LineMatcher, Sheet
from nvrx_slurm.attribution.scan.model import TAIL_LINES, FileScan, Hit, LogFile, Scan
from nvrx_slurm.attribution.scan.prefilter import Searcher, prefilter_of
from nvrx_slurm.attribution.scan.prefixes import by_srun, first_stamp
from nvrx_slurm.attribution.scan.tracebacks import lines_back
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

_HEAD_BYTES = 16 << 10
# How often `stop` is looked at while no result comes, as when every file hangs on a dead file server.
_LOOK_S = 0.02

_FileResult = tuple[FileScan, list[Hit]]


def scan(logs: Sequence[LogFile], catalogue: Catalogue, *, stop: threading.Event | None = None) -> Scan:
    """Reads all of `logs`, and finds the lines that the rules recognise.

    Memory is bounded: about 8 MiB, and what is kept. Once `stop` is set it returns within 50 ms with what it has, and
    says so in `problems`. What cannot be read is a problem, not an error. Flight recorder dumps are passed on in
    `files`, unread. Raises ConfigError for a rule without literals.
    """
    stop = stop or threading.Event()
    results: queue.SimpleQueue[_FileResult | BaseException] = queue.SimpleQueue()

    def work() -> None:
        # In a thread: compiling the rules takes a while, and a file system may hang; a stop waits for neither.
        try:
            searcher = Searcher(prefilter_of(catalogue))
            for file in logs:
                if stop.is_set():
                    return
                results.put(_scan_file(file, searcher, stop.is_set))
        except BaseException as error:  # raised by the caller of `scan`, not printed by the thread's hook
            results.put(error)

    if logs:
        threading.Thread(target=work, name="scan", daemon=True).start()
    done: list[_FileResult] = []
    # A thread that hangs in a file system is left behind: it is a daemon, and takes no other file once `stop` is set.
    while len(done) < len(logs) and not stop.is_set():
        try:
            result = results.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if isinstance(result, BaseException):
            raise result
        done.append(result)

    in_order = [(log, *result) for log, result in zip(logs, done, strict=False)]
    problems = [f"{log.name} {read.problem}" for log, read, _ in in_order if read.problem]
    if len(done) < len(logs):
        problems.append(f"stopped before the end: {len(done)} of {len(logs)} files are read")
    return Scan(
        hits=tuple(hit for _, _, hits in in_order for hit in hits),
        files=tuple(logs),
        reads={log.path: read for log, read, _ in in_order},
        problems=tuple(problems),
    )


def _scan_file(file: LogFile, searcher: Searcher, stopped: Callable[[], bool]) -> _FileResult:
    read, hits = FileScan(), list[Hit]()
    if file.kind == "flight_recorder":
        return read, hits

    def without_error(stream: Iterator[bytes]) -> Iterator[bytes]:
        # What breaks the stream is the file's problem; what came before it is scanned.
        try:
            for piece in stream:
                read.size_bytes += len(piece)
                yield piece
        except (Unreadable, OSError) as error:
            read.problem = str(error)

    try:
        with opened(file.path) as raw:
            changed_at = os.fstat(raw.fileno()).st_mtime
            stream = without_error(pieces(raw))
            # The first 16 KiB show whether srun labelled the file.
            taken: list[bytes] = []
            size = 0
            while size < _HEAD_BYTES and (piece := next(stream, None)) is not None:
                taken.append(piece)
                size += len(piece)
            head = readable(b"".join(taken)[:_HEAD_BYTES])
            matcher = LineMatcher(searcher, Sheet(file, file.rank is None and by_srun(head), changed_at), stopped)
            starts = StartSearch(head)
            end, searched = b"", 0
            for block in blocks(itertools.chain(taken, stream)):
                if stopped():
                    break
                matcher.read(block)
                starts.read(block)
                end, searched = block.window(len(block.text)), searched + len(block.raw)
            else:
                if left_out := read.size_bytes - searched:
                    long = f"has lines of more than {KEPT_OF_A_LINE_BYTES >> 10} KiB: {left_out} bytes of them"
                    read.problem = read.problem or f"{long} are not searched"
            lines = list(itertools.islice((line for line in lines_back(end) if line.strip()), 2 * TAIL_LINES))
            hits = matcher.hits()
            read.starts = starts.starts(hits[0].offset) if hits else ()
            read.tail = tuple(excerpt(line) for line in reversed(lines[:TAIL_LINES]))
            read.head = next((excerpt(line) for line in head.split(b"\n") if line.strip()), "")
            read.first_t = first_stamp(head.split(b"\n"), changed_at)
            read.last_t = first_stamp(lines, changed_at)
    except Unreadable as problem:
        read.problem = str(problem)
    except Exception as error:  # what was found in the other files is not lost
        log.exception("%s", file.path)
        read.problem = f"cannot be understood: {type(error).__name__}: {error}"
    return read, hits


# ---- where a file's later runs may begin

_FIRST_LINES = 24
_PARTS = 8
_SHORTEST = 10
_LONGEST = 60
_TEXT = re.compile(rb"[^\d\n]+")
_LETTERS = re.compile(rb"[A-Za-z]")
# Within this distance the first lines come again together.
_SAME_START_BYTES = 16 << 10

# A text that stands in more places than this is no banner.
_MOST = 512


_BANNERS = (
    b"Setting OMP_NUM_THREADS environment variable for each process",
    b"Starting elastic_operator with launch configs",
    b"WORLD INFO DICT: ",
    b"Initializing distributed: GLOBAL_RANK: 0,",
    b"System Information: Jax Version: ",
)


class StartSearch:
    """Finds where a file's later runs may begin: a requeued job appends to one log, and so does a script that is run
    again.

    A run begins as the one before it did: two or more of the file's first lines come again, near to each other and in
    order, but for their numbers. So what a batch script prints first need not be known.
    """

    def __init__(self, head: bytes) -> None:
        """`head`: the beginning of the file's text."""
        self._places: dict[bytes, list[int]] = {}
        self._banners: dict[bytes, list[int]] = {text: [] for text in _BANNERS}
        for line in head.split(b"\n")[:_FIRST_LINES]:
            text = max(_TEXT.findall(line), key=len, default=b"").strip()[:_LONGEST]
            if len(text) >= _SHORTEST and _LETTERS.search(text) and text not in self._places:
                self._places[text] = []
            if len(self._places) == _PARTS:
                break

    def read(self, block: LogBlock) -> None:
        for text, places in (*self._places.items(), *self._banners.items()):
            at = 0
            while len(places) <= _MOST and (at := block.text.find(text, at)) >= 0:
                places.append(block.offset_of(block.bounds(at)[0]))
                at += len(text)

    def starts(self, first_hit: int) -> tuple[int, ...]:
        """Offsets of lines, in order; the file's own beginning is none, and what stands below the first line that a
        rule recognised is no first line."""
        known = [sorted(places) for places in self._places.values() if 0 < len(places) <= _MOST]
        texts = [places[1:] for places in known if places[0] < first_hit]
        # The banner of a known launcher suffices alone; its first one is that of the file's first run.
        found = {offset for banner in self._banners.values() for offset in sorted(banner)[1:]}
        recent: deque[tuple[int, int]] = deque()
        for offset, number in sorted((offset, number) for number, places in enumerate(texts) for offset in places):
            while recent and offset - recent[0][0] > _SAME_START_BYTES:
                recent.popleft()
            # A first line is a start where another one of the first lines follows in their order.
            found.update(other for other, earlier in recent if earlier < number)
            recent.append((offset, number))
        return tuple(sorted(found))
