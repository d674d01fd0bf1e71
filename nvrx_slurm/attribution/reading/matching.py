"""One file's lines against the rules: which match, how many, and the first and last of each as Hits.

Most lines cost nothing: the prefilter names the rules that may match in a block, and only lines with one of their
literals are matched. A file full of errors costs little more: a rule that has matched often is from then on counted
by its literals, and of each block only the last lines are matched.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from nvrx_slurm.attribution.catalogue import Rule
from nvrx_slurm.attribution.reading.blocks import Block
from nvrx_slurm.attribution.reading.hits import Sheet
from nvrx_slurm.attribution.reading.model import EXACT_UP_TO, KEPT, Hit
from nvrx_slurm.attribution.reading.prefilter import Searcher

_LINES_BETWEEN_STOPS = 64
_MANY = 32

_Line = tuple[int, int]
"""Where a line begins and ends in its block."""


@dataclass(slots=True)
class _Tally:
    """What a rule found in a file. `late`: as many lines of the last block as are kept, not yet made into Hits: in a
    file full of errors the next block's take their place."""

    count: int = 0
    first: list[Hit] = field(default_factory=list)
    last: collections.deque[Hit] = field(default_factory=lambda: collections.deque(maxlen=KEPT))
    late: tuple[Block, list[_Line]] | None = None


class Matcher:
    """Reads the blocks of one file in order. `stopped` is asked now and then; once it says so, the rest is left."""

    def __init__(self, searcher: Searcher, sheet: Sheet, stopped: Callable[[], bool]) -> None:
        self._rules = searcher.prefilter.rules
        self._noise = [(_any_literal(rule), rule) for rule in searcher.prefilter.noise]
        self._searcher, self._sheet, self._stopped = searcher, sheet, stopped
        self._tallies: dict[int, _Tally] = {}

    def read(self, block: Block) -> None:
        """Match a block's lines."""
        lines = _Lines(block)
        for number in self._searcher.present(block.text):
            if self._stopped():
                return
            rule, tally = self._rules[number], self._tallies.setdefault(number, _Tally())
            if tally.count >= EXACT_UP_TO:
                tally.count += lines.count(rule)
                self._keep(block, self._last(lines, rule), rule, tally)
            elif not lines.have_many(rule) or self._searcher.may_match(number, block.text):
                self._match_all(lines, rule, tally)

    def hits(self) -> list[Hit]:
        """What is kept, in the order of lines; the rules of one line in the catalogue's."""
        for number, tally in self._tallies.items():
            self._make_late(self._rules[number], tally)
        tallies = (self._tallies[number] for number in sorted(self._tallies))
        kept = (hit for tally in tallies for hit in (*tally.first, *tally.last))
        return sorted(kept, key=lambda hit: hit.offset)

    def counts(self) -> dict[str, int]:
        """Name of a rule → lines."""
        return {self._rules[number].name: tally.count for number, tally in self._tallies.items() if tally.count}

    def _match_all(self, lines: _Lines, rule: Rule, tally: _Tally) -> None:
        """Count all, keep the first of the file and the last of the block."""
        late: collections.deque[_Line] = collections.deque(maxlen=KEPT)
        for number, line in enumerate(lines.of(rule)):
            if number % _LINES_BETWEEN_STOPS == 0 and self._stopped():
                return
            match = self._match(lines.block, line, rule)
            if match is None:
                continue
            tally.count += 1
            if len(tally.first) < KEPT:
                tally.first.append(self._hit(lines.block, line, rule, match))
            else:
                late.append(line)
        self._keep(lines.block, list(late), rule, tally)

    def _last(self, lines: _Lines, rule: Rule) -> list[_Line]:
        """The last of a block's lines that match."""
        found: set[_Line] = set()
        for literal in rule.literals:
            back = lines.back(literal, ignore_case=rule.ignore_case)
            found.update(itertools.islice((line for line in back if self._match(lines.block, line, rule)), KEPT))
        return sorted(found)[-KEPT:]

    def _keep(self, block: Block, lines: list[_Line], rule: Rule, tally: _Tally) -> None:
        """Some lines of a block are the file's last, so far."""
        if len(lines) == KEPT:
            tally.late = block, lines
        elif lines:
            self._make_late(rule, tally)
            tally.last.extend(self._made(block, lines, rule))

    def _make_late(self, rule: Rule, tally: _Tally) -> None:
        if tally.late is not None:
            tally.last.extend(self._made(*tally.late, rule))
            tally.late = None

    def _made(self, block: Block, lines: Iterable[_Line], rule: Rule) -> Iterator[Hit]:
        for line in lines:
            if (match := self._match(block, line, rule)) is not None:
                yield self._hit(block, line, rule, match)

    def _match(self, block: Block, line: _Line, rule: Rule) -> re.Match[bytes] | None:
        """A rule's match, unless the line is also one of noise: such a line counts for no other rule."""
        text = block.text[slice(*line)]
        match = self._sheet.match(rule, text)
        if match is None:
            return None
        return None if self._is_noise(text) else match

    def _is_noise(self, text: bytes) -> bool:
        return any(literal.search(text) and self._sheet.match(rule, text) for literal, rule in self._noise)

    def _hit(self, block: Block, line: _Line, rule: Rule, match: re.Match[bytes]) -> Hit:
        return self._sheet.hit(block, line[0], block.text[slice(*line)], rule, match)


class _Lines:
    """A block's lines, by what stands in them."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._lower: bytes | None = None

    def of(self, rule: Rule) -> list[_Line]:
        """Those that hold any of a rule's literals, in order, each once."""
        found = [list(self._with(literal, rule.ignore_case)) for literal in rule.literals]
        return found[0] if len(found) == 1 else sorted(set(itertools.chain(*found)))

    def back(self, literal: bytes, *, ignore_case: bool) -> Iterator[_Line]:
        """Those that hold a literal, the last one first."""
        text, end = self._text(ignore_case), len(self.block.text)
        while (at := text.rfind(literal, 0, end)) >= 0:
            line = self.block.bounds(at)
            yield line
            end = line[0]

    def have_many(self, rule: Rule) -> bool:
        """Whether any literal of a rule stands often in the block: then a search for its pattern costs less."""
        return any(self._is_frequent(literal, self._text(rule.ignore_case)) for literal in rule.literals)

    def _is_frequent(self, literal: bytes, text: bytes) -> bool:
        """Looks no further than it must: to count a whole block takes longer than to search it for all rules."""
        at = -1
        for _ in range(_MANY):
            at = text.find(literal, at + 1)
            if at < 0:
                return False
        return True

    def count(self, rule: Rule) -> int:
        """How often a rule's literals stand in the block."""
        return sum(map(self._text(rule.ignore_case).count, rule.literals))

    def _with(self, literal: bytes, ignore_case: bool) -> Iterator[_Line]:
        text, at = self._text(ignore_case), 0
        while (at := text.find(literal, at)) >= 0:
            line = self.block.bounds(at)
            yield line
            at = max(line[1], at + 1)

    def _text(self, ignore_case: bool) -> bytes:
        if not ignore_case:
            return self.block.text
        if self._lower is None:
            self._lower = self.block.text.lower()
        return self._lower


def _any_literal(rule: Rule) -> re.Pattern[bytes]:
    """Finds something in each line that the rule matches, and in few others, faster than the rule's own pattern."""
    return re.compile(b"|".join(map(re.escape, rule.literals)), re.IGNORECASE if rule.ignore_case else 0)
