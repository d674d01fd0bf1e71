"""Reads what analysis needs beside the scan: the files' tails, the ranks' stacks, and flight-recorder dumps."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.aftermath import Nature, TailLine, bar_of, condensed, nature
from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.analyze.findings import OF_THE_MACHINE, later_parts
from nvrx_slurm.attribution.analyze.flight_recorder import Dump, DumpError, read_dump
from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan import LogFile, Scan, scan
from nvrx_slurm.attribution.scan.blocks import LONGEST_LINE_BYTES, decoded, plain, readable
from nvrx_slurm.attribution.scan.files import Unreadable, opened, pieces
from nvrx_slurm.attribution.scan.model import TAIL_LINES
from nvrx_slurm.attribution.scan.prefixes import by_srun, label_of
from nvrx_slurm.attribution.scan.records import LINE_END
from nvrx_slurm.diagnostics.stacks.traces import innermost_frame

# How much of a file's end shows what followed a line: a native trace of 16 threads fits in.
TAIL_BYTES = 96 << 10

# How much of it is read where the shorter one does not show that.
LONG_TAIL_BYTES = 2 << 20

MOST_DUMP_BYTES = 64 << 20
_LABELS_IN = 100
# So often a progress bar is drawn again without a step while its program ends: by `set_postfix`, and at its close.
_MOST_REDRAWS = 3
_SECTION = "=== "


def read_logs(
    logs: Sequence[LogFile], catalogue: Catalogue, stop: threading.Event, ranks: Collection[int] = ()
) -> tuple[Scan, SideEvidence]:
    """All that is in the logs, until `stop`. `ranks`: leave out lines and files of others; those of no rank stay."""
    read = scan(logs, catalogue, stop=stop)
    if ranks:
        read = replace(
            read,
            hits=tuple(hit for hit in read.hits if hit.rank is None or hit.rank in ranks),
            files=tuple(log for log in read.files if log.rank is None or log.rank in ranks),
        )
    return read, read_evidence(read, stop)


def read_evidence(scan: Scan, stop: threading.Event) -> SideEvidence:
    """All that can be read of a scan's files, until `stop`; what cannot is among the problems."""

    def until_stopped(logs: Iterable[LogFile]) -> Iterator[LogFile]:
        return itertools.takewhile(lambda _: not stop.is_set(), logs)

    def of_kind(kind: str) -> Iterator[LogFile]:
        return until_stopped(log for log in scan.files if log.kind == kind)

    # Only the tails that decide something: of files that workers write, and that hold a possible cause, or a
    # consequence that steps of training follow. A thousand ranks report a timeout, and print nothing after it.
    with_causes: dict[Path, LogFile] = {}
    for hit in scan.hits:
        if hit.rule.role != "cause":
            lines = scan.of(hit.file).tail
            # After the hit's own line, if that is one of the last ones.
            own = max((at for at, line in enumerate(lines) if line == hit.text), default=-1)
            if not any(nature(line) is Nature.PROGRESS for line in lines[own + 1 :]):
                continue
        with_causes[hit.file.path] = hit.file
    offsets: dict[Path, list[int]] = defaultdict(list)
    # What follows a line in the later parts of a log that was rotated, from their beginning.
    later = later_parts(scan)
    for part in dict.fromkeys(part for path in with_causes for part in later.get(path, ())):
        with_causes[part.path] = part
        offsets[part.path].append(-1)
    of_workers = [log for log in with_causes.values() if log.kind not in OF_THE_MACHINE]
    for hit in scan.hits:
        if hit.file.path in with_causes:
            offsets[hit.file.path].append(hit.offset)
    tails = {
        str(log.path): condensed(_tail_after(log, min(offsets[log.path])), offsets[log.path])
        for log in until_stopped(of_workers)
    }

    frames = {log.rank: frame_of(log.path) for log in of_kind("stacks") if log.rank is not None}
    stacks = {rank: frame for rank, frame in frames.items() if frame is not None}

    problems: list[str] = []
    dumps: list[Dump] = []
    for log in of_kind("flight_recorder"):
        try:
            if log.rank is None:
                raise DumpError("its name does not contain the rank; `nccl_trace_rank_3` would")
            start, data = _last_bytes(log.path, MOST_DUMP_BYTES)
            if start:
                raise DumpError(f"is larger than {MOST_DUMP_BYTES >> 20} MiB")
            dumps.append(read_dump(data, log.rank))
        except (DumpError, Unreadable) as error:
            problems.append(f"{log.name}: {error}")
    return SideEvidence(tails, stacks, tuple(dumps), problems=tuple(problems))


def _tail_after(log: LogFile, offset: int) -> tuple[TailLine, ...]:
    """The last lines; more of them where they hold no step and begin after the possible cause at `offset`: the steps
    that it was followed by may lie before a long epilogue."""
    tail = tuple(tail_of(log))
    if not tail or tail[0].offset <= offset or any(line.nature is Nature.PROGRESS for line in tail):
        return tail
    return tuple(tail_of(log, LONG_TAIL_BYTES))


def tail_of(log: LogFile, most_bytes: int = TAIL_BYTES) -> Iterator[TailLine]:
    """The last lines of a file, packed or not, without their labels; none where it cannot be read."""
    try:
        offset, data = _last_bytes(log.path, most_bytes)
    except Unreadable:
        return
    lines = LINE_END.split(data)  # as in the scan, so that the offsets and the lines are the same
    if offset:  # the first is torn
        offset += len(lines.pop(0)) + 1
    # In a file of one rank `3: ` is no label of srun, but the program's own text.
    srun = log.rank is None and by_srun(readable(b"\n".join(lines[:_LABELS_IN])))
    # Bar → how far it was when it was drawn last, and how often it has been drawn there again.
    drawn: dict[tuple[int | None, str], tuple[str, int]] = {}
    for line in lines:
        for bare in readable(line).split(b"\n"):  # a record says several
            label = label_of(bare, srun=srun)
            text = decoded(bare[label.begin : label.begin + LONGEST_LINE_BYTES])
            rank, kind = label.rank if log.rank is None else log.rank, None
            if (bar := bar_of(text)) is not None:
                name, done = bar
                before, again = drawn.get((rank, name), ("", 0))
                again = again + 1 if done == before else 0
                drawn[rank, name] = done, again
                kind = Nature.CRASH if 0 < again <= _MOST_REDRAWS else None
            yield TailLine(offset, text, rank, kind=kind)
        offset += len(line) + 1


def last_lines(logs: Sequence[LogFile]) -> dict[str, tuple[str, ...]]:
    """File → its last lines, as a scan has them, of files that are not scanned here."""
    texts = {log.name: [line.text for line in tail_of(log) if line.text.strip()] for log in logs}
    return {name: tuple(lines[-TAIL_LINES:]) for name, lines in texts.items() if lines}


def frame_of(path: Path) -> str | None:
    """The innermost frame of the worker's main thread, in the last dump of a file of stacks; None: it has none."""
    try:
        _, data = _last_bytes(path, MOST_DUMP_BYTES)
    except Unreadable:
        return None
    sections = data.decode(errors="replace").split(f"\n{_SECTION}")
    last_time = sections[-1].removeprefix(_SECTION).partition(" ")[0]
    of_last = [section for section in sections if section.removeprefix(_SECTION).startswith(last_time)]
    return next((frame for section in of_last if (frame := innermost_frame(section))), None)


def _last_bytes(path: Path, most: int) -> tuple[int, bytes]:
    """Where they begin in the file's text, and the bytes. Raises Unreadable."""
    with opened(path) as file:
        kept: deque[bytes] = deque()
        size = read = 0
        for piece in pieces(file):
            kept.append(piece)
            size, read = size + len(piece), read + len(piece)
            # A packed file is unpacked from its beginning, but only the pieces with its last bytes are kept.
            while size - len(kept[0]) >= most:
                size -= len(kept.popleft())
    data = b"".join(kept)[-most:]
    return read - len(data), data


def context(path: Path, line: int, *, before: int = 3, after: int = 4) -> list[tuple[int, str]]:
    """The lines around one, with their numbers (from 1), of each at most 8 KiB; none if it cannot be read."""
    first, last = max(1, line - before), line + after
    found: list[tuple[int, bytes]] = []
    number, rest = 1, b""
    try:
        with opened(path) as file:
            for piece in pieces(file):
                if number + piece.count(b"\n") < first:  # only counted, not split
                    number, rest = number + piece.count(b"\n"), b""
                    continue
                head, *others = piece.split(b"\n")
                rest += head[: LONGEST_LINE_BYTES - len(rest)]
                for other in others:
                    found.append((number, rest))
                    number, rest = number + 1, other[:LONGEST_LINE_BYTES]
                if number > last:
                    break
    except Unreadable:
        return []
    if rest:
        found.append((number, rest))
    return [(number, decoded(plain(text))) for number, text in found if first <= number <= last]
