"""Which ranks the others waited for: by the flight recorder, by the stacks, or by who reports a timeout. Pure.

A rank waits in a collective for every member of the group that has not entered it. A rank that others wait for, and
that waits for none itself, holds up the job.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.analyze.flight_recorder import DEFAULT_GROUP, CollectiveCall, Dump
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.journal.verdicts import MOST_RANKS, Attribution, Inquiry, Scope, Verdict

StandstillKind = Literal["missing", "deadlock", "mismatch"]

# In other operations ranks may pass different shapes: only one rank has the list of a scatter or gather.
_SHAPES_MUST_AGREE = ("all_reduce", "reduce_scatter_base", "allgather_base", "broadcast")
_LINE_NUMBER = re.compile(r":(\d+) in ")
_TIMED_OUT = re.compile(r"time(?:d\s?|-)?out", re.IGNORECASE)
_FAULTS_OF_THE_PROGRAM: dict[StandstillKind | None, str] = {
    "mismatch": "collective_mismatch",
    "deadlock": "collective_deadlock",
}


class Standstill(msgspec.Struct, frozen=True):
    """Where the ranks stand still. `kind`:

    missing   `ranks` have not entered the `call` that others wait in, and wait for no rank themselves
    deadlock  ranks wait for each other, in different collectives
    mismatch  `ranks` entered something else (operation or shape) under the same number
    """

    kind: StandstillKind
    call: CollectiveCall
    ranks: tuple[int, ...]


class MissingRanks(msgspec.Struct, frozen=True):
    """`ranks` were waited for; `how` says in words how that is known. `kind`: what the flight recorder shows. `node`:
    they are all that this node has, and more than one."""

    ranks: tuple[int, ...] = ()
    how: str = ""
    kind: StandstillKind | None = None
    node: str | None = None


def standstill(dumps: Sequence[Dump], world: Collection[int] = ()) -> Standstill | None:
    """What holds the ranks up; None: the dumps do not show it. `world`: all ranks, if known."""
    inside = {dump.rank: call for dump in dumps if (call := dump.waits_in)}
    if not inside:
        return None
    # First: these ranks have entered under the same number, so that none of them is missing below.
    if mismatch := _mismatch(inside):
        return mismatch

    # Each group's ranks: as a dump lists them; else the whole world, or every rank that used the group.
    users: dict[str, set[int]] = defaultdict(set)
    everyone = {dump.rank for dump in dumps} | set(world)
    for dump in dumps:
        for group, is_default in {(call.group, call.description == DEFAULT_GROUP) for call in dump.calls}:
            users[group].update(everyone if is_default else {dump.rank})
    members: dict[str, tuple[int, ...]] = {name: tuple(sorted(ranks)) for name, ranks in users.items()}
    members |= {name: ranks for dump in dumps for name, ranks in dump.members.items()}

    absent: dict[tuple[str, int], tuple[int, ...]] = {}
    for group, seq in {(call.group, call.seq) for call in inside.values()}:
        entered = {dump.rank for dump in dumps if dump.last.get(group, 0) >= seq}
        absent[group, seq] = tuple(rank for rank in members.get(group, ()) if rank not in entered)
    waits_for = {rank: absent[call.group, call.seq] for rank, call in inside.items()}
    waiters = [rank for rank, ranks in waits_for.items() if ranks]
    if not waiters:  # every member is in the call, and it does not end: no rank holds up the others
        return None
    missing = {rank for rank in waiters for rank in waits_for[rank]} - set(waiters)
    usual = Counter(inside[rank] for rank in sorted(waiters)).most_common(1)[0][0]
    return Standstill("missing" if missing else "deadlock", usual, tuple(sorted(missing)))


def _mismatch(inside: Mapping[int, CollectiveCall]) -> Standstill | None:
    """Ranks that are in one collective by its number, and in different ones by what they do."""

    def nature(call: CollectiveCall) -> tuple[object, ...]:
        name = call.operation.rpartition(":")[2].lstrip("_")
        return (name, call.shapes) if name in _SHAPES_MUST_AGREE else (name,)

    places: dict[tuple[str, int], dict[int, CollectiveCall]] = defaultdict(dict)
    for rank, call in inside.items():
        places[call.group, call.seq][rank] = call
    for calls in places.values():
        natures = Counter(map(nature, calls.values()))
        if len(natures) > 1:
            usual = natures.most_common(1)[0][0]
            odd = tuple(sorted(rank for rank, call in calls.items() if nature(call) != usual))
            return Standstill("mismatch", calls[min(set(calls) - set(odd))], odd)
    return None


def missing_ranks(
    inquiry: Inquiry,
    scan: Scan,
    found: Sequence[Finding],
    dumps: Sequence[Dump] = (),
    stacks: Mapping[int, str] | None = None,
) -> MissingRanks:
    """By the surest source that shows any. `stacks`: rank → innermost frame of its main thread."""
    world = known_ranks(inquiry, scan)
    if (still := standstill(dumps, world)) is not None:
        how = {
            "missing": f"the flight recorder shows that the others wait in {still.call.words}",
            "deadlock": "the flight recorder shows ranks that wait for each other in different collectives",
            "mismatch": "the flight recorder shows another operation there,"
            f" where the others are in {still.call.words}",
        }
        return MissingRanks(still.ranks, how[still.kind], still.kind)

    # Ranks whose main thread is in another function than that of three in four of all.
    places = {rank: _LINE_NUMBER.sub(" in ", frame) for rank, frame in (stacks or {}).items()}
    # Three at least: of two ranks that differ neither is the odd one.
    if stacks and len(places) >= 3:
        usual, count = Counter(places.values()).most_common(1)[0]
        if _is_few(len(places) - count, len(places)):
            elsewhere = tuple(sorted(rank for rank, place in places.items() if place != usual))
            return MissingRanks(elsewhere, f"its stack is elsewhere than the others': {stacks[elsewhere[0]]}")

    # Ranks that another rank's line says it waits for, such as `Rank 2 failed to pass monitoredBarrier`.
    named = set[int]()
    for each in found:
        writer = each.hit.rank if each.hit.rank is not None else each.hit.file.rank
        if each.hit.rule.role != "consequence" or writer is None or each.rank is None:
            continue
        if each.rank != writer:
            named.add(each.rank)
    if named:
        return MissingRanks(tuple(sorted(named)), "others name it")

    # Ranks that report no timeout, where others do: they may never have entered what the others waited in.
    loud = {each.rank for each in found if is_timeout(each) and each.rank is not None}
    silent = tuple(sorted(world - loud)) if loud else ()
    nodes = {inquiry.node_of(rank) for rank in silent}
    if len(nodes) == 1 and len(silent) == inquiry.workers_per_node > 1 and (node := nodes.pop()) is not None:
        return MissingRanks(silent, f"no rank of {node} reports a timeout", node=node)
    if _is_few(len(silent), len(world)):
        return MissingRanks(silent, "all others report a timeout")
    return MissingRanks()


def refined(answer: Attribution, missing: MissingRanks) -> Attribution:
    """An answer that knows only symptoms, completed by who was missing: a lost node, or ranks that disagree about
    which collective is next. Such ranks have a bug, but a restart may avoid it."""
    if missing.kind in _FAULTS_OF_THE_PROGRAM:
        return replace(
            answer,
            verdict=Verdict.UNKNOWN,
            transient=None,
            fault=_FAULTS_OF_THE_PROGRAM[missing.kind],
            scope=Scope.USER_CODE,
            ranks=missing.ranks,
        )
    if missing.node is not None:
        return replace(answer, scope=Scope.NODE, nodes=(missing.node,))
    return answer


def known_ranks(inquiry: Inquiry, scan: Scan) -> frozenset[int]:
    """All ranks of the world, as far as they are known."""
    if inquiry.nodes and len(inquiry.nodes) * inquiry.workers_per_node <= MOST_RANKS:
        return frozenset(range(len(inquiry.nodes) * inquiry.workers_per_node))
    return scan.ranks


def is_timeout(each: Finding) -> bool:
    """Whether a rank reports here that others did not enter a collective in time."""
    return each.hit.rule.role == "consequence" and bool(_TIMED_OUT.search(each.hit.rule.name + each.hit.text))


def _is_few(count: int, world: int) -> bool:
    """One of two or three; else a quarter at most."""
    return 1 <= count <= max(1, world // 4)
