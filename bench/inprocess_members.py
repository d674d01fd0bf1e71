"""`… -m bench.inprocess_members URL PASSWORD_FILE MEMBERS FIRST COUNT`: some members of a group without processes.

Each does in the store what a rank does there, with its own view of the log and its own arrivals; one connection
serves all of this process, one operation after the other, and they are woken by one wait.

    in    join                 all call the function
          raise <member>       it raises: a restart
          kill <member>        its process dies while all are in the function: a restart
          unfit <member>       it raises, and stays behind while all others wait for it
          lose <member>        it is out, and they go on
    out   ready                connected
          <moment>             an order was obeyed (unfit: all others wait); seconds of the monotonic clock
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import (
    MemberProcess,
    NewPlace,
    Noticing,
    Payload,
    Ready,
    disagreement,
    pack,
    unpacked,
)
from nvrx_slurm.inprocess.cycle import CyclePhase, Event, RankCycle
from nvrx_slurm.inprocess.ledger import (
    AnyEntry,
    Broken,
    GroupLedger,
    Interrupted,
    IterationOpened,
    Log,
    Lost,
    Sealed,
    Settled,
    decode,
)
from nvrx_slurm.inprocess.store import Connection
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.util.clock import SystemClock

WAIT_S = 60.0
PROCESS = MemberProcess(host="bench", pid=1, began=1)


@dataclass
class Arrived:
    """At which barrier, and how many had come by then."""

    gate: str = ""
    count: int = 0
    losses: int = 0


@dataclass
class Member:
    """One rank's part in the restart protocol."""

    number: int
    connection: Connection
    cycle: RankCycle
    rank: int
    world_size: int
    arrived: Arrived = field(default_factory=Arrived)
    unfit: bool = False

    def read(self) -> None:
        """What its listener does when it is woken."""
        entries = self.connection.read(self.cycle.ledger.length, 0.0)
        for cycle in self.cycle.read([decode(data) for data in entries]):
            self.cycle = cycle

    def go_on(self) -> None:
        """As far as it gets without the others."""
        before = None
        while before is not self.cycle.phase and self.cycle.phase in self._steps:
            before = self.cycle.phase
            self._steps[before]()

    @property
    def _steps(self) -> Mapping[CyclePhase, Callable[[], None]]:
        return {
            CyclePhase.ENTERING: self._enter,
            CyclePhase.SYNCHRONISING: self._synchronise,
            CyclePhase.REASSIGNING: self._reassign,
            CyclePhase.RE_ENTERING: self._re_enter,
            CyclePhase.INTERRUPTED: self._notice,
            CyclePhase.ABORTING: lambda: self._feed(Event.ABORTED),
            CyclePhase.UNWINDING: lambda: self._feed(Event.OUT),
            CyclePhase.RECOVERING: lambda: None if self.unfit else self._feed(Event.FIT),
        }

    def propose(self, entry: AnyEntry) -> None:
        log = Log(self.connection, self.cycle.ledger.members)
        log.ledger = self.cycle.ledger
        log.propose(entry)

    def _feed(self, event: Event) -> None:
        self.cycle = self.cycle.feed(event)

    def _enter(self) -> None:
        if not self.arrived.gate:
            self.connection.arrive(barriers.JOIN, self.number, pack(PROCESS))
        self._synchronise()

    def _synchronise(self) -> None:
        self._arrive(barriers.ready(self.cycle.iteration), Ready(rank=self.rank), self._sealed)

    def _sealed(self, here: Mapping[int, bytes]) -> Sealed:
        missing = set(range(self.world_size)) - {ready.rank for ready in unpacked(here, Ready).values()}
        return Sealed(iteration=self.cycle.iteration, world_size=self.world_size, missing=tuple(sorted(missing)))

    def _reassign(self) -> None:
        sealed = self.cycle.sealed
        assert sealed is not None, "this phase begins with it"
        self.rank -= sum(gone < self.rank for gone in sealed.missing)
        self.world_size = sealed.world_size - len(sealed.missing)
        self._feed(Event.ASSIGNED)

    def _re_enter(self) -> None:
        size = self.world_size
        place = NewPlace(
            rank=self.rank, world_size=size, active_rank=self.rank, active_world_size=size, process=PROCESS
        )
        self._arrive(barriers.start(self.cycle.iteration), place, self._opened)

    def _opened(self, here: Mapping[int, bytes]) -> IterationOpened | Broken:
        reason = disagreement(unpacked(here, NewPlace))
        iteration = self.cycle.iteration
        return Broken(iteration=iteration, reason=reason) if reason else IterationOpened(iteration=iteration)

    def _notice(self) -> None:
        iteration = self.cycle.iteration
        self._arrive(barriers.notice(iteration), Noticing(), lambda _: Settled(iteration=iteration))

    def _arrive(self, gate: str, payload: Payload, close: Callable[[Mapping[int, bytes]], AnyEntry]) -> None:
        """As `Group.arrive` does."""
        # Once, and again when a member was lost since: the barrier may be complete without it.
        ledger = self.cycle.ledger
        if self.arrived.gate == gate and self.arrived.losses == len(ledger.lost):
            return
        count = self.connection.arrive(gate, self.number, pack(payload))
        first = self.arrived.count if self.arrived.gate == gate else count
        self.arrived = Arrived(gate, first, len(ledger.lost))
        if count >= ledger.left and barriers.reads_arrivals(self.number, ledger, count == first):
            here = self.connection.arrivals(gate)
            self.propose(close({member: data for member, data in here.items() if member not in ledger.lost}))


def main() -> None:
    url, password_file = sys.argv[1:3]
    members, first, count = map(int, sys.argv[3:])
    store = RedisStore(url=url, password_file=password_file)
    connection, clock = store.connect(f"bench-{members}", 0), SystemClock()
    own = {
        number: Member(number, connection, RankCycle(number, GroupLedger(members)), number, members)
        for number in range(first, first + count)
    }
    print("ready", flush=True)
    fleet = Fleet(own, connection)
    for line in sys.stdin:
        order, *who = line.split()
        fleet.obey(order, int(who[0]) if who else None)
        print(clock.monotonic(), flush=True)


@dataclass
class Fleet:
    """The members of this process."""

    members: dict[int, Member]
    connection: Connection
    iteration: int = 0

    def obey(self, order: str, who: int | None) -> None:
        self.iteration += order in ("raise", "kill", "unfit")
        if who in self.members:
            self._harm(order, who)
        self._serve(CyclePhase.SYNCHRONISING if order == "unfit" else CyclePhase.RUNNING)

    def _harm(self, order: str, who: int) -> None:
        member = self.members[who]
        member.unfit = order == "unfit"
        if order in ("raise", "unfit"):
            member.propose(
                Interrupted(
                    member=who, rank=member.rank, iteration=self.iteration - 1, interruption=Interruption.EXCEPTION
                )
            )
            return
        member.propose(
            Lost(member=who, rank=member.rank, iteration=self.iteration, interruption=Interruption.TERMINATED)
        )
        del self.members[who]

    def _serve(self, until: CyclePhase) -> None:
        """Until all (but one who is unfit) have come to this phase of the iteration."""
        while True:
            for member in self.members.values():
                member.go_on()
            cycles = [member.cycle for member in self.members.values() if not member.unfit]
            if all(cycle.phase is until and cycle.iteration == self.iteration for cycle in cycles):
                return
            known = min(cycle.ledger.length for cycle in cycles)
            assert self.connection.read(known, WAIT_S), f"nothing happened in {WAIT_S:.0f} s"
            for member in self.members.values():
                member.read()


if __name__ == "__main__":
    main()
