"""Who holds up whom, from the flight-recorder dumps of all ranks.

A rank waits in a collective for every member of the group that has not entered it. Whoever is waited for and waits
for nobody is where the others stand still.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.analyze.flight_recorder import COMPLETED, DEFAULT_GROUP, CollectiveCall, Dump
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.journal.verdicts import MOST_RANKS, Attribution, Inquiry, Scope, Verdict

StandstillKind = Literal["missing", "deadlock", "mismatch", "all_entered"]
_SHAPES_MUST_AGREE = ("all_reduce", "reduce_scatter_base", "allgather_base", "broadcast")


@dataclass(frozen=True, slots=True)
class Standstill:
    """Where the ranks stand still. `kind`:

    missing      `ranks` have not entered the `call` that others wait in, and wait for nobody themselves
    deadlock     ranks wait for each other, in different collectives
    mismatch     `ranks` entered something else (operation or shape) under the same number
    all_entered  every member is in the `call`, and it does not end: the way between them, or a GPU, is held up
    """

    kind: StandstillKind
    call: CollectiveCall
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


def standstill(dumps: Sequence[Dump], world: Sequence[int] = ()) -> Standstill | None:
    """What holds the ranks up; None: the dumps do not tell. `world`: all ranks, if known."""
    members = _members(dumps, world)
    inside = {dump.rank: call for dump in dumps if (call := dump.waits_in)}
    if not inside:
        return None
    if odd := _mismatch(inside):
        return odd
    places = {(call.group, call.seq) for call in inside.values()}
    absent = {place: _absent(*place, members, dumps) for place in places}
    waits_for = {rank: absent[call.group, call.seq] for rank, call in inside.items()}
    waiters = [rank for rank, ranks in waits_for.items() if ranks]
    if not waiters:
        return _all_entered(dumps, inside)
    missing = {rank for rank in waiters for rank in waits_for[rank]} - set(waiters)
    call = Counter(inside[rank] for rank in sorted(waiters)).most_common(1)[0][0]
    held_up = tuple(sorted(waiters))
    return Standstill("missing" if missing else "deadlock", call, tuple(sorted(missing)), held_up)


def _members(dumps: Sequence[Dump], world: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Each group's ranks: as a dump lists them; else the whole world, or whoever used the group."""
    users: dict[str, set[int]] = {}
    everyone = {dump.rank for dump in dumps} | set(world)
    for dump in dumps:
        for group, is_default in {(call.group, call.description == DEFAULT_GROUP) for call in dump.calls}:
            users.setdefault(group, set()).update(everyone if is_default else {dump.rank})
    listed = {name: ranks for dump in dumps for name, ranks in dump.members.items()}
    return {**{name: tuple(sorted(ranks)) for name, ranks in users.items()}, **listed}


def _absent(group: str, seq: int, members: Mapping[str, tuple[int, ...]], dumps: Sequence[Dump]) -> tuple[int, ...]:
    come = {dump.rank for dump in dumps if dump.last.get(group, 0) >= seq}
    return tuple(rank for rank in members.get(group, ()) if rank not in come)


def _mismatch(inside: Mapping[int, CollectiveCall]) -> Standstill | None:
    """Ranks that are in one collective by its number, and in different ones by what they do."""
    places: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, call in inside.items():
        places.setdefault((call.group, call.seq), {})[rank] = call
    for calls in places.values():
        doing = Counter(map(_nature, calls.values()))
        if len(doing) > 1:
            usual = doing.most_common(1)[0][0]
            odd = tuple(sorted(rank for rank, call in calls.items() if _nature(call) != usual))
            waiting = tuple(sorted(set(calls) - set(odd)))
            return Standstill("mismatch", calls[waiting[0]], odd, waiting)
    return None


def _nature(call: CollectiveCall) -> tuple[object, ...]:
    name = call.operation.rpartition(":")[2].lstrip("_")
    return (name, call.shapes) if name in _SHAPES_MUST_AGREE else (name,)


def _all_entered(dumps: Sequence[Dump], inside: Mapping[int, CollectiveCall]) -> Standstill | None:
    """Only a backend that tells of completion can say that a collective did not complete."""
    if not any(call.state == COMPLETED for dump in dumps for call in dump.calls):
        return None
    call = Counter(inside[rank] for rank in sorted(inside)).most_common(1)[0][0]
    return Standstill("all_entered", call, (), tuple(sorted(inside)))


_LINE_NUMBER = re.compile(r":(\d+) in ")
_DISAGREEMENTS = {"mismatch": "collective_mismatch", "deadlock": "collective_deadlock"}
_TIMED_OUT = re.compile(r"time(?:d\s?|-)?out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MissingRanks:
    """`ranks` were waited for; `how` says in words how that is known. `standstill`: what the flight recorder shows.
    `node`: they are all that this node has, and more than one."""

    ranks: tuple[int, ...] = ()
    how: str = ""
    standstill: Standstill | None = None
    node: str | None = None


def waiting(
    inquiry: Inquiry,
    scan: Scan,
    found: Sequence[Finding],
    dumps: Sequence[Dump] = (),
    stacks: Mapping[int, str] | None = None,
) -> MissingRanks:
    """The surest account there is. `stacks`: rank → innermost frame of its main thread."""
    world = known_ranks(inquiry, scan)
    still = standstill(dumps, sorted(world)) if dumps else None
    if still is not None and still.kind != "all_entered":
        return MissingRanks(still.ranks, _in_words(still), still)
    if stacks and (elsewhere := _elsewhere(stacks)):
        where = stacks[elsewhere[0]]
        return MissingRanks(elsewhere, f"its stack is elsewhere than the others': {where}", still)
    if named := _named(found):
        return MissingRanks(named, "others name it", still)
    silent = _silent(world, found)
    if node := _whole_node(inquiry, silent):
        return MissingRanks(silent, f"no rank of {node} reports a timeout", still, node)
    if silent and _is_few(len(silent), len(world)):
        return MissingRanks(silent, "all others report a timeout", still)
    return MissingRanks(standstill=still)


def refined(answer: Attribution, waiting: MissingRanks) -> Attribution:
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
