"""The ranks' output: one file per replica, generation, cycle, rank and stream; followed from cycle to cycle.

Files may lie on another host's file system, which sends no event for a change: they are looked at every 100 ms.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.presence import Presence
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.words import numbers
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.output_times import written_since

CHUNK_BYTES = 1 << 20
STREAMS = ("out", "err")
_FILE = re.compile(r"gen-(\d+)/cycle-(\d+)/rank-(\d+)\.(out|err)")


@dataclass(frozen=True, slots=True)
class Selection:
    """Whose output is wanted; None: everybody's."""

    replica: str | None = None
    rank: int | None = None
    cycle: int | None = None
    streams: tuple[str, ...] = STREAMS

    @property
    def whole_job(self) -> bool:
        """Whether the job's merged log will do."""
        return self == Selection()


@dataclass(frozen=True, slots=True, order=True)
class RankLog:
    """One file, in the order in which files are read."""

    generation: int
    cycle: int
    replica: str
    rank: int
    stream_order: int
    path: Path

    @property
    def label(self) -> bytes:
        """As the job's merged log marks its lines."""
        return f"[{self.replica} {self.rank}] ".encode()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some of a file's output."""

    file: RankLog
    data: bytes


def choose(selection: Selection, plan: Plan | None, folder: JobFolder, *, may_come: bool) -> Selection:
    """The selection with its replica settled. Raises UsageError that names the valid replicas, ranks or cycles.

    `may_come`: a cycle that is not there yet is no error, since it will be waited for.
    """
    if plan is not None:
        ranks = {replica: range(role.world_size) for replica, role in plan.replica_roles.items()}
    else:  # by the files that there are
        found = find(folder, Selection())
        ranks = {
            replica: range(1 + max(f.rank for f in found if f.replica == replica))
            for replica in sorted({file.replica for file in found})
        }
    if selection.replica is not None and selection.replica not in ranks:
        raise UsageError(f"no replica {selection.replica!r}: the job has {', '.join(ranks) or 'none yet'}")
    if selection.rank is not None:
        wanted = [selection.replica] if selection.replica else list(ranks)
        fitting = [replica for replica in wanted if selection.rank in ranks[replica]]
        if not fitting:
            worlds = "; ".join(f"{replica} has ranks {numbers(ranks[replica])}" for replica in wanted)
            raise UsageError(f"no rank {selection.rank}: {worlds or 'no replica has started yet'}")
        if len(fitting) > 1:
            raise UsageError(f"rank {selection.rank} is in {', '.join(fitting)}: choose one with --replica")
        selection = replace(selection, replica=fitting[0])
    known = {file.cycle for file in find(folder, replace(selection, cycle=None))}
    if selection.cycle is not None and selection.cycle not in known and not may_come:
        there = f"there is output of cycle {numbers(known)}" if known else "there is no output yet"
        raise UsageError(f"no output of cycle {selection.cycle}: {there}")
    return selection


def find(folder: JobFolder, selection: Selection) -> list[RankLog]:
    """The files that there are, in order: generation, cycle, replica, rank, stdout before stderr."""
    root = folder.path / "logs"
    replicas = [selection.replica] if selection.replica else sorted(path.name for path in root.glob("*"))
    cycle = "*" if selection.cycle is None else str(selection.cycle)
    rank = "*" if selection.rank is None else str(selection.rank)
    found = []
    for replica in replicas:
        for path in (root / replica).glob(f"gen-*/cycle-{cycle}/rank-{rank}.*"):
            match = _FILE.fullmatch(path.relative_to(root / replica).as_posix())
            if match and match[4] in selection.streams:
                order = STREAMS.index(match[4])
                found.append(RankLog(int(match[1]), int(match[2]), replica, int(match[3]), order, path))
    return sorted(found)


class Reader:
    """Reads the selected files on from where it stopped. Output of several ranks is passed on in whole, marked lines.

    Of each replica it watches the newest two cycles: what a dying cycle still says is not lost.
    """

    def __init__(self, folder: JobFolder, selection: Selection) -> None:
        self._folder, self._selection = folder, selection
        self._offsets: dict[RankLog, int] = {}
        self._partial: dict[RankLog, bytes] = {}
        self._watched: list[RankLog] = []
        self.look()

    def look(self) -> None:
        """Notice files that have appeared."""
        found = find(self._folder, self._selection)
        # The newest two cycles, with their generations, that each replica has output of.
        cycles: dict[str, set[tuple[int, int]]] = {}
        for file in found:
            cycles.setdefault(file.replica, set()).add((file.generation, file.cycle))
        recent = {replica: sorted(known)[-2:] for replica, known in cycles.items()}
        self._watched = [
            file
            for file in found
            # Every file is read once from its beginning; after that, only those that may still grow are looked at.
            if file not in self._offsets or (file.generation, file.cycle) in recent[file.replica]
        ]

    def read(self) -> Iterator[Chunk]:
        """What was written since the last call, file by file."""
        for file in self._watched:
            offset = self._offsets.setdefault(file, 0)
            try:
                if file.path.stat().st_size <= offset:
                    continue
                source = file.path.open("rb")
            except FileNotFoundError:  # the next `look` no longer finds it
                continue
            with source:
                source.seek(offset)
                while data := source.read(CHUNK_BYTES):
                    self._offsets[file] += len(data)
                    # Half a line of one rank must not be continued by another rank's.
                    if self._selection.rank is None:  # output of several ranks
                        *lines, partial = (self._partial.get(file, b"") + data).split(b"\n")
                        self._partial[file] = partial
                        data = b"".join(file.label + line + b"\n" for line in lines)
                    if data:
                        yield Chunk(file, data)

    def skip_to_last(self, lines: int) -> None:
        """Begin with the last so many lines of what there is. Of long files only their ends are read."""
        # From the newest file back, until it has so many lines.
        for file in reversed(self._watched):
            with contextlib.suppress(FileNotFoundError):
                self._offsets[file], lines = _last_lines(file.path, lines)

    def skip_to(self, moment: float) -> set[RankLog]:
        """Begin with what was written since the moment, or up to ten seconds before it, in those files of which the
        agent has noted that: returns them."""
        known = set()
        for file in self._watched:
            with contextlib.suppress(OSError):
                # Where the marks cannot be read, the file is read from its begin, and filtered by its stamps.
                if (offset := written_since(file.path, moment)) is not None:
                    self._offsets[file] = offset
                    known.add(file)
        return known

    def rest(self) -> Iterator[Chunk]:
        """The last lines, which have no newline."""
        for file, data in sorted(self._partial.items()):
            if data:
                yield Chunk(file, file.label + data + b"\n")
        self._partial.clear()


def end_of(path: Path, most_bytes: int) -> str:
    """The end of a file of output; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - most_bytes))
            return file.read().decode(errors="backslashreplace")
    except OSError:
        return ""


def _last_lines(path: Path, lines: int) -> tuple[int, int]:
    """Where the last so many lines of a file begin, and how many are still missing if the file has fewer."""
    with path.open("rb") as file:
        at = size = file.seek(0, 2)
        if not lines or not size:
            return size, lines
        while at > 0:
            begin = max(0, at - CHUNK_BYTES)
            file.seek(begin)
            block = file.read(at - begin)
            end = len(block) - (at == size and block.endswith(b"\n"))  # the newline that ends the last line
            while (end := block.rfind(b"\n", 0, end)) >= 0:
                lines -= 1
                if not lines:
                    return begin + end + 1, 0
            at = begin
        return 0, lines - 1


class MergedReader(Reader):
    """Reads the job's own merged log, `job.log`, in the same manner."""

    def __init__(self, folder: JobFolder) -> None:
        self._log = RankLog(0, 0, "", 0, 0, folder.job_log)
        super().__init__(folder, Selection(rank=0))  # its lines are marked already

    def look(self) -> None:
        self._watched = [self._log] if self._log.path.is_file() else []


# How long to wait between looks at the files; a journal event ends the wait.
LOOK_S = 0.1

# How long after the job's end in the journal its agents and its host may still write.
LAST_WORDS_S = 10.0

# Looks at the files for each look for new ones, which costs a listing; a journal event calls for one at once.
NEW_FILES_EVERY = 10


def follow_logs(
    folder: JobFolder,
    reader: Reader,
    *,
    clock: Clock | None = None,
    gone: Callable[[], bool] | None = None,
) -> Iterator[Chunk]:
    """The output so far and to come, through all cycles, until the job has ended and no process runs it any more."""
    clock = clock or SystemClock()
    gone = gone or Presence(folder, clock=clock).gone
    ended_at: float | None = None
    over, looks = False, 0
    with contextlib.closing(Journal(folder, clock=clock)) as journal:
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
