"""The cycle that each rank goes through, as one table. Pure.

The threads of a rank do what its phase asks for, and report events: the listener reports what the group has agreed on
(`ledger.py`), the main thread its own steps, the interrupter how far it is in ending the function. The comment beside
a phase names the thread that acts in it, and what it does. The diagram in `docs/inprocess.md` is drawn from the
table.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nvrx_slurm.inprocess.ledger import AnyEntry, GroupLedger, IterationStage, Lost, Sealed, Settled, accepts, fold


class CyclePhase(enum.Enum):
    """Where a rank is."""

    ENTERING = "entering"  # main: arrives as ready for the first iteration
    REASSIGNING = "reassigning"  # main: computes its new rank
    OVERTAKEN = "overtaken"  # main: the same, for an iteration that is over already: the next one starts from it
    RE_ENTERING = "re-entering"  # main: arrives with its new rank
    RUNNING = "running"  # main: initialize, health check, the function
    COMPLETING = "completing"  # main: has returned, or waits in reserve
    INTERRUPTED = "interrupted"  # interrupter: last call
    ABORTING = "aborting"  # interrupter: waits for atomic sections, and aborts
    UNWINDING = "unwinding"  # interrupter: interrupts the main thread until it has left the function
    RECOVERING = "recovering"  # main: finalize, health check
    SYNCHRONISING = "synchronising"  # main: arrives as ready for the next iteration
    STANDING_ASIDE = "standing aside"  # main: the launcher replaces a dead rank, and ends this process
    LEAVING = "leaving"  # main: the call ends, for all or for this rank


class Event(enum.Enum):
    """What moves a rank to another phase."""

    # agreed on by the group
    SEALED = "sealed"
    OPENED = "opened"
    COMPLETED = "completed"
    FAILED = "interrupted"
    SETTLED = "settled"
    DIED = "a rank is lost, and will be replaced"
    BROKE = "broken"
    # done by this rank
    ASSIGNED = "assigned"
    RETURNED = "returned"
    LAST_CALL_OVER = "last call over"
    ABORTED = "aborted"
    OUT = "out"
    FIT = "fit"
    LEAVES = "leaves"


_ON: Mapping[tuple[CyclePhase, Event], CyclePhase] = {
    (CyclePhase.ENTERING, Event.SEALED): CyclePhase.REASSIGNING,
    (CyclePhase.REASSIGNING, Event.ASSIGNED): CyclePhase.RE_ENTERING,
    (CyclePhase.REASSIGNING, Event.FAILED): CyclePhase.OVERTAKEN,
    (CyclePhase.OVERTAKEN, Event.ASSIGNED): CyclePhase.SYNCHRONISING,
    (CyclePhase.RE_ENTERING, Event.OPENED): CyclePhase.RUNNING,
    (CyclePhase.RE_ENTERING, Event.FAILED): CyclePhase.SYNCHRONISING,
    (CyclePhase.RUNNING, Event.RETURNED): CyclePhase.COMPLETING,
    (CyclePhase.RUNNING, Event.FAILED): CyclePhase.INTERRUPTED,
    (CyclePhase.RUNNING, Event.COMPLETED): CyclePhase.LEAVING,  # a rank in reserve that has not begun to wait
    (CyclePhase.COMPLETING, Event.COMPLETED): CyclePhase.LEAVING,
    (CyclePhase.COMPLETING, Event.FAILED): CyclePhase.INTERRUPTED,
    (CyclePhase.INTERRUPTED, Event.SETTLED): CyclePhase.ABORTING,
    (CyclePhase.INTERRUPTED, Event.LAST_CALL_OVER): CyclePhase.ABORTING,
    (CyclePhase.ABORTING, Event.ABORTED): CyclePhase.UNWINDING,
    (CyclePhase.UNWINDING, Event.OUT): CyclePhase.RECOVERING,
    (CyclePhase.RECOVERING, Event.FIT): CyclePhase.SYNCHRONISING,
    (CyclePhase.SYNCHRONISING, Event.SEALED): CyclePhase.REASSIGNING,
}

# These hold in every phase but LEAVING.
_FROM_ANYWHERE: Mapping[Event, CyclePhase] = {
    Event.DIED: CyclePhase.STANDING_ASIDE,
    Event.BROKE: CyclePhase.LEAVING,
    Event.LEAVES: CyclePhase.LEAVING,
}


def after(phase: CyclePhase, event: Event) -> CyclePhase:
    """The next phase; the same phase if the event changes nothing: it came late, or another thread was faster."""
    if (phase, event) in _ON:
        return _ON[phase, event]
    if phase is not CyclePhase.LEAVING and event in _FROM_ANYWHERE:
        return _FROM_ANYWHERE[event]
    return phase


@dataclass(frozen=True, slots=True)
class RankCycle:
    """Where one member is. `sealed` is the entry that its current, or next, rank assignment goes by. `replaced`: the
    launcher puts another process in a dead one's place, so no restart inside the processes follows a death."""

    member: int
    ledger: GroupLedger
    replaced: bool = False
    phase: CyclePhase = CyclePhase.ENTERING
    sealed: Sealed | None = None

    @property
    def iteration(self) -> int:
        """This rank's iteration: one behind the ledger's while the rank still leaves one that was interrupted."""
        return self.ledger.iteration - 1 if self.phase in _BEHIND else self.ledger.iteration

    @property
    def expelled(self) -> bool:
        """Whether the group goes on without this member."""
        return self.member in self.ledger.lost

    def feed(self, event: Event) -> RankCycle:
        """The cycle after an event of this rank."""
        return dataclasses.replace(self, phase=after(self.phase, event))

    def read(self, entries: list[AnyEntry]) -> Iterator[RankCycle]:
        """One cycle for each entry, in order."""
        cycle = self
        for entry in entries:
            ledger = fold(cycle.ledger, [entry])
            event = _event(cycle, entry, ledger) if accepts(cycle.ledger, entry) else None
            sealed = entry if event is Event.SEALED and isinstance(entry, Sealed) else cycle.sealed
            phase = cycle.phase if event is None else after(cycle.phase, event)
            cycle = dataclasses.replace(cycle, ledger=ledger, sealed=sealed, phase=phase)
            yield cycle


_BEHIND = frozenset(
    {CyclePhase.INTERRUPTED, CyclePhase.ABORTING, CyclePhase.UNWINDING, CyclePhase.RECOVERING, CyclePhase.OVERTAKEN}
)


def _event(cycle: RankCycle, entry: AnyEntry, ledger: GroupLedger) -> Event | None:
    """What an entry that counts, and after which the ledger is this one, means for this rank."""
    before = cycle.ledger
    if cycle.replaced and isinstance(entry, Lost) and not entry.inherited:
        # However it left, its process ends.
        return None if before.stage is IterationStage.COMPLETED else Event.DIED
    if ledger.iteration > before.iteration:
        return Event.FAILED
    if isinstance(entry, Settled):
        return Event.SETTLED
    return _BY_STAGE[ledger.stage] if ledger.stage is not before.stage else None


_BY_STAGE: Mapping[IterationStage, Event] = {
    IterationStage.STARTING: Event.SEALED,
    IterationStage.RUNNING: Event.OPENED,
    IterationStage.COMPLETED: Event.COMPLETED,
    IterationStage.BROKEN: Event.BROKE,
}


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    name = {phase: phase.name.lower() for phase in CyclePhase}
    lines = ["stateDiagram-v2", f"    [*] --> {name[CyclePhase.ENTERING]}"]
    lines += [f"    {name[before]} --> {name[then]} : {event.value}" for (before, event), then in _ON.items()]
    running = name[CyclePhase.RUNNING]
    lines += [
        f"    {running} --> {name[then]} : {event.value}, at any time" for event, then in _FROM_ANYWHERE.items()
    ]
    return "\n".join([*lines, f"    {name[CyclePhase.LEAVING]} --> [*]"])
