"""The barriers where all members of a group arrive, each with a payload. Pure.

The ledger gives the number of arrivals that a barrier waits for. Lost members are not waited for, so a member at a
barrier arrives again on each new entry of the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.inprocess.attribution import InterruptionRecord
from nvrx_slurm.inprocess.ledger import GroupLedger
from nvrx_slurm.util.decoding import decode

JOIN = "join"  # each member's process: a run that finds another run's keys sees that they are not its own
LEFT = "left"  # the members that have completed the call and read nothing of it any more

# The barriers of an iteration, by its number.
ready = "ready:{}".format  # all are healthy and out of the iteration before: `Sealed` may name the ranks that are out
start = "start:{}".format  # all have their new ranks
notice = "notice:{}".format  # all know that the iteration was interrupted
atomic = "atomic:{}".format  # those that wait for the end of an atomic part: `OPEN`; nothing once it has ended
complete = "complete:{}".format  # all active ranks have returned

OPEN = b"open"


class Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the payloads."""


class MemberProcess(Payload, frozen=True, kw_only=True):
    """One process: its host, its id there, and when it began, in the kernel's ticks. `space`: where its id has this
    meaning (`process_space`)."""

    host: str
    pid: int
    began: int
    space: str = ""


class Ready(Payload, frozen=True, kw_only=True):
    """A member's rank in the iteration before, and what its rank assignment wants all to know (`publish`)."""

    rank: int
    published: tuple[str, ...] = ()


class NewPlace(Payload, frozen=True, kw_only=True):
    """A member's place in the iteration to come, its process, and how long its part of the restart took."""

    rank: int
    world_size: int
    active_rank: int | None
    active_world_size: int
    process: MemberProcess
    phases: dict[str, float] = {}  # name → seconds


class Noticing(Payload, frozen=True, kw_only=True):
    """A member's own fault, if any, which interrupted the iteration or came at the same time."""

    fault: InterruptionRecord | None = None


P = TypeVar("P", bound=Payload)


def unpack(data: bytes, kind: type[P]) -> P:
    """The payload of these bytes. Raises MalformedRecord where they are none."""
    return decode(lambda each: msgspec.json.decode(each, type=kind), data, "a member's payload")


pack = msgspec.json.Encoder().encode


def unpacked(payloads: Mapping[int, bytes], kind: type[P]) -> dict[int, P]:
    """Decode each member's payload. One that cannot be read is left out, as if its member had not arrived."""
    found = dict[int, P]()
    for member, data in payloads.items():
        with contextlib.suppress(UntrustedRecord):
            found[member] = unpack(data, kind)
    return found


NAMED = 8  # how many ranks a message names at most


def missing_ranks(missing: Sequence[int]) -> str:
    """The text for these ranks in a message."""
    names = ", ".join(map(str, missing[:NAMED])) + (", …" if len(missing) > NAMED else "")
    return f"rank{'' if len(missing) == 1 else 's'} {names}" if missing else "no rank"


def reads_arrivals(member: int, seen: GroupLedger, was_last: bool) -> bool:
    """Whether this member reads the barrier's arrivals to close it. If every member did, each would read all
    payloads.

    The member that arrived last finds that all have arrived. But it may be lost, or not know yet that another member
    is. So the lowest member that is left reads too: it has arrived as well, and it arrives again when it reads the
    entry about the lost one.
    """
    return was_last or all(lower in seen.lost for lower in range(member))


def disagreement(places: dict[int, NewPlace]) -> str:
    """Why these places do not make one world; empty if they do. The rule: RANK is 0 … n-1, each once, and
    WORLD_SIZE is n for all."""
    worlds = {place.world_size for place in places.values()}
    if worlds != {len(places)}:
        return f"{len(places)} ranks go on, and the rank assignment gave them world sizes {_listed(worlds)}"
    if {place.rank for place in places.values()} != set(range(len(places))):
        ranks = _listed(place.rank for place in places.values())
        return f"the rank assignment gave ranks {ranks}: each number must occur once"
    sizes = {place.active_world_size for place in places.values()}
    active = [place.active_rank for place in places.values() if place.active_rank is not None]
    if sizes != {len(active)} or set(active) != set(range(len(active))):
        return f"the active ranks are {_listed(active)}, of active world sizes {_listed(sizes)}"
    return ""


def _listed(numbers: object) -> str:
    return ", ".join(map(str, sorted(numbers)))  # type: ignore[call-overload]
