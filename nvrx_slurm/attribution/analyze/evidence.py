"""Reads what analysis wants beside the scan: the files' tails, the ranks' stacks, and flight-recorder dumps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.attribution.analyze.aftermath import TailLine
from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.analyze.findings import OF_THE_MACHINE
from nvrx_slurm.attribution.analyze.flight_recorder import Dump, DumpError, read_dump
from nvrx_slurm.attribution.analyze.verdict import CycleEnding
from nvrx_slurm.attribution.scan import LogFile, Scan
from nvrx_slurm.attribution.scan.blocks import LONGEST_LINE_BYTES, decoded, plain
from nvrx_slurm.attribution.scan.files import Unreadable, opened, pieces
from nvrx_slurm.attribution.scan.prefixes import by_srun, label_of
from nvrx_slurm.diagnostics.stacks.traces import innermost_frame

TAIL_BYTES = 96 << 10
"""How far back from a file's end what follows a line is judged: a native trace of 16 threads fits in."""

MOST_DUMP_BYTES = 64 << 20
_LABELS_IN = 100
_SECTION = "=== "


@dataclass(slots=True)
class EvidenceReader:
    """Goes through the files of a scan; bounded by `stop`."""

    scan: Scan
    stop: threading.Event

    def all(self, earlier: Iterable[CycleEnding] = ()) -> SideEvidence:
        """Whatever can be read; what cannot is among the problems."""
        problems: list[str] = []
        return SideEvidence(
            tails={str(log.path): tuple(tail_of(log)) for log in self._until_stopped(self._with_causes())},
            stacks=self._stacks(),
            dumps=tuple(self._dumps(problems)),
            earlier=tuple(earlier),
            problems=tuple(problems),
        )

    def _with_causes(self) -> list[LogFile]:
        """The files whose tail decides something: those that hold a possible cause and are written by workers."""
        found = {hit.file.path: hit.file for hit in self.scan.hits if hit.rule.role == "cause"}
        return [log for log in found.values() if log.kind not in OF_THE_MACHINE]

    def _stacks(self) -> dict[int, str]:
        ranked = [(log.rank, log) for log in self._of_kind("stacks") if log.rank is not None]
        frames = ((rank, frame_of(log.path)) for rank, log in ranked)
        return {rank: frame for rank, frame in frames if frame is not None}

    def _dumps(self, problems: list[str]) -> Iterator[Dump]:
        for log in self._of_kind("flight_recorder"):
            try:
                if log.rank is None:
                    raise DumpError("its name does not tell the rank; `nccl_trace_rank_3` would")
                yield read_dump(_whole(log.path), log.rank)
            except (DumpError, Unreadable) as error:
                problems.append(f"{log.path}: {error}")

    def _of_kind(self, kind: str) -> Iterator[LogFile]:
        return self._until_stopped(log for log in self.scan.files if log.kind == kind)

    def _until_stopped(self, logs: Iterable[LogFile]) -> Iterator[LogFile]:
        for log in logs:
            if self.stop.is_set():
                return
            yield log


def tail_of(log: LogFile, most_bytes: int = TAIL_BYTES) -> Iterator[TailLine]:
    """The last lines of a file, packed or not, without their labels; none where it cannot be read."""
    try:
        offset, data = _last_bytes(log.path, most_bytes)
    except Unreadable:
        return
    lines = data.split(b"\n")
    if offset:  # the first is torn
        offset += len(lines.pop(0)) + 1
    srun = log.rank is None and by_srun(plain(b"\n".join(lines[:_LABELS_IN])))
    for line in lines:
        bare = plain(line)
        label = label_of(bare, srun=srun)
        yield TailLine(
            offset,
            decoded(bare[label.begin : label.begin + LONGEST_LINE_BYTES]),
            label.rank if log.rank is None else log.rank,
        )
        offset += len(line) + 1


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
            while size - len(kept[0]) >= most:
                size -= len(kept.popleft())
    data = b"".join(kept)[-most:]
    return read - len(data), data


def _whole(path: Path) -> bytes:
    start, data = _last_bytes(path, MOST_DUMP_BYTES)
    if start:
        raise DumpError(f"is larger than {MOST_DUMP_BYTES >> 20} MiB")
    return data


def context(path: Path, line: int, *, before: int = 3, after: int = 4) -> list[tuple[int, str]]:
    """The lines around one, with their numbers (from 1), of long ones the beginning; none where the file cannot be
    read any more."""
    first = max(1, line - before)
    try:
        with opened(path) as file:
            lines = list(_numbered(pieces(file), first, line + after))
    except Unreadable:
        return []
    return [(number, decoded(plain(text))) for number, text in lines]


def _numbered(read: Iterable[bytes], first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Lines `first` to `last`, of each at most 8 KiB; what lies before them is only counted."""
    number, rest = 1, b""
    for piece in read:
        if number + piece.count(b"\n") < first:
            number, rest = number + piece.count(b"\n"), b""
            continue
        head, *others = piece.split(b"\n")
        rest += head[: LONGEST_LINE_BYTES - len(rest)]
        for other in others:
            if first <= number <= last:
                yield number, rest
            number, rest = number + 1, other[:LONGEST_LINE_BYTES]
        if number > last:
            return
    if rest and first <= number <= last:
        yield number, rest
