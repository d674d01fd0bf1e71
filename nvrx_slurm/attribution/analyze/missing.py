"""Which ranks the others waited for: by the flight recorder, by the stacks, or by who never told of a timeout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.collectives import Standstill, standstill
from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.analyze.gathered import Gathered
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.journal.verdicts import MOST_RANKS, Attribution, Inquiry, Scope, Verdict

_LINE_NUMBER = re.compile(r":(\d+) in ")
_DISAGREEMENTS = {"mismatch": "collective_mismatch", "deadlock": "collective_deadlock"}
_TIMED_OUT = re.compile(r"time(?:d\s?|-)?out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Waiting:
    """`ranks` were waited for; `how` says in words how that is known. `standstill`: what the flight recorder shows.
    `node`: they are all that this node has, and more than one."""

    ranks: tuple[int, ...] = ()
    how: str = ""
    standstill: Standstill | None = None
    node: str | None = None


def waiting(inquiry: Inquiry, scan: Scan, found: Sequence[Finding], gathered: Gathered) -> Waiting:
    """The surest account there is."""
    world = known_ranks(inquiry, scan)
    still = standstill(gathered.dumps, sorted(world)) if gathered.dumps else None
    if still is not None and still.kind != "all_entered":
        return Waiting(still.ranks, _in_words(still), still)
    if elsewhere := _elsewhere(gathered.stacks):
        where = gathered.stacks[elsewhere[0]]
        return Waiting(elsewhere, f"its stack is elsewhere than the others': {where}", still)
    if named := _named(found):
        return Waiting(named, "others name it", still)
    silent = _silent(world, found)
    if node := _whole_node(inquiry, silent):
        return Waiting(silent, f"no rank of {node} reports a timeout", still, node)
    if silent and _is_few(len(silent), len(world)):
        return Waiting(silent, "all others report a timeout", still)
    return Waiting(standstill=still)


def refined(answer: Attribution, waiting: Waiting) -> Attribution:
    """An answer that knows symptoms only, with what standing still tells: a node that is gone, or ranks that disagree
    about which collective is next. Ranks that disagree are a bug, but it may be one that a restart gets round."""
    kind = waiting.standstill.kind if waiting.standstill is not None else ""
    if kind in _DISAGREEMENTS:
        return replace(
            answer,
            verdict=Verdict.UNKNOWN,
            transient=None,
            fault=_DISAGREEMENTS[kind],
            scope=Scope.USER_CODE,
            ranks=waiting.ranks,
        )
    if waiting.node is not None:
        return replace(answer, scope=Scope.NODE, nodes=(waiting.node,))
    return answer


def known_ranks(inquiry: Inquiry, scan: Scan) -> frozenset[int]:
    """All ranks of the world, as far as they are known."""
    if inquiry.nodes and len(inquiry.nodes) * inquiry.workers_per_node <= MOST_RANKS:
        return frozenset(range(len(inquiry.nodes) * inquiry.workers_per_node))
    of_files = {file.rank for file in scan.files if file.rank is not None}
    return frozenset(of_files | {hit.rank for hit in scan.hits if hit.rank is not None})


def _in_words(still: Standstill) -> str:
    """What the flight recorder says of these ranks."""
    if still.kind == "missing":
        return f"the flight recorder shows that the others wait in {still.call.words}"
    if still.kind == "deadlock":
        return "the flight recorder shows ranks that wait for each other in different collectives"
    return f"the flight recorder shows another operation there, where the others are in {still.call.words}"


def _elsewhere(stacks: Mapping[int, str]) -> tuple[int, ...]:
    """Ranks whose main thread is in another function than that of three in four of all."""
    places = {rank: _LINE_NUMBER.sub(" in ", frame) for rank, frame in stacks.items()}
    if len(places) < 3:
        return ()
    usual, count = Counter(places.values()).most_common(1)[0]
    if count == len(places) or not _is_few(len(places) - count, len(places)):
        return ()
    return tuple(sorted(rank for rank, place in places.items() if place != usual))


def _named(found: Sequence[Finding]) -> tuple[int, ...]:
    """Ranks that another rank's line says it waits for, such as `Rank 2 failed to pass monitoredBarrier`."""
    told = {each.rank for each in found if _is_of_another(each)}
    return tuple(sorted(rank for rank in told if rank is not None))


def _is_of_another(each: Finding) -> bool:
    speaks = each.hit.rank if each.hit.rank is not None else each.hit.file.rank
    return each.hit.rule.role == "consequence" and speaks is not None and each.rank not in (speaks, None)


def _silent(world: Collection[int], found: Sequence[Finding]) -> tuple[int, ...]:
    """Ranks that tell of no timeout, where others do: they may never have entered what the others waited in."""
    loud = {each.rank for each in found if is_timeout(each) and each.rank is not None}
    return tuple(sorted(set(world) - loud)) if loud else ()


def _whole_node(inquiry: Inquiry, ranks: Sequence[int]) -> str | None:
    """The node whose ranks these are, all of them; None: they are not, or it has but one."""
    nodes = {inquiry.node_of(rank) for rank in ranks}
    if len(nodes) == 1 and len(ranks) == inquiry.workers_per_node > 1:
        return nodes.pop()
    return None


def is_timeout(each: Finding) -> bool:
    """Whether a rank says here that others did not come to a collective in time."""
    return each.hit.rule.role == "consequence" and bool(_TIMED_OUT.search(each.hit.rule.name + each.hit.text))


def _is_few(count: int, world: int) -> bool:
    """One of two or three; else a quarter at most."""
    return 1 <= count <= max(1, world // 4)
