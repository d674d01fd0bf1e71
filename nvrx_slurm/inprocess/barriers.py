"""Where all members of a group arrive, and the payload that each brings. Pure.

The ledger gives the number of arrivals that a barrier waits for. A member that waits asks again on each entry that it
reads: lost members are not waited for.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.ledger import GroupLedger, Interrupted
from nvrx_slurm.util.decoding import decode

JOIN = "join"
"""Which process a member is, so that another run's keys are not taken for this one's."""

LEFT = "left"
"""Who has completed the call and reads nothing of it any more."""


def ready(iteration: int) -> str:
    """All are healthy, and have left the iteration before: the terminated ranks may be sealed."""
    return f"ready:{iteration}"


def start(iteration: int) -> str:
    """All have their new ranks."""
    return f"start:{iteration}"


def notice(iteration: int) -> str:
    """All know that the iteration was interrupted."""
    return f"notice:{iteration}"


def complete(iteration: int) -> str:
    """All active ranks have returned."""
    return f"complete:{iteration}"


class Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what members bring along."""


class MemberProcess(Payload, frozen=True, kw_only=True):
    """One process: its host, its id there, and when it began, in the kernel's ticks."""

    host: str
    pid: int
    began: int


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
    """What a member itself has to say of the interruption, if anything."""

    rank: int | None = None
    interruption: Interruption | None = None
    text: str = ""
    host: str = ""
    stack: str = ""

    @classmethod
    def of(cls, entry: Interrupted) -> Noticing:
        """What the entry says of who failed, and why."""
        return cls(**{name: getattr(entry, name) for name in cls.__struct_fields__})

    def record(self) -> InterruptionRecord | None:
        if self.interruption is None:
            return None
        return InterruptionRecord(self.rank, self.interruption, self.text, self.host, self.stack)


P = TypeVar("P", bound=Payload)


def unpack(data: bytes, kind: type[P]) -> P:
    """Raises MalformedRecord."""
    return decode(lambda each: msgspec.json.decode(each, type=kind), data, "what a member has brought along")


pack = msgspec.json.Encoder().encode


def looks(member: int, seen: GroupLedger, was_last: bool) -> bool:
    """Whether it is for this member to read who has arrived. Not for all: each would read all of them.

    Who was last to come sees that all are here, unless one of them is lost and the last one does not know, or is that
    one. Then the lowest who is left does: it is here, since all are, and reads that entry later than they came.
    """
    return was_last or all(lower in seen.lost for lower in range(member))


def disagreement(places: dict[int, NewPlace]) -> str:
    """Why these places are no ranks of one world; empty if they are. Source of the rule: RANK and WORLD_SIZE are
    0 … n-1 of n, each once, and the same n for all."""
    worlds = {place.world_size for place in places.values()}
    if worlds != {len(places)}:
        return f"{len(places)} ranks go on, and the rank assignment gave them world sizes {_listed(worlds)}"
    if {place.rank for place in places.values()} != set(range(len(places))):
        ranks = _listed(place.rank for place in places.values())
        return f"the rank assignment gave ranks {ranks}: each must be there once"
    sizes = {place.active_world_size for place in places.values()}
    active = [place.active_rank for place in places.values() if place.active_rank is not None]
    if sizes != {len(active)} or set(active) != set(range(len(active))):
        return f"the active ranks are {_listed(active)}, of active world sizes {_listed(sizes)}"
    return ""


def _listed(numbers: object) -> str:
    return ", ".join(map(str, sorted(numbers)))  # type: ignore[call-overload]
