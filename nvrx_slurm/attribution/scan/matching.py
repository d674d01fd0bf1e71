"""One file's lines against the rules: which match, and the first and last of each as Hits."""

from __future__ import annotations

import collections
import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from nvrx_slurm.attribution.rules.catalogue import Rule
from nvrx_slurm.attribution.scan.blocks import LogBlock, decoded, excerpt
from nvrx_slurm.attribution.scan.model import KEPT, MOST_DIGITS, Hit, LogFile
from nvrx_slurm.attribution.scan.prefilter import Searcher
from nvrx_slurm.attribution.scan.prefixes import first_stamp, label_of, logged_at, named_in, stamp_of
from nvrx_slurm.attribution.scan.quotations import counts_none, is_mild, is_quoted, is_source, without_negated
from nvrx_slurm.attribution.scan.tracebacks import ExceptionSearch, lines_back, may_end, traceback_above
from nvrx_slurm.journal.verdicts import Verdict

# Where a line begins and ends in its block.
Span = tuple[int, int]


_T = TypeVar("_T")

# The first bytes of labels and of loggers' prefixes (prefixes.py).
_PREFIXES_BEGIN = tuple(bytes([byte]) for byte in b"[ (012EFC")

_LINES_BETWEEN_STOPS = 64
# After so many lines in vain a search for the whole pattern costs less than to go on.
_MANY_IN_VAIN = 32

# So many of a rule's lines in a file are matched one by one, from the beginning.
ONE_BY_ONE = 32

# So many are kept in memory. With fewer, the last lines would be searched for in each block that may be the last.
_LAST_BLOCKS = 16


class BlockLines:
    """Finds lines in a block by a rule's literals."""

    def __init__(self, block: LogBlock) -> None:
        self.block = block
        self._lower: bytes | None = None

    def of(self, rule: Rule) -> Iterator[Span]:
        """Those that hold any of a rule's literals, in order, each once."""
        return _merged([self._with(literal, rule.ignore_case) for literal in rule.literals])

    def back(self, rule: Rule) -> Iterator[Span]:
        """The same, the last one first."""
        return _merged([self._back(literal, rule.ignore_case) for literal in rule.literals], reverse=True)

    def _with(self, literal: bytes, ignore_case: bool) -> Iterator[Span]:
        text, at = self._text(ignore_case), 0
        while (at := text.find(literal, at)) >= 0:
            line = self.block.bounds(at)
            yield line
            at = max(line[1], at + 1)

    def _back(self, literal: bytes, ignore_case: bool) -> Iterator[Span]:
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


def _merged(lines: Sequence[Iterator[Span]], *, reverse: bool = False) -> Iterator[Span]:
    if len(lines) == 1:
        return lines[0]
    return (line for line, _ in itertools.groupby(heapq.merge(*lines, reverse=reverse)))


class Sheet(msgspec.Struct, frozen=True):
    """A file and what its lines need to be understood: whether `srun --label` numbered them, and when the file last
    changed (seconds since the epoch)."""

    file: LogFile
    numbered: bool
    changed_at: float

    def match(self, rule: Rule, line: bytes) -> re.Match[bytes] | None:
        """A rule's match in a line, with or without its labels, or without a logger's prefix."""
        match = rule.pattern.search(line)
        # Unless srun or pdsh have labelled the file, every prefix begins with one of these: most lines end here.
        if match is not None or (not self.numbered and line[:1] not in _PREFIXES_BEGIN):
            return match
        begin = label_of(line, srun=self.numbered).begin
        if begin and (match := rule.pattern.search(line[begin:])) is not None:
            return match
        logged = logged_at(line, begin)
        return None if logged is None else rule.pattern.search(line[logged:])

    def hit(self, block: LogBlock, begin: int, line: bytes, rule: Rule, match: re.Match[bytes]) -> Hit:
        """All that is known of a line that begins at `begin` of a block: its writer, its time, its traceback."""
        label = label_of(line, srun=self.numbered)
        groups = {name: decoded(value) for name, value in match.groupdict().items() if value is not None}
        if label.local_rank is not None:
            groups["local_rank"] = str(label.local_rank)
        t = stamp_of(line, self.changed_at)
        above = None
        if may_end(line[label.begin :]):
            # The lines above of the same writer, without their labels.
            own = (
                earlier[other.begin :]
                for earlier in lines_back(block.window(begin))
                if (other := label_of(earlier, srun=self.numbered)).writer == label.writer
            )
            above = traceback_above(own)
        if above is not None:
            groups |= above.groups()
            t = first_stamp(above.stamped, self.changed_at) if t is None else t
        elif logged_at(line, label.begin) is not None:
            groups["non_fatal"] = "logged"
        own_rank, own_node = named_in(line, label.begin)
        # A rank within a node is the rank, unless it is known that there are other nodes.
        of_only_node = label.local_rank if label.node is None and self.file.node is None else None
        # Python refuses to read a number of more than 4,300 digits.
        text = groups.get("rank", "")
        by_rule = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None
        return Hit(
            file=self.file,
            line=block.line_of(begin),
            text=excerpt(line, match.start()),
            rule=rule,
            rank=_first_known(label.rank, self.file.rank, of_only_node, own_rank, by_rule),
            node=_first_known(label.node, self.file.node, own_node, groups.get("node")),
            t=t,
            groups=groups,
            offset=block.offset_of(begin),
        )


def _first_known(*values: _T | None) -> _T | None:
    return next((value for value in values if value is not None), None)


class _Late(msgspec.Struct):
    """A block that may hold some of a rule's last lines. `lines`: those, at most 8; None: not searched for."""

    block: LogBlock
    lines: list[Span] | None


class _Tally(msgspec.Struct):
    """What a rule found in a file. `late`: lines that are no Hits yet, since later ones may replace them. `matched`:
    how many of its lines were matched one by one."""

    matched: int = 0
    first: list[Hit] = []
    last: collections.deque[Hit] = msgspec.field(default_factory=lambda: collections.deque(maxlen=KEPT))
    late: collections.deque[_Late] = msgspec.field(default_factory=collections.deque)


class _Below(msgspec.Struct):
    """A traceback whose exception's line was not yet read: the rule, its match in the header, who writes it."""

    number: int
    match: re.Match[bytes]
    writer: object
    search: ExceptionSearch


class LineMatcher:
    """Reads the blocks of one file in order, until `stopped`, which is called every now and then.

    Most lines cost nothing: the prefilter names the rules that may match in a block, and only lines with one of their
    literals are matched. Of a rule that has matched often, only the last lines are searched for, and only in the last
    blocks.
    """

    def __init__(self, searcher: Searcher, sheet: Sheet, stopped: Callable[[], bool]) -> None:
        self._rules = searcher.prefilter.rules
        self._searcher, self._sheet, self._stopped = searcher, sheet, stopped
        self._tallies: dict[int, _Tally] = {}
        self._often: set[int] = set()
        self._blocks: collections.deque[LogBlock] = collections.deque()
        self._below: list[_Below] = []

    def read(self, block: LogBlock) -> None:
        """Match a block's lines."""
        if len(self._blocks) == _LAST_BLOCKS:
            self._let_go(self._blocks.popleft())
        self._blocks.append(block)
        lines = BlockLines(block)
        unfinished, self._below = self._below, []
        for below in unfinished:
            self._go_down(block, 0, below)
        # Whole patterns are slow where they match. Once a rule has matched often, a search for literals comes first,
        # and is enough where it names such rules only.
        present = self._searcher.with_literals(block.text) if self._often else None
        if present is None or not self._often.issuperset(present):
            present = self._searcher.present(block.text)
        for number in present:
            if self._stopped():
                return
            rule, tally = self._rules[number], self._tallies.setdefault(number, _Tally())
            if rule.below:
                self._read_headers(number, block, lines)
                continue
            if number in self._often:
                tally.late.append(_Late(block, None))
                continue
            # Keep the first of the file and the last of the block.
            last = collections.deque[Span](maxlen=KEPT)
            for line, match in self._matching(number, block, lines.of(rule)):
                tally.matched += 1
                if len(tally.first) < KEPT:
                    tally.first.append(self._hit(block, line, rule, match))
                    continue
                last.append(line)
                if tally.matched == ONE_BY_ONE:
                    # What follows in this block and in the next ones is matched from their ends, when they leave the
                    # memory: then it is known which blocks hold the last lines.
                    self._often.add(number)
                    tally.late.append(_Late(block, None))
                    break
            else:
                if last:
                    tally.late.append(_Late(block, list(last)))

    def hits(self) -> list[Hit]:
        """What is kept, in the order of lines; the rules of one line in the catalogue's."""
        while self._blocks:
            self._let_go(self._blocks.popleft())
        tallies = (self._tallies[number] for number in sorted(self._tallies))
        kept = (hit for tally in tallies for hit in (*tally.first, *tally.last))
        return sorted(kept, key=lambda hit: hit.offset)

    def _read_headers(self, number: int, block: LogBlock, lines: BlockLines) -> None:
        """Find the exceptions of a block's tracebacks: those of its first headers and of its last ones."""
        rule = self._rules[number]
        headers = list(itertools.islice(lines.of(rule), KEPT + 1))
        if len(headers) > KEPT:
            headers = [*headers[:KEPT], *reversed(list(itertools.islice(lines.back(rule), KEPT)))]
        for begin, end in dict.fromkeys(headers):
            header = block.text[begin:end]
            if (match := self._sheet.match(rule, header)) is not None:
                writer = label_of(header, srun=self._sheet.numbered).writer
                self._go_down(block, end + 1, _Below(number, match, writer, ExceptionSearch()))

    def _go_down(self, block: LogBlock, at: int, below: _Below) -> None:
        """Read on from a position of the block, to the line that names the exception."""
        search = below.search
        while at < len(block.text):
            begin, end = block.bounds(at)
            line = block.text[begin:end]
            label = label_of(line, srun=self._sheet.numbered)
            if label.writer == below.writer and not search.goes_on(line[label.begin :]):
                rule, tally = self._rules[below.number], self._tallies[below.number]
                if search.found and not self._is_noise(line):
                    hit = self._sheet.hit(block, begin, line, rule, below.match)
                    (tally.first if len(tally.first) < KEPT else tally.last).append(hit)
                return
            at = max(end + 1, at + 1)
        self._below.append(below)

    def _is_noise(self, text: bytes) -> bool:
        return any(self._sheet.match(noise, text) for noise in self._searcher.noise(text))

    def _matching(
        self, number: int, block: LogBlock, lines: Iterable[Span]
    ) -> Iterator[tuple[Span, re.Match[bytes]]]:
        """Those of some lines that match. After many that do not, the block is searched for the whole pattern."""
        in_vain = 0
        for tried, line in enumerate(lines, 1):
            if (match := self._match(block, line, self._rules[number])) is not None:
                yield line, match
                continue
            in_vain += 1
            if in_vain == tried == _MANY_IN_VAIN and not self._searcher.may_match(number, block.text):
                return
            if in_vain % _LINES_BETWEEN_STOPS == 0 and self._stopped():
                return

    def _let_go(self, block: LogBlock) -> None:
        """A block leaves the memory: those of its lines become Hits that no later ones have replaced."""
        for number, tally in self._tallies.items():
            if not tally.late or tally.late[0].block is not block:
                continue
            # Search for the rule's last lines, from the last block back; forget those before.
            rule, wanted = self._rules[number], KEPT
            for at in range(len(tally.late) - 1, -1, -1):
                late = tally.late[at]
                if late.lines is None:
                    matching = self._matching(number, late.block, BlockLines(late.block).back(rule))
                    late.lines = sorted(line for line, _ in itertools.islice(matching, KEPT))
                wanted -= len(late.lines)
                if wanted <= 0:
                    for _ in range(at):
                        tally.late.popleft()
                    break
            if tally.late[0].block is block:
                for line in tally.late.popleft().lines or ():
                    if (match := self._match(block, line, rule)) is not None:
                        tally.last.append(self._hit(block, line, rule, match))

    def _match(self, block: LogBlock, line: Span, rule: Rule) -> re.Match[bytes] | None:
        """A rule's match, unless the line is also one of noise: such a line counts for no other rule."""
        text = block.text[slice(*line)]
        match = self._sheet.match(rule, text)
        if match is None or self._is_noise(text):
            return None
        cleared = without_negated(text)
        if cleared != text and (match := self._sheet.match(rule, cleared)) is None:
            return None
        begin = label_of(text, srun=self._sheet.numbered).begin
        # A pattern may begin with what stands anywhere before the words: its literal shows where they are.
        words, low = match.group(), match.group().lower() if rule.ignore_case else match.group()
        start = cleared.find(words)
        within = min((at for literal in rule.literals if (at := low.find(literal)) >= 0), default=0)
        if is_quoted(text, start + within, begin) or counts_none(text, start, start + len(words)):
            return None
        # A cause of another verdict is often reported at a low level: a health check that failed, a preemption.
        if rule.role == "cause" and rule.verdict is Verdict.STOP and is_mild(text, start + within, begin):
            return None
        if text[:1].isspace() and is_source(text, lines_back(block.window(line[0]))):
            return None
        return match

    def _hit(self, block: LogBlock, line: Span, rule: Rule, match: re.Match[bytes]) -> Hit:
        return self._sheet.hit(block, line[0], block.text[slice(*line)], rule, match)
