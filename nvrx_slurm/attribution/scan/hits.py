"""Makes a Hit of a line that matches: whose line it is, when it was written, and what traceback it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from nvrx_slurm.attribution.catalogue import Rule
from nvrx_slurm.attribution.scan.blocks import Block
from nvrx_slurm.attribution.scan.labels import Label, label_of, told
from nvrx_slurm.attribution.scan.model import MOST_DIGITS, Hit, LogFile
from nvrx_slurm.attribution.scan.stamps import first_stamp, stamp_of
from nvrx_slurm.attribution.scan.text import decoded, excerpt
from nvrx_slurm.attribution.scan.tracebacks import lines_back, may_end, traceback_above

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A file and what its lines need to be understood: whether `srun --label` numbered them, whether pdsh named their
    nodes, and when the file last changed (seconds since the epoch)."""

    file: LogFile
    numbered: bool
    changed_at: float

    def label(self, line: bytes) -> Label:
        """Whose line it is, by its beginning."""
        return label_of(line, srun=self.numbered)

    def match(self, rule: Rule, line: bytes) -> re.Match[bytes] | None:
        """A rule's match in a line, with or without its labels."""
        match = rule.pattern.search(line)
        if match is not None or (not self.numbered and line[:1] not in (b"[", b" ")):
            return match
        begin = self.label(line).begin
        return rule.pattern.search(line[begin:]) if begin else None

    def hit(self, block: Block, begin: int, line: bytes, rule: Rule, match: re.Match[bytes]) -> Hit:
        """All that is told of a line that begins at `begin` of a block."""
        label = self.label(line)
        rank_told, node_told = told(line, label.begin)
        groups = {name: decoded(value) for name, value in match.groupdict().items() if value is not None}
        if label.local_rank is not None:
            groups["local_rank"] = str(label.local_rank)
        joined, t = self._traceback(block, begin, line, label)
        rank_named = _number(groups.get("rank"))
        return Hit(
            file=self.file,
            line=block.line_of(begin),
            text=excerpt(line, match.start()),
            rule=rule,
            rank=_first(label.rank, self.file.rank, self._rank_within(label), rank_told, rank_named),
            node=_first(label.node, self.file.node, node_told, groups.get("node")),
            t=t,
            groups=groups | joined,
            offset=block.offset_of(begin),
        )

    def _rank_within(self, label: Label) -> int | None:
        """A rank within a node is the rank, unless it is known that there are other nodes."""
        return label.local_rank if label.node is None and self.file.node is None else None

    def _traceback(self, block: Block, begin: int, line: bytes, label: Label) -> tuple[dict[str, str], float | None]:
        """What the traceback tells that a line ends, and the line's time, by its own stamp or the traceback's."""
        t = stamp_of(line, self.changed_at)
        if not may_end(line[label.begin :]):
            return {}, t
        above = traceback_above(self._of_the_same(label, lines_back(block.window(begin))))
        if above is None:
            return {}, t
        return above.groups(), first_stamp(above.stamped, self.changed_at) if t is None else t

    def _of_the_same(self, label: Label, lines: Iterator[bytes]) -> Iterator[bytes]:
        """The lines of one writer, without their labels."""
        for line in lines:
            other = self.label(line)
            if (other.rank, other.node, other.local_rank) == (label.rank, label.node, label.local_rank):
                yield line[other.begin :]


def _number(text: str | None) -> int | None:
    """A number that a line tells, if it can be a rank: Python refuses to read one of more than 4,300 digits."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= MOST_DIGITS else None


def _first(*values: _T | None) -> _T | None:
    return next((value for value in values if value is not None), None)
