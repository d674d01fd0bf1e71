"""What a group has agreed on: the entries of one call's log, and the state that they add up to. Pure.

Every rank and every monitor reads the same log in the same order, and folds it into the same `GroupLedger`. Nothing
is decided anywhere else: a rank or monitor that finds that something holds (all have arrived, a rank is dead)
proposes an entry for the log's next place, and the store takes the first one. The author of a second entry reads the
first one, and decides again.

A *member* is a rank by the number that it began the call with. An iteration goes through these stages:

    GATHERING ──Sealed──▶ STARTING ──Opened──▶ RUNNING ──Completed──▶ COMPLETED
        ▲                    │                    │
        └────Interrupted, or Lost: the next one───┘
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.store import Connection
from nvrx_slurm.util.decoding import decode as checked


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="entry"):
    """One place of the log. `iteration`: the iteration that it is about; in any other it means nothing."""

    iteration: int


class Sealed(LogEntry, frozen=True, kw_only=True, tag="sealed"):
    """All members that are left are ready for this iteration. `missing`: the ranks lost since the one before."""

    world_size: int  # of the one before
    missing: tuple[int, ...] = ()


class IterationOpened(LogEntry, frozen=True, kw_only=True, tag="opened"):
    """All members that are left have their new ranks: the function is called."""


class Interrupted(LogEntry, frozen=True, kw_only=True, tag="interrupted"):
    """The iteration has failed: it can no longer be completed."""

    member: int
    rank: int | None
    interruption: Interruption
    text: str = ""
    host: str = ""
    stack: str = ""

    def record(self) -> InterruptionRecord:
        return InterruptionRecord(self.rank, self.interruption, self.text, self.host, self.stack)


class Settled(LogEntry, frozen=True, kw_only=True, tag="settled"):
    """All members that are left know that the iteration was interrupted, and have reported their own faults."""


class Completed(LogEntry, frozen=True, kw_only=True, tag="completed"):
    """All active ranks have returned: the iteration can no longer be interrupted."""


class Lost(LogEntry, frozen=True, kw_only=True, tag="lost"):
    """A member is out for good, and its process is dead unless it left by itself. Interrupts the member's
    iteration."""

    member: int
    interruption: Interruption
    rank: int | None = None
    text: str = ""
    host: str = ""
    inherited: bool = False  # it was lost in an earlier call

    def record(self) -> InterruptionRecord:
        return InterruptionRecord(self.rank, self.interruption, self.text, self.host)


class GroupSuspended(LogEntry, frozen=True, kw_only=True, tag="suspended"):
    """All processes are about to be stopped: until `GroupResumed` the clock is no proof that a member is dead."""


class GroupResumed(LogEntry, frozen=True, kw_only=True, tag="resumed"):
    """A member runs again."""


class Broken(LogEntry, frozen=True, kw_only=True, tag="broken"):
    """The call ends for all: the ranks disagree, and no restart can repair that."""

    reason: str


class Void(LogEntry, frozen=True, kw_only=True, tag="void"):
    """An entry that was set aside, since it is not signed with the job's key or not readable. It means nothing."""


AnyEntry = (
    Sealed
    | IterationOpened
    | Interrupted
    | Settled
    | Completed
    | Lost
    | GroupSuspended
    | GroupResumed
    | Broken
    | Void
)

encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyEntry] = msgspec.json.Decoder(AnyEntry)


def decode(data: bytes) -> AnyEntry:
    """A `Void` for what is no entry: it has its place in the log, and all ranks must count it."""
    try:
        return checked(_decoder.decode, data, "an entry of the log")
    except MalformedRecord:
        return Void(iteration=-1)


class IterationStage(enum.Enum):
    """The state of the iteration."""

    GATHERING = "gathering"  # until all are ready for it
    STARTING = "starting"  # until all have their ranks
    RUNNING = "running"
    COMPLETED = "completed"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class GroupLedger:
    """What the log adds up to. `causes`: what interrupted the last iteration that ran, and those after it; `settled`:
    all members that are left know of the last interruption."""

    members: int
    length: int = 0
    iteration: int = 0
    stage: IterationStage = IterationStage.GATHERING
    lost: Mapping[int, Lost] = field(default_factory=dict)
    causes: tuple[Interrupted | Lost, ...] = ()
    settled: bool = False
    reason: str = ""  # why it is broken
    suspended: bool = False

    @property
    def left(self) -> int:
        """The number of members that are left."""
        return self.members - len(self.lost)

    def next_member(self, member: int) -> int | None:
        """The next member in the ring that is left; None if there is no other."""
        for step in range(1, self.members):
            if (other := (member + step) % self.members) not in self.lost:
                return other
        return None


def fold(ledger: GroupLedger, entries: Iterable[AnyEntry]) -> GroupLedger:
    """The ledger after these entries, each of which takes a place of the log whether or not it means anything."""
    for entry in entries:
        ledger = _applied(ledger, entry) if accepts(ledger, entry) else ledger
        ledger = dataclasses.replace(ledger, length=ledger.length + 1)
    return ledger


def accepts(ledger: GroupLedger, entry: AnyEntry) -> bool:
    """Whether an entry means anything now. One from an older iteration, or a second one, does not."""
    stage = ledger.stage
    if stage is IterationStage.BROKEN:
        return False
    match entry:
        case Lost():
            if ledger.suspended and entry.interruption is Interruption.UNRESPONSIVE:
                return False
            return entry.member not in ledger.lost and 0 <= entry.member < ledger.members
        case Settled():
            return (
                entry.iteration == ledger.iteration - 1 and stage is IterationStage.GATHERING and not ledger.settled
            )
        case Sealed():
            # An entry that was proposed before a member was lost still counts that member.
            there = entry.world_size - len(entry.missing) == ledger.left
            return entry.iteration == ledger.iteration and stage is IterationStage.GATHERING and there
        case IterationOpened():
            return entry.iteration == ledger.iteration and stage is IterationStage.STARTING
        case Interrupted():
            is_current = entry.iteration == ledger.iteration and entry.member not in ledger.lost
            return is_current and stage in (IterationStage.STARTING, IterationStage.RUNNING)
        case Completed():
            return entry.iteration == ledger.iteration and stage is IterationStage.RUNNING
        case GroupSuspended():
            return not ledger.suspended
        case GroupResumed():
            return ledger.suspended
        case Void():
            return False
        case Broken():
            return entry.iteration == ledger.iteration and stage is not IterationStage.COMPLETED


def _applied(ledger: GroupLedger, entry: AnyEntry) -> GroupLedger:
    match entry:
        case Sealed():
            return dataclasses.replace(ledger, stage=IterationStage.STARTING)
        case IterationOpened():
            return dataclasses.replace(ledger, stage=IterationStage.RUNNING)
        case Settled():
            return dataclasses.replace(ledger, settled=True)
        case Completed():
            return dataclasses.replace(ledger, stage=IterationStage.COMPLETED)
        case Broken():
            return dataclasses.replace(ledger, stage=IterationStage.BROKEN, reason=entry.reason)
        case GroupSuspended() | GroupResumed():
            return dataclasses.replace(ledger, suspended=isinstance(entry, GroupSuspended))
        case Void():
            return ledger
        case Interrupted():
            return _interrupted(ledger, entry)
        case Lost():
            out = dataclasses.replace(ledger, lost={**ledger.lost, entry.member: entry})
            # A rank that its assignment discards does not affect the others: they start without it.
            discarded = entry.interruption is Interruption.DISCARDED
            starts_with_it = ledger.stage is IterationStage.STARTING and not discarded
            takes_part = starts_with_it or ledger.stage is IterationStage.RUNNING
            return _interrupted(out, entry) if takes_part else out


def _interrupted(ledger: GroupLedger, cause: Interrupted | Lost) -> GroupLedger:
    # An iteration that fails before it runs adds its cause to those of the iterations before it.
    causes = (cause,) if ledger.stage is IterationStage.RUNNING else (*ledger.causes, cause)
    return dataclasses.replace(
        ledger, iteration=ledger.iteration + 1, stage=IterationStage.GATHERING, causes=causes, settled=False
    )


class Log:
    """What one thread has read of the log so far."""

    def __init__(self, connection: Connection, members: int) -> None:
        self._connection = connection
        self.ledger = GroupLedger(members)

    def refresh(self) -> None:
        """Read the entries that are new, and fold them into the ledger."""
        self.ledger = fold(self.ledger, map(decode, self._connection.read(self.ledger.length, 0.0)))

    def propose(self, entry: AnyEntry) -> bool:
        """Add an entry, unless it means nothing (any more). Returns whether this call has put it into the log."""
        data = encode(entry)
        if not accepts(self.ledger, entry):
            # It may mean nothing only because this thread has not read on.
            self.refresh()
        while accepts(self.ledger, entry):
            if self._connection.append(data, self.ledger.length):
                self.refresh()
                return True
            # Another entry has taken the place. Read it: this one may mean nothing after it.
            self.refresh()
        return False
