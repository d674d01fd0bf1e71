"""A group of ranks and monitors without processes: the steps of their threads, one at a time, in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import NewPlace, Noticing, Ready, pack
from nvrx_slurm.inprocess.cycle import CyclePhase, Event, RankCycle
from nvrx_slurm.inprocess.ledger import (
    AnyEntry,
    Broken,
    Completed,
    GroupLedger,
    Interrupted,
    IterationOpened,
    IterationStage,
    Log,
    Lost,
    Sealed,
    Settled,
    decode,
    encode,
)
from tests.unit.inprocess.store_model import Line, Shared

P = TypeVar("P", bound=barriers.Payload)

WHO = barriers.MemberProcess(host="here", pid=1, began=1)


@dataclass
class Pending:
    """A proposal on its way; its rank knew the first `after` entries of the log when it made it."""

    entry: AnyEntry
    after: int


@dataclass(frozen=True)
class Entered:
    """A rank that has entered the function."""

    iteration: int
    rank: int
    world_size: int


Assignment = Callable[[int, Sealed], int | None]


def fill(rank: int, sealed: Sealed) -> int | None:
    """The last ranks move into the gaps."""
    left = sealed.world_size - len(sealed.missing)
    gaps = [gone for gone in sealed.missing if gone < left]
    late = [there for there in range(left, sealed.world_size) if there not in sealed.missing]
    return dict(zip(late, gaps, strict=True)).get(rank, rank)


def keep_two(rank: int, sealed: Sealed) -> int | None:
    """Ranks move up, and all beyond the first two are left out."""
    moved = rank - sum(gone < rank for gone in sealed.missing)
    return moved if moved < 2 else None


@dataclass(frozen=True)
class Settings:
    """A group's size, and how its ranks are assigned."""

    members: int
    assignment: Assignment
    most_in_world: int
    most_active: int


class Rank:
    """One rank's threads, process and monitor. It shares only the store with the others."""

    def __init__(self, member: int, settings: Settings, shared: Shared) -> None:
        self.member, self.settings = member, settings
        self.rank, self.world_size = member, settings.members
        self.active: int | None = None
        self.line, self.monitor_line = Line(shared), Line(shared)
        self.log = Log(Line(shared), settings.members)
        self.monitor = Log(self.monitor_line, settings.members)
        self.cycle = RankCycle(member, GroupLedger(settings.members))
        self.counts: dict[str, int] = {}  # barrier → how many had arrived when this rank first did
        self.looked: dict[str, int] = {}  # barrier → length of the log when it last looked
        self.pending: list[Pending] = []
        self.entered: list[Entered] = []
        self.completed: int | None = None
        self.alive = self.monitored = True
        self.left = self.stuck = self.hangs = self.fails = self.returns = False
        self.condemned: Interruption | None = None

    @property
    def gone(self) -> bool:
        """It takes no more steps: its process is dead, or it has left the call."""
        return not self.alive or self.left

    @property
    def at_work(self) -> bool:
        """It is in the function, or leaving it."""
        here = self.cycle.phase in (CyclePhase.RUNNING, CyclePhase.RECOVERING)
        return here and not (self.gone or self.stuck or self.fails or self.condemned)

    # --- the steps of its threads

    def listen(self, most: int = 1 << 30) -> None:
        """The listener reads new entries."""
        if self.gone or self.stuck:
            return
        self.line.prefix = most
        for cycle in self.cycle.read([decode(data) for data in self.line.read(self.cycle.ledger.length, 0.0)]):
            self.cycle = cycle
            if (
                cycle.phase is CyclePhase.LEAVING
                and cycle.ledger.stage is IterationStage.COMPLETED
                and self.completed is None
            ):
                self.completed = cycle.iteration

    def act(self) -> None:
        """The thread whose turn it is takes its next step."""
        if not (self.gone or self.stuck or self.condemned):
            self._steps[self.cycle.phase]()

    @property
    def _steps(self) -> Mapping[CyclePhase, Callable[[], None]]:
        return {
            CyclePhase.ENTERING: self._be_ready,
            CyclePhase.SYNCHRONISING: self._be_ready,
            CyclePhase.REASSIGNING: self._reassign,
            CyclePhase.OVERTAKEN: self._reassign,
            CyclePhase.RE_ENTERING: self._start,
            CyclePhase.RUNNING: self._run,
            CyclePhase.COMPLETING: self._complete,
            CyclePhase.INTERRUPTED: self._notice,
            CyclePhase.ABORTING: lambda: self._feed(Event.ABORTED),
            CyclePhase.UNWINDING: lambda: self._feed(Event.OUT),
            CyclePhase.RECOVERING: lambda: self._feed(Event.FIT),
            CyclePhase.STANDING_ASIDE: lambda: None,
            CyclePhase.LEAVING: self._end,
        }

    def _feed(self, event: Event) -> None:
        self.hangs = self.fails = self.returns = False
        self.cycle = self.cycle.feed(event)

    def _be_ready(self) -> None:
        i = self.cycle.iteration
        if self._closes(barriers.ready(i), Ready(rank=self.rank)):
            there = {ready.rank for ready in self._arrived(barriers.ready(i), Ready).values()}
            missing = tuple(sorted(set(range(self.world_size)) - there))
            self._propose(Sealed(iteration=i, world_size=self.world_size, missing=missing))

    def _reassign(self) -> None:
        sealed = self.cycle.sealed
        assert sealed is not None, "there is something to reassign by"
        rank = self.settings.assignment(self.rank, sealed)
        if rank is None:
            self._leave(Interruption.DISCARDED)
            return
        left = sealed.world_size - len(sealed.missing)
        self.rank, self.world_size = rank, min(left, self.settings.most_in_world)
        self.active = rank if rank < self.settings.most_active else None
        self._feed(Event.ASSIGNED)

    def _start(self) -> None:
        i = self.cycle.iteration
        place = NewPlace(
            rank=self.rank,
            world_size=self.world_size,
            active_rank=self.active,
            active_world_size=self._active_world_size,
            process=WHO,
        )
        if self._closes(barriers.start(i), place):
            wrong = barriers.disagreement(self._arrived(barriers.start(i), NewPlace))
            self._propose(Broken(iteration=i, reason=wrong) if wrong else IterationOpened(iteration=i))

    def _run(self) -> None:
        now = Entered(self.cycle.iteration, self.rank, self.world_size)
        if now not in self.entered:
            self.entered.append(now)
        elif self.returns and not (self.hangs or self.fails):
            self._feed(Event.RETURNED)

    def _complete(self) -> None:
        i = self.cycle.iteration
        if self.active is None:
            return
        if self.line.arrive(barriers.complete(i), self.member) >= self._active_world_size:
            self._propose(Completed(iteration=i))

    def _notice(self) -> None:
        i = self.cycle.iteration
        if self._closes(barriers.notice(i), Noticing()):
            self._propose(Settled(iteration=i))

    def _end(self) -> None:
        self.left = True

    @property
    def _active_world_size(self) -> int:
        return min(self.world_size, self.settings.most_active)

    def _closes(self, barrier: str, payload: barriers.Payload) -> bool:
        """Arrives, and again at each entry; returns whether all have arrived and this rank is to close the
        barrier."""
        ledger = self.cycle.ledger
        if self.looked.get(barrier) == ledger.length:
            return False
        self.looked[barrier] = ledger.length
        count = self.line.arrive(barrier, self.member, pack(payload))
        was_last = count == self.counts.setdefault(barrier, count)
        if count < ledger.left or not barriers.reads_arrivals(self.member, ledger, was_last):
            return False
        return len(self._arrived(barrier, type(payload))) >= ledger.left

    def _arrived(self, barrier: str, kind: type[P]) -> dict[int, P]:
        """The members that have arrived and were not lost since."""
        lost = self.cycle.ledger.lost
        here = self.line.arrivals(barrier).items()
        return {member: msgspec.json.decode(data, type=kind) for member, data in here if member not in lost}

    # --- proposals

    def _propose(self, entry: AnyEntry) -> None:
        if entry not in [each.entry for each in self.pending]:
            self.pending.append(Pending(entry, self.log.ledger.length))

    def send(self, *, unanswered: bool = False) -> None:
        """Sends the oldest proposal to the store. One of a dead process is appended only at the position for which it
        was made."""
        if not self.pending:
            return
        first = self.pending.pop(0)
        if not self.alive:
            self.line.append(encode(first.entry), first.after)
            return
        self.line.unanswered = unanswered
        self.log.propose(first.entry)
        self.line.unanswered = False

    def _leave(self, why: Interruption) -> None:
        """The rank leaves by itself: the process lives on, outside of the call."""
        lost = Lost(iteration=self.cycle.iteration, member=self.member, interruption=why)
        self.log.propose(lost)
        self._feed(Event.LEAVES)

    # --- faults and returns

    def come_back(self) -> None:
        """The function returns."""
        self.returns = True

    def hang(self) -> None:
        """The function does not return until it is interrupted."""
        self.hangs = True

    def fail(self) -> None:
        """The function raises."""
        self.fails = True
        self._propose(self._interrupted(Interruption.EXCEPTION))

    def abandon(self) -> None:
        """The function raises a BaseException that is no Exception."""
        self._leave(Interruption.BASE_EXCEPTION)

    def terminate(self) -> None:
        """Its health check fails: the monitor ends the process."""
        self.condemned = Interruption.UNHEALTHY

    def die(self) -> None:
        """The process ends at any point."""
        self.alive = False

    def die_with_monitor(self) -> None:
        """The process ends together with its monitor, so that no process sees it: a whole node fails."""
        self.alive = self.monitored = False

    def stand_still(self) -> None:
        """None of its threads runs any more."""
        self.stuck = True

    def watch(self, *, timeouts: bool = False) -> None:
        """The monitor looks at its rank, and records what it finds."""
        if not self.monitored or self.left:
            return
        if self.condemned or (self.stuck and timeouts):
            self.alive = False
        elif self.hangs and timeouts:
            self.monitor.propose(self._interrupted(Interruption.SOFT_TIMEOUT, self.monitor.ledger.iteration))
        if not self.alive:
            self.monitor.propose(self._lost(self.condemned or Interruption.TERMINATED))

    def judge(self, siblings: Sequence[Rank]) -> None:
        """The monitor looks at the next member in the ring. Silence for the timeout means that its process is
        dead."""
        if not self.monitored or self.gone:
            return
        self.monitor.refresh()
        watched = self.monitor.ledger.next_member(self.member)
        if watched is not None and not (siblings[watched].alive or siblings[watched].monitored):
            self.monitor.propose(siblings[watched]._lost(Interruption.UNRESPONSIVE))

    def _interrupted(self, why: Interruption, iteration: int | None = None) -> Interrupted:
        at = self.cycle.iteration if iteration is None else iteration
        return Interrupted(iteration=at, member=self.member, rank=self.rank, interruption=why)

    def _lost(self, why: Interruption) -> Lost:
        return Lost(iteration=self.cycle.iteration, member=self.member, interruption=why, rank=self.rank)
