"""How a monitor watches the next member in the ring: by its beats in the store, and by its process.

`Ring` decides which member to watch, and when it is dead for sure. It does no I/O. Each monitor watches the next
member in the ring who is left and has begun. That member's lease (`HeartbeatLease`) ends after three quarters of the
heartbeat timeout, counted from a beat that reached the store. A monitor that has seen no further beat for the whole
timeout, counted from that beat by its own clock, may declare the member dead. A break in contact with the store
starts the count again, so that after an outage no member is declared dead for beats that it could not send.

    who has begun       ·  ·  ●  ·  ●          ● beats   · has not begun: no monitor judges it
    the ring        me ─▶ 1  2  3  4  5        3 is watched; 1 and 2 are probed in turn, until one of them beats

`SiblingProcess` watches the member's process where it is on this host: its end is known at once, even if the member's
own monitor died first.
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import time
from dataclasses import dataclass

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import MemberProcess, NewPlace, P
from nvrx_slurm.inprocess.ledger import GroupLedger, IterationStage, Log, Lost
from nvrx_slurm.inprocess.monitor import process
from nvrx_slurm.inprocess.monitor.wire import MonitorOptions
from nvrx_slurm.inprocess.store.port import Connection
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess.monitor")


class SiblingWatch:
    """The log writer's: it beats, and hands on what the store answered. All methods raise what the store does."""

    def __init__(self, options: MonitorOptions, connection: Connection, log: Log, poller: select.poll) -> None:
        self._member, self._timeout_s = options.member, options.heartbeat_timeout_s
        self._connection, self._log, self._poller = connection, log, poller
        self.ring = Ring(
            member=options.member, timeout_s=options.heartbeat_timeout_s, interval_s=options.heartbeat_interval_s
        )
        self._process: SiblingProcess | None = None

    def judge(self, asked_at: float) -> None:
        """Record the sibling if it is silent: its beats were asked for at `asked_at`, and the log was read after
        that."""
        member = self.ring.silent(asked_at)
        if member is not None:
            self._record(member, Interruption.UNRESPONSIVE, f"no sign of life for {self._timeout_s:g} s")

    def meet(self) -> None:
        """Watch the present sibling's process too, if that can be seen from here."""
        sibling = self.ring.sibling
        if sibling is None or (self._process is not None and self._process.member == sibling.member):
            return
        own, theirs = (self._joined(member) for member in (self._member, sibling.member))
        if own is None or theirs is None:
            return
        if self._process is not None:
            self._process.forget(self._poller)
        self._process = SiblingProcess(sibling.member, own, theirs)
        self._process.watch(self._poller)

    def process_ended(self) -> None:
        """The poller has reported it."""
        if self._process is not None:
            self._process.forget(self._poller)
            self._process.has_ended(time.monotonic())

    @property
    def due_at(self) -> float:
        """When `record_ended` has something to do."""
        return math.inf if self._process is None else self._process.record_at

    def record_ended(self) -> None:
        """The neighbour's process has ended; if its monitor has had the time to say so, and has not, we do."""
        watched = self._process
        if watched is None or time.monotonic() < watched.record_at:
            return
        self._log.refresh()
        text = f"its process has ended, and its monitor did not say how (seen by member {self._member})"
        self._record(watched.member, Interruption.TERMINATED, text)
        watched.record_at = math.inf

    def _record(self, member: int, interruption: Interruption, text: str) -> None:
        """Unless the call is over: then members end as they please."""
        ledger = self._log.ledger
        if ledger.stage in (IterationStage.COMPLETED, IterationStage.BROKEN):
            return
        rank = self._rank_of(member)
        host = self._process.host if self._process is not None and self._process.member == member else ""
        lost = Lost(
            iteration=ledger.iteration, member=member, interruption=interruption, rank=rank, text=text, host=host
        )
        if self._log.propose(lost):
            log.warning("rank %s (member %d) is lost: %s", rank, member, text)

    def _rank_of(self, member: int) -> int | None:
        """The rank that a member has, or had last."""
        for iteration in range(self._log.ledger.iteration, -1, -1)[:2]:
            if (place := self._arrival(barriers.start(iteration), member, NewPlace)) is not None:
                return place.rank
        return None

    def _joined(self, member: int) -> MemberProcess | None:
        return self._arrival(barriers.JOIN, member, MemberProcess)

    def _arrival(self, barrier: str, member: int, kind: type[P]) -> P | None:
        """What a member has brought along; None: it is not there, or cannot be read."""
        payload = self._connection.arrival(barrier, member)
        try:
            return None if payload is None else barriers.unpack(payload, kind)
        except UntrustedRecord:
            return None


BREAK_SHARE = 0.25
"""Of the heartbeat timeout: a gap between two answers that is longer than this (and a beat) is no contact."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """Who is watched: how many beats it had given at the last answer, and since when it has not been more."""

    member: int
    beats: int
    since: float
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One monitor's view. `probed`: who was last looked at, of those between it and its sibling."""

    member: int
    timeout_s: float
    interval_s: float
    sibling: Sibling | None = None
    probed: int | None = None

    def asked(self, ledger: GroupLedger) -> tuple[int | None, ...]:
        """Whose beats to read next, at least one; None if there is no other member."""
        sibling = None if self.sibling is None or self.sibling.member in ledger.lost else self.sibling.member
        nearest = ledger.next_member(self.member)
        if sibling is None or sibling == nearest:
            return (self._probe(ledger, None),) if sibling is None else (sibling,)
        return (sibling, self._probe(ledger, sibling))

    def _probe(self, ledger: GroupLedger, end: int | None) -> int | None:
        """The one after the last one that was probed, within what lies between this member and `end`."""
        following = ledger.next_member(self.member if self.probed is None else self.probed)
        return ledger.next_member(self.member) if following in (None, self.member, end) else following

    def answered(self, member: int | None, beats: int, now: float) -> Ring:
        """This many beats of a member were in the store at some moment up to `now`, on the monotonic clock."""
        if member is None:
            return self
        if self.sibling is not None and member == self.sibling.member:
            before = self.sibling
            unbroken = now - before.seen_at <= self.interval_s + BREAK_SHARE * self.timeout_s
            since = before.since if unbroken and beats == before.beats else now
            return dataclasses.replace(self, sibling=Sibling(before.member, beats, since, now))
        if beats == 0:
            return dataclasses.replace(self, probed=member)
        return dataclasses.replace(self, sibling=Sibling(member, beats, now, now), probed=None)

    def out_of_touch(self) -> Ring:
        """The store did not answer: the sibling's time starts again."""
        if self.sibling is None:
            return self
        return dataclasses.replace(self, sibling=dataclasses.replace(self.sibling, seen_at=float("-inf")))

    def silent(self, asked_at: float) -> int | None:
        """Who is dead: its beats were asked for at `asked_at`, and are what they were a timeout earlier."""
        sibling = self.sibling
        return sibling.member if sibling is not None and asked_at - sibling.since >= self.timeout_s else None

    def beats_since(self, asked_at: float) -> bool:
        """Whether the sibling was seen to beat, or to be another one, after `asked_at`."""
        return self.sibling is not None and self.sibling.since >= asked_at


HEAD_START_S = 0.1
"""A process that has ended is first left to its own monitor, which knows how, and why."""


class SiblingProcess:
    """A member's process. `record_at`: when its end is to be recorded, unless its monitor has; infinite while it
    lives, and where it cannot be seen from here."""

    def __init__(self, member: int, own: MemberProcess, theirs: MemberProcess) -> None:
        self.member, self.host = member, theirs.host
        self.pidfd = process.find(theirs.pid, theirs.began) if own.host == theirs.host else None
        self.record_at = math.inf

    def watch(self, poller: select.poll) -> None:
        """Have the poller report its end."""
        if self.pidfd is not None:
            poller.register(self.pidfd, select.POLLIN)

    def forget(self, poller: select.poll) -> None:
        """It is watched no longer."""
        if self.pidfd is not None:
            poller.unregister(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None

    def has_ended(self, now: float) -> None:
        """Its own monitor has a head start."""
        self.record_at = now + HEAD_START_S
