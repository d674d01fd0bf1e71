"""Who holds up whom, from the flight-recorder dumps of all ranks.

A rank waits in a collective for every member of the group that has not entered it. Whoever is waited for and waits
for nobody is where the others stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nvrx_slurm.attribution.analyze.flight_recorder import COMPLETED, DEFAULT_GROUP, Call, Dump

Kind = Literal["missing", "deadlock", "mismatch", "all_entered"]
_SHAPES_MUST_AGREE = ("all_reduce", "reduce_scatter_base", "allgather_base", "broadcast")


@dataclass(frozen=True, slots=True)
class Standstill:
    """Where the ranks stand still. `kind`:

    missing      `ranks` have not entered the `call` that others wait in, and wait for nobody themselves
    deadlock     ranks wait for each other, in different collectives
    mismatch     `ranks` entered something else (operation or shape) under the same number
    all_entered  every member is in the `call`, and it does not end: the way between them, or a GPU, is held up
    """

    kind: Kind
    call: Call
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


def _mismatch(inside: Mapping[int, Call]) -> Standstill | None:
    """Ranks that are in one collective by its number, and in different ones by what they do."""
    places: dict[tuple[str, int], dict[int, Call]] = {}
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


def _nature(call: Call) -> tuple[object, ...]:
    name = call.operation.rpartition(":")[2].lstrip("_")
    return (name, call.shapes) if name in _SHAPES_MUST_AGREE else (name,)


def _all_entered(dumps: Sequence[Dump], inside: Mapping[int, Call]) -> Standstill | None:
    """Only a backend that tells of completion can say that a collective did not complete."""
    if not any(call.state == COMPLETED for dump in dumps for call in dump.calls):
        return None
    call = Counter(inside[rank] for rank in sorted(inside)).most_common(1)[0][0]
    return Standstill("all_entered", call, (), tuple(sorted(inside)))
