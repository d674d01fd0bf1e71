"""One restart of a group: how long each of its parts took, and the reports of that to log, user and agent."""

from __future__ import annotations

import enum
import time

import msgspec

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import InterruptionRecord, clean, format_interruption_records
from nvrx_slurm.inprocess.barriers import NewPlace, Noticing
from nvrx_slurm.inprocess.group import Group
from nvrx_slurm.journal.restarts import (
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_FAULTS,
    MOST_MISSING,
    MOST_RANKS,
    InProcessRestart,
    RankFault,
    RankPhases,
    encode,
)
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.workload.channel import has_agent
from nvrx_slurm.workload.channel import tell_agent as send


class RestartPart(enum.StrEnum):
    """The parts of a restart, in order; each ends where the next one begins."""

    DETECTED = "detected"  # from the fault, if this rank saw it, until this rank knew that the iteration was over
    LAST_CALL = "last_call"  # until all ranks had reported
    ABORTED = "aborted"  # until atomic sections had ended and Abort had returned
    LEFT = "left"  # until the function was left
    FINALIZED = "finalized"
    CHECKED = "checked"  # until the health check had returned
    SYNCHRONISED = "synchronised"  # until all were ready
    REASSIGNED = "reassigned"
    RE_ENTERED = "re_entered"  # until the function is called again


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's phases, in seconds. `member`: its initial rank; `rank`: its new one."""

    member: int
    rank: int
    host: str
    phases: dict[str, float]


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of a group. `at`: seconds since the epoch, when the rank that reports it re-entered."""

    at: float
    group: str
    call: int
    iteration: int  # the one that began
    world_size: int
    active_world_size: int
    missing: tuple[int, ...]  # ranks of the iteration before that are out
    records: tuple[InterruptionRecord, ...]
    ranks: tuple[RankTimeline, ...]

    def slowest(self, phase: RestartPart) -> float:
        """The longest that a rank took for a phase, in seconds."""
        return max((rank.phases.get(phase, 0.0) for rank in self.ranks), default=0.0)

    @property
    def total_s(self) -> float:
        """From the fault to the last rank's return into the function."""
        return max((sum(rank.phases.values()) for rank in self.ranks), default=0.0)


class Stopwatch:
    """The thread that ends a part marks it; each part begins where the one before it ended."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        """A fault happens on this rank now: a restart begins."""
        self._last, self._parts = time.monotonic(), {}

    def mark(self, phase: RestartPart) -> None:
        """This part has ended. Without `begin`, the first mark begins the restart."""
        now = time.monotonic()
        if phase is RestartPart.DETECTED and (self._last is None or self._parts):
            self._last, self._parts = now, {}
        if self._last is not None:
            self._parts[phase.value] = self._parts.get(phase.value, 0.0) + now - self._last
            self._last = now

    def parts(self) -> dict[str, float]:
        """The parts so far, in seconds."""
        return dict(self._parts)


log = get_logger("inprocess")


def send_to_agent(restart: Restart) -> None:
    """One datagram to this node's agent, if there is one; one rank of a group sends it.

    Never waits and never raises: an agent whose socket is full does not get it, and the group goes on.
    """
    if not has_agent():
        return
    try:
        send(encode(shortened(restart)))
    except Exception:
        # The group has restarted: a journal without this restart is no reason to fail.
        log.warning("the restart was not reported to the agent", exc_info=True)


def shortened(restart: Restart) -> InProcessRestart:
    """The restart in a form that fits into one datagram, for any number of ranks and any error."""
    # By phase: the longest time that a rank needed, and that rank.
    longest: dict[str, float] = {}
    slowest: dict[str, int] = {}
    for phase in RestartPart:
        took = [(rank.phases[phase], rank.rank) for rank in restart.ranks if phase in rank.phases]
        if took:
            seconds, slowest[phase.value] = max(took)
            longest[phase.value] = round(seconds, 6)
    return InProcessRestart(
        cause=_clean(format_interruption_records(restart.records), LONGEST_TEXT),
        call=restart.call,
        iteration=restart.iteration,
        world_size=restart.world_size,
        active_world_size=restart.active_world_size,
        total_s=round(restart.total_s, 6),
        phases=longest,
        slowest=slowest,
        faults=tuple(
            RankFault(
                kind=record.interruption.value,
                rank=record.rank,
                host=_clean(record.host, LONGEST_NAME),
                text=_clean(record.text.strip().partition("\n")[0], LONGEST_TEXT),
            )
            for record in restart.records[:MOST_FAULTS]
        ),
        lost=len(restart.missing),
        missing=restart.missing[:MOST_MISSING],
        ranks=tuple(
            RankPhases(
                rank=rank.rank,
                host=_clean(rank.host, LONGEST_NAME),
                phases={part.value: round(rank.phases[part], 6) for part in RestartPart if part in rank.phases},
            )
            for rank in sorted(restart.ranks, key=lambda rank: -sum(rank.phases.values()))[:MOST_RANKS]
        ),
    )


def _clean(text: str, most: int) -> str:
    return clean(text[:most])


class RestartReporter:
    """Reports the group's restarts, on the rank that does so. Only the listener uses it."""

    def __init__(self, group: Group, name: str, call: int) -> None:
        self._group, self._name, self._call = group, name, call
        # Members that an earlier report has named as lost.
        self._lost: set[int] = set()

    def report(self, re_entered_s: float) -> Restart:
        """Report the restart that has just ended, from the records of all ranks."""
        sealed = self._group.sealed
        places = self._group.arrivals(barriers.start(sealed.iteration), NewPlace)
        places = {member: place for member, place in places.items() if member not in self._group.ledger.lost}
        # All re-enter at once, by one entry of the log: so this rank's time for that holds for all.
        restart = Restart(
            at=time.time(),
            group=self._name,
            call=self._call,
            iteration=sealed.iteration,
            world_size=len(places),
            active_world_size=max((place.active_world_size for place in places.values()), default=0),
            missing=sealed.missing,
            records=self._records(sealed.iteration),
            ranks=tuple(
                RankTimeline(
                    member=member,
                    rank=place.rank,
                    host=place.process.host,
                    phases={**place.phases, RestartPart.RE_ENTERED.value: re_entered_s},
                )
                for member, place in sorted(places.items(), key=lambda item: item[1].rank)
            ),
        )
        log.warning("%s", in_one_line(restart))
        send_to_agent(restart)
        return restart

    def skip(self) -> None:
        """Another rank reports this one."""
        self._lost.update(self._group.ledger.lost)

    def _records(self, iteration: int) -> tuple[InterruptionRecord, ...]:
        """The records since the function last ran: the causes, then the lost members, then those that failed too."""
        ledger = self._group.ledger
        fresh = [lost for member, lost in ledger.lost.items() if member not in self._lost and not lost.inherited]
        entries = [*ledger.causes, *(lost for lost in fresh if lost not in ledger.causes)]
        named = {entry.member for entry in entries}
        notices = [
            notice.fault
            for before in range(iteration - len(ledger.causes), iteration)
            for member, notice in self._group.arrivals(barriers.notice(before), Noticing).items()
            if member not in named and notice.fault is not None
        ]
        self.skip()
        return (*(entry.record() for entry in entries), *notices)


def in_one_line(restart: Restart) -> str:
    """The restart in one line: what happened, how many ranks are left, and how long it took."""
    parts = ", ".join(
        f"{each.value} {1e3 * restart.slowest(each):.1f}" for each in RestartPart if restart.slowest(each)
    )
    who = f"{restart.active_world_size} of {restart.world_size} ranks"
    return (
        f"restart in process: iteration {restart.iteration} began on {who}, after:"
        f" {format_interruption_records(restart.records)}; {1e3 * restart.total_s:.1f} ms ({parts})"
    )
