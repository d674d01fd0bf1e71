"""Hits that count: placed on a rank and a node, on one common clock, and judged by what followed them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nvrx_slurm.attribution.analyze.aftermath import Finality, Nature, TailLine, aftermath, finality, nature
from nvrx_slurm.attribution.rules.catalogue import Rule
from nvrx_slurm.attribution.scan import Hit, Scan
from nvrx_slurm.attribution.scan.model import MOST_DIGITS
from nvrx_slurm.attribution.scan.prefixes import stamp_of
from nvrx_slurm.journal.verdicts import Evidence, Inquiry, Verdict

SLACK_S = 3.0
"""Events that are common to all nodes are told within this time anyway: a smaller difference is no clock's."""

_Event = tuple[str, ...]


def domain(hit: Hit, inquiry: Inquiry) -> str | None:
    """Whose clock a line's time is from: its node's; where the node is not known, its rank's, if that is."""
    if hit.node is not None or hit.rank is None:
        return hit.node
    return inquiry.node_of(hit.rank) or f"rank {hit.rank}"


def offsets(hits: Iterable[Hit], inquiry: Inquiry) -> dict[str, float]:
    """Domain → seconds its clock is ahead of the middle of all. Domains without a common event are left out."""
    per_domain: dict[str, list[float]] = defaultdict(list)
    for times in _common_events(hits, inquiry).values():
        middle = median(times.values())
        for where, t in times.items():
            per_domain[where].append(t - middle)
    found = {where: median(ahead) for where, ahead in per_domain.items()}
    return {where: ahead for where, ahead in found.items() if abs(ahead) > SLACK_S}


def _common_events(hits: Iterable[Hit], inquiry: Inquiry) -> Mapping[_Event, Mapping[str, float]]:
    """Event → domain → when it told of it first; only events that at least two domains tell of."""
    events: dict[_Event, dict[str, float]] = defaultdict(dict)
    for hit in hits:
        where = domain(hit, inquiry)
        if hit.rule.role == "consequence" and hit.t is not None and where is not None:
            told = events[_event(hit)]
            told[where] = min(hit.t, told.get(where, hit.t))
    return {event: told for event, told in events.items() if len(told) > 1}


def _event(hit: Hit) -> _Event:
    """The same rule, and where the line tells it the same collective."""
    return (hit.rule.name, *(hit.groups.get(name, "") for name in ("seq", "collective")))


STRONG_FROM = 50
"""Rules of a lower severity see that something failed, or what often follows; the others know a cause."""

VAGUE_TO = 40
"""Rules of this severity and less recognise any exception: what peers of a failed rank raise, too."""

GOES_ON_S = 30.0
"""A rank whose other file tells of progress this long after an error has survived it."""

_LAST_LINES = 6
_NUMBERS = ("rank", "pid", "local_rank")

OF_THE_MACHINE = ("health", "stacks")
"""Kinds of files that no worker writes: nothing of a rank goes on in them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that a rule recognised. `t` is on the clock that all nodes share; None: the line tells none. `since`: it
    was not earlier than this."""

    hit: Hit
    rank: int | None
    node: str | None
    t: float | None
    finality: Finality
    since: float | None = None

    def is_after(self, moment: float, margin_s: float) -> bool:
        """Whether it was surely written later than that, by more than the margin."""
        known = self.t if self.t is not None else self.since
        return known is not None and known - moment > margin_s

    @property
    def evidence(self) -> Evidence:
        hit = self.hit
        return Evidence(
            file=str(hit.file.path),
            line=hit.line,
            text=hit.text,
            rule=hit.rule.name,
            rank=self.rank,
            node=self.node,
            t=hit.t,
        )

    @property
    def whose(self) -> int | str:
        """The rank; where that is not known, the file."""
        return self.rank if self.rank is not None else str(self.hit.file.path)

    @property
    def is_strong(self) -> bool:
        """Whether its rule knows a kind of failure, rather than that there was one."""
        return self.hit.rule.severity >= STRONG_FROM

    @property
    def aside(self) -> str | None:
        """What stands above its traceback and tells that it may have ended no process."""
        return self.hit.groups.get("aside")

    @property
    def place(self) -> tuple[str, int]:
        return str(self.hit.file.path), self.hit.line


def findings(inquiry: Inquiry, scan: Scan, tails: Mapping[str, Sequence[TailLine]]) -> list[Finding]:
    """Hits of causes and consequences, one a line, in the order of files and lines. What noise matches is none."""
    lines: dict[tuple[str, int], list[Hit]] = defaultdict(list)
    for hit in scan.hits:
        lines[str(hit.file.path), hit.line].append(hit)
    hits = [_telling(on_line) for on_line in lines.values() if all(hit.rule.role != "noise" for hit in on_line)]
    return _Placing(inquiry, tails, offsets(hits, inquiry), last_progress(scan)).all(hits)


@dataclass(frozen=True, slots=True)
class _Placing:
    """Puts hits on ranks, nodes and the common clock. `ahead`: of each clock; `progress`: of each rank, the last."""

    inquiry: Inquiry
    tails: Mapping[str, Sequence[TailLine]]
    ahead: Mapping[str, float]
    progress: Mapping[int, float]

    def all(self, hits: Iterable[Hit]) -> list[Finding]:
        ranks = {pid: rank for rank, pid in self.inquiry.pids.items()}
        return [self._finding(hit, self._rank(hit, ranks)) for hit in hits]

    def _finding(self, hit: Hit, rank: int | None) -> Finding:
        node = hit.groups.get("node") or hit.node or (self.inquiry.node_of(rank) if rank is not None else None)
        tail = self.tails.get(str(hit.file.path), ())
        since = None if hit.t is None else hit.t - self.ahead.get(domain(hit, self.inquiry) or "", 0.0)
        t = since if _is_dated(hit) else None
        return Finding(hit, rank, node, t, self._finality(hit, rank, t, tail), since)

    def _rank(self, hit: Hit, ranks: Mapping[int, int]) -> int | None:
        """As the line says, or the pid it names, or the file that it stands in."""
        told = {
            name: int(text)
            for name, text in hit.groups.items()
            if name in _NUMBERS and text.isdecimal() and len(text) <= MOST_DIGITS
        }
        if "rank" in told:
            return told["rank"]
        if told.get("pid") in ranks:
            return ranks[told["pid"]]
        return hit.rank if hit.rank is not None else self._of_local(told.get("local_rank"), hit.node)

    def _of_local(self, local_rank: int | None, node: str | None) -> int | None:
        """The global rank of one that is told within its node; without nodes there is but one to be known."""
        nodes = self.inquiry.nodes
        if local_rank is None or len(nodes) <= 1:
            return local_rank
        return nodes.index(node) * self.inquiry.workers_per_node + local_rank if node in nodes else None

    def _finality(self, hit: Hit, rank: int | None, t: float | None, tail: Sequence[TailLine]) -> Finality:
        if hit.file.kind in OF_THE_MACHINE:
            return Finality.ENDED
        own = hit.rank if hit.rank is not None else rank
        if own is not None and t is not None and self.progress.get(own, t) - t > GOES_ON_S:
            return Finality.SURVIVED
        after = aftermath(hit.offset, own, tail)
        return finality(after, shared=hit.file.kind == "mixed", aside=hit.groups.get("aside"))


def _is_dated(hit: Hit) -> bool:
    """Whether a hit's time is its own. A traceback has that of the line above it, which may be hours older, unless a
    logger wrote both."""
    if hit.t is None or "frames" not in hit.groups:
        return True
    return stamp_of(hit.text.encode(), hit.t) is not None or hit.groups.get("aside") == "logged"


def last_progress(scan: Scan) -> dict[int, float]:
    """Rank → when its own file last told of progress, of ranks whose file ends with it."""
    told: dict[int, float] = {}
    for file in scan.files:
        name = str(file.path)
        steps = sum(nature(line) is Nature.PROGRESS for line in scan.tails.get(name, ())[-_LAST_LINES:])
        if file.rank is not None and steps >= _LAST_LINES // 2 and name in scan.last_t:
            told[file.rank] = max(scan.last_t[name], told.get(file.rank, 0.0))
    return told


def _telling(hits: Sequence[Hit]) -> Hit:
    """Of several rules that recognise one line, the one that says most: any rather than one for all exceptions."""
    return max(hits, key=lambda hit: (not _is_vague(hit.rule), hit.rule.severity))


def _is_vague(rule: Rule) -> bool:
    return rule.role == "cause" and rule.verdict is Verdict.UNKNOWN and rule.severity <= VAGUE_TO
