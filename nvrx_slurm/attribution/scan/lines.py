"""A block's lines, by what stands in them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from nvrx_slurm.attribution.catalogue import Rule
from nvrx_slurm.attribution.scan.blocks import Block

Line = tuple[int, int]
"""Where a line begins and ends in its block."""


class Lines:
    """Finds lines in a block by a rule's literals."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._lower: bytes | None = None

    def of(self, rule: Rule) -> Iterator[Line]:
        """Those that hold any of a rule's literals, in order, each once."""
        return _merged([self._with(literal, rule.ignore_case) for literal in rule.literals])

    def back(self, rule: Rule) -> Iterator[Line]:
        """The same, the last one first."""
        return _merged([self._back(literal, rule.ignore_case) for literal in rule.literals], reverse=True)

    def count(self, rule: Rule, after: int = 0) -> int:
        """How often a rule's literals stand in the block, or after a position of it."""
        text = self._text(rule.ignore_case)
        return sum(text.count(literal, after) for literal in rule.literals)

    def _with(self, literal: bytes, ignore_case: bool) -> Iterator[Line]:
        text, at = self._text(ignore_case), 0
        while (at := text.find(literal, at)) >= 0:
            line = self.block.bounds(at)
            yield line
            at = max(line[1], at + 1)

    def _back(self, literal: bytes, ignore_case: bool) -> Iterator[Line]:
        text, end = self._text(ignore_case), len(self.block.text)
        while (at := text.rfind(literal, 0, end)) >= 0:
            line = self.block.bounds(at)
            yield line
            end = line[0]

    def _text(self, ignore_case: bool) -> bytes:
        if not ignore_case:
            return self.block.text
        if self._lower is None:
            self._lower = self.block.text.lower()
        return self._lower


def _merged(lines: Sequence[Iterator[Line]], *, reverse: bool = False) -> Iterator[Line]:
    if len(lines) == 1:
        return lines[0]
    return (line for line, _ in itertools.groupby(heapq.merge(*lines, reverse=reverse)))
