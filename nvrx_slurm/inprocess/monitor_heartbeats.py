"""A monitor's thread for the store: heartbeats, the lease, what must be recorded, and the next member in the ring.

The thread may wait for the store as long as the lease permits. The monitor's loop (`monitor_loop.py`) never waits for
the store.

`Ring` decides which member to watch, and when it is dead for sure. It does no I/O. Each monitor watches the next
member in the ring who is left and has begun. That member's lease (`HeartbeatLease`) ends after three quarters of the
heartbeat timeout, counted from a heartbeat that reached the store. A monitor that has seen no further heartbeat for
the whole timeout, counted from that heartbeat by its own clock, may declare the member dead. A break in contact with
the store starts the count again, so that after an outage no member is declared dead for heartbeats that it could not
send.

    who has begun       ·  ·  ●  ·  ●          ● sends heartbeats   · has not begun: no monitor judges it
    the ring        me ─▶ 1  2  3  4  5        3 is watched; 1 and 2 are probed in turn, until one of them sends

While the watched member is silent, the members behind it are watched too, up to the first one that sends: a host that
is lost takes several members along, and their timeouts run at the same time instead of one after the other.

`SiblingProcess` watches the member's process where it is on this host: its end is known at once, even if the member's
own monitor died first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import DEATHS, Interruption
from nvrx_slurm.inprocess.barriers import MemberProcess, NewPlace, P
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.ledger import (
    GroupLedger,
    GroupResumed,
    GroupSuspended,
    Interrupted,
    IterationStage,
    Log,
    Lost,
)
from nvrx_slurm.inprocess.monitor import MonitorOptions
from nvrx_slurm.inprocess.store import Connection
from nvrx_slurm.liveness.self_fence import SelfFenceTimer
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import started_ticks

log = get_logger("inprocess.monitor")

# Of the heartbeat timeout. A sibling waits for all of it, so that what it calls dead has died before.
SHARE = 0.75
# When the kernel kills a monitor that has not looked at its lease (it is frozen), and thereby its rank.
SELF_FENCE_SHARE = 0.8
# Of the heartbeat timeout: a gap between two answers that is longer than this (and an interval) is no contact.
BREAK_SHARE = 0.25
# Of the heartbeat timeout: after so much silence of the sibling the members behind it are watched too.
DOUBT_SHARE = 0.25
# After so many heartbeat intervals of silence of the last one of these, twice as many are watched.
DOUBT_INTERVALS = 2
READ_SHARE = 0.1  # of the heartbeat timeout: how often the log is read, if nothing else is a reason to
AGAIN_S = 0.1  # how soon a record is tried again that the store did not take
STANDSTILL_S = 3.0  # a pause of this thread that is so much longer than a heartbeat interval: the process was stopped
# How long after its announcement a suspension may begin (Slurm stops processes two seconds after it).
SUSPENSION_S = 10.0
HEAD_START_S = 0.1  # a process that has ended is first left to its own monitor, which knows how, and why


class HeartbeatLease:
    """`ends_at`, on the monotonic clock: a moment that only a heartbeat moves on, and that the first one sets. The
    log writer renews it; the loop kills the rank once it has passed."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._self_fence = SelfFenceTimer()
        self.ends_at = math.inf
        self.is_suspended = False

    def suspend(self) -> None:
        """All processes are about to be stopped, and the log says so: the lease has no end until `resume`."""
        self.is_suspended = True
        self.ends_at = math.inf
        self._self_fence.disarm()

    def resume(self) -> None:
        """The lease begins again."""
        self.is_suspended = False
        self.renew(time.monotonic())

    def renew(self, sent_at: float) -> None:
        """A heartbeat has reached the store. When it was sent counts: the store may have had it since then."""
        if self.is_suspended:
            return
        self.ends_at = sent_at + SHARE * self._timeout_s
        self._self_fence.arm(sent_at + SELF_FENCE_SHARE * self._timeout_s - time.monotonic())

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()


class LogWriter(threading.Thread):
    """`opened` is done when the first heartbeat was stored; `on_end` is called here if the rank must end."""

    def __init__(
        self,
        options: MonitorOptions,
        lease: HeartbeatLease,
        connect: Callable[[int], Connection],
        on_end: Callable[[Lost | Exception], None],
    ) -> None:
        super().__init__(name="nvrx-log-writer", daemon=True)
        self.opened: Future[None] = Future()
        self._options, self._lease, self._connect, self._on_end = options, lease, connect, on_end
        self._inbox: deque[Interrupted | Lost] = deque()
        self._last: Future[Lost] = Future()
        self._beat_at = self._read_at = 0.0
        self._is_in_touch = True
        self._kill_ordered = False
        self._announced = False
        # When this thread first saw that the group is suspended, and when it last ran.
        self._suspended_at: float | None = None
        self._ran_at = math.inf
        self.resumed_at = -math.inf
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)

    # ---- for the loop

    def record(self, entry: Interrupted) -> None:
        """Have the thread record this entry, as soon as the store takes it."""
        self._inbox.append(entry)
        os.eventfd_write(self._wake, 1)

    def suspend(self) -> None:
        """From a signal's handler: this process is about to be stopped, as all others are."""
        self._announced = True
        os.eventfd_write(self._wake, 1)

    def record_last(self, lost: Lost) -> None:
        """The rank is dead: have the thread record this as the last entry, and end."""
        self._last.set_result(lost)
        os.eventfd_write(self._wake, 1)

    # ---- the thread

    def run(self) -> None:
        try:
            self._connection = self._connect(self._options.call)
            self._log = Log(self._connection, self._options.members)
            self._sibling = SiblingWatch(self._options, self._connection, self._log, self._poller)
            self._beat()
        except Exception as error:
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        try:
            self._serve()
        except Exception as error:
            # Of any kind: a rank is never left unwatched.
            log.exception("the monitor has failed")
            self._on_end(error)
            self._record_last(self._last.result())

    def _serve(self) -> None:
        while True:
            if self._inbox or self._last.done():
                pause_s = 0.0 if self._is_in_touch else AGAIN_S
            else:
                pause_s = max(0.0, min(self._beat_at, self._sibling.due_at) - time.monotonic())
            for descriptor, _ in self._poller.poll(pause_s * 1000):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._sibling.process_ended()
            try:
                self._follow_suspension()
                while self._inbox:
                    # It stays in the inbox until the store has taken it.
                    self._log.propose(self._inbox[0])
                    self._inbox.popleft()
                if self._last.done():
                    self._record_last(self._last.result())
                    return
                self._sibling.record_ended()
                if time.monotonic() >= self._beat_at:
                    self._beat()
            except StoreError as error:
                if self._is_in_touch:
                    log.warning(
                        "%s; without it this rank can live for another %.1f s", error, max(0.0, self._lease.left_s)
                    )
                self._is_in_touch = False
                self._sibling.ring = self._sibling.ring.out_of_touch()
                self._beat_at = time.monotonic() + AGAIN_S

    def _follow_suspension(self) -> None:
        """Slurm suspends a job by SIGTSTP to all processes, and SIGSTOP two seconds later. The first monitor that
        gets it records it; from then on no member is lost by the clock, and each announced monitor's lease rests. The
        first one that has stood still, or still runs after a while, records that too."""
        before, self._ran_at = self._ran_at, time.monotonic()
        if self._announced:
            self._announced = False
            self._log.propose(GroupSuspended(iteration=self._log.ledger.iteration))
            if self._log.ledger.suspended:
                log.warning("all processes are about to be stopped: no lease ends until they continue")
                self._lease.suspend()
        if not self._log.ledger.suspended and not self._lease.is_suspended:
            self._suspended_at = None
            return
        if self._suspended_at is None:
            self._suspended_at = self._ran_at
        stood_still = self._ran_at - before > self._options.heartbeat_interval_s + STANDSTILL_S
        if stood_still or self._ran_at - self._suspended_at > SUSPENSION_S:
            # Once: while the store is away the end of the suspension stays unrecorded, and no lease grows by that.
            if self._lease.is_suspended:
                self.resumed_at = self._ran_at
                self._lease.resume()
            self._sibling.ring = self._sibling.ring.out_of_touch()
            self._log.propose(GroupResumed(iteration=self._log.ledger.iteration))
            self._suspended_at = None

    def _record_last(self, lost: Lost) -> None:
        """Also on the log of the next call, if this one had completed: there the others would wait for the dead
        rank."""
        self._log.propose(lost)
        if self._log.ledger.stage is IterationStage.COMPLETED:
            following = Log(self._connect(self._options.call + 1), self._options.members)
            following.propose(msgspec.structs.replace(lost, iteration=0, inherited=True))

    def _beat(self) -> None:
        """Send a heartbeat, and look at those of the sibling."""
        sent = time.monotonic()
        self._beat_at = sent + self._options.heartbeat_interval_s
        sibling = self._sibling
        sibling.ring = sibling.ring.follow(self._log.ledger)
        for member in sibling.ring.asked(self._log.ledger):
            asked_at = time.monotonic()
            beats = self._connection.beat(self._options.member, member)
            self._lease.renew(asked_at)
            sibling.ring = sibling.ring.answered(member, beats, time.monotonic())
        if sent >= self._read_at or not sibling.ring.beats_since(sent):
            # The log matters to a monitor only when its sibling is quiet, and once in a while.
            self._read_at = sent + READ_SHARE * self._options.heartbeat_timeout_s
            self._log.refresh()
            # The group goes on without this rank: so it must be dead.
            lost = self._log.ledger.lost.get(self._options.member)
            if lost is not None and lost.interruption in DEATHS and not self._kill_ordered:
                self._kill_ordered = True
                self._on_end(lost)
            # After the log was read: another member may have recorded the sibling's end.
            sibling.judge(sent)
        sibling.meet()
        self._is_in_touch = True


class SiblingWatch:
    """The log writer's: it sends heartbeats, and hands on what the store answered. All methods raise what the store
    does."""

    def __init__(self, options: MonitorOptions, connection: Connection, log: Log, poller: select.poll) -> None:
        self._member, self._timeout_s = options.member, options.heartbeat_timeout_s
        self._connection, self._log, self._poller = connection, log, poller
        self.ring = Ring(
            member=options.member, timeout_s=options.heartbeat_timeout_s, interval_s=options.heartbeat_interval_s
        )
        self._process: SiblingProcess | None = None

    def judge(self, asked_at: float) -> None:
        """Record the members that are silent: their heartbeats were asked for after `asked_at`, and the log was read
        after that."""
        # The last heartbeat was sent before `since`, and a whole timeout later the store had no newer one: so the
        # member's lease has ended.
        for member in self.ring.silent(asked_at):
            self._record(member, Interruption.UNRESPONSIVE, f"no sign of life for {self._timeout_s:g} s")

    def meet(self) -> None:
        """Watch the present sibling's process too, if that can be seen from here."""
        sibling = self.ring.sibling
        if sibling is None or (self._process is not None and self._process.member == sibling.member):
            return
        own, theirs = (
            self._arrival(barriers.JOIN, member, MemberProcess) for member in (self._member, sibling.member)
        )
        if own is None or theirs is None:
            return
        if self._process is not None:
            self._process.forget(self._poller)
        self._process = SiblingProcess(sibling.member, own, theirs, self._poller)

    def process_ended(self) -> None:
        """The poller has reported it. The sibling's own monitor has a head start to record it."""
        if self._process is not None:
            self._process.forget(self._poller)
            self._process.record_at = time.monotonic() + HEAD_START_S

    @property
    def due_at(self) -> float:
        """When `record_ended` has something to do."""
        return math.inf if self._process is None else self._process.record_at

    def record_ended(self) -> None:
        """Record the end of the sibling's process, if its own monitor has had the time to and has not."""
        watched = self._process
        if watched is None or time.monotonic() < watched.record_at:
            return
        self._log.refresh()
        text = f"its process has ended, and its monitor did not say how (seen by member {self._member})"
        self._record(watched.member, Interruption.TERMINATED, text)
        watched.record_at = math.inf

    def _record(self, member: int, interruption: Interruption, text: str) -> None:
        """Record the loss of a member. Not once the call is over: then members end as they please."""
        ledger = self._log.ledger
        if ledger.stage in (IterationStage.COMPLETED, IterationStage.BROKEN):
            return
        rank = None
        # The rank that the member has, or had last.
        for iteration in range(ledger.iteration, -1, -1)[:2]:
            if (place := self._arrival(barriers.start(iteration), member, NewPlace)) is not None:
                rank = place.rank
                break
        host = self._process.host if self._process is not None and self._process.member == member else ""
        lost = Lost(
            iteration=ledger.iteration, member=member, interruption=interruption, rank=rank, text=text, host=host
        )
        if self._log.propose(lost):
            log.warning("rank %s (member %d) is lost: %s", rank, member, text)

    def _arrival(self, barrier: str, member: int, kind: type[P]) -> P | None:
        """A member's payload; None: it has not arrived, or the payload cannot be read."""
        payload = self._connection.arrival(barrier, member)
        try:
            return None if payload is None else barriers.unpack(payload, kind)
        except UntrustedRecord:
            return None


@dataclass(frozen=True, slots=True)
class Sibling:
    """The member that is watched: how many heartbeats it had sent at the last answer, and since when it has not been
    more."""

    member: int
    beats: int
    since: float
    seen_at: float
    sends: bool = False  # the last answer had a further heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One monitor's view. `probed`: the member last looked at, of those between it and its sibling; `beyond`: those
    behind a silent sibling, in the ring's order."""

    member: int
    timeout_s: float
    interval_s: float
    sibling: Sibling | None = None
    probed: int | None = None
    beyond: tuple[Sibling, ...] = ()

    def follow(self, ledger: GroupLedger) -> Ring:
        """The ring without the members that are lost, and with more of those behind a sibling that is in doubt."""
        watched = [each for each in (self.sibling, *self.beyond) if each and each.member not in ledger.lost]
        # One that has not begun is no sibling: it is probed.
        while watched and watched[0].beats == 0:
            del watched[0]
        if not watched:
            return dataclasses.replace(self, sibling=None, beyond=())
        # One that sends watches those behind it. Not in `answered`: answers about them may still follow.
        del watched[next((place for place, each in enumerate(watched) if each.sends), len(watched)) + 1 :]
        last = watched[-1]
        patience_s = DOUBT_INTERVALS * self.interval_s
        if len(watched) == 1:
            # The one before it may have been lost with their host, and the monitor that found that out as well.
            before = ledger.lost.get((last.member - 1) % ledger.members)
            is_lost = before is not None and before.interruption is Interruption.UNRESPONSIVE
            patience_s = 0.0 if is_lost and not last.sends else max(patience_s, DOUBT_SHARE * self.timeout_s)
        if last.seen_at - last.since >= patience_s:
            # As many again: a host with many members is seen as a whole after a few intervals.
            for _ in range(len(watched)):
                behind = ledger.next_member(watched[-1].member)
                if behind in (None, self.member, watched[0].member):
                    break
                assert behind is not None
                watched.append(Sibling(behind, 0, math.inf, -math.inf))
        return dataclasses.replace(self, sibling=watched[0], beyond=tuple(watched[1:]))

    def asked(self, ledger: GroupLedger) -> tuple[int | None, ...]:
        """Whose heartbeats to read next, at least one; None if there is no other member."""
        sibling = None if self.sibling is None or self.sibling.member in ledger.lost else self.sibling.member
        nearest = ledger.next_member(self.member)
        beyond = tuple(each.member for each in self.beyond)
        if sibling is not None and sibling == nearest:
            return (sibling, *beyond)
        # The one after the last one that was probed, within what lies between this member and its sibling.
        probe = ledger.next_member(self.member if self.probed is None else self.probed)
        if probe in (None, self.member, sibling):
            probe = nearest
        return (probe,) if sibling is None else (sibling, *beyond, probe)

    def answered(self, member: int | None, beats: int, now: float) -> Ring:
        """This many heartbeats of a member were in the store at some moment up to `now`, on the monotonic clock."""
        if member is None:
            return self
        for place, before in enumerate((self.sibling, *self.beyond)):
            if before is None or member != before.member:
                continue
            unbroken = now - before.seen_at <= self.interval_s + BREAK_SHARE * self.timeout_s
            # Fewer heartbeats count as a change too: the store has lost some, and the member did not fall silent.
            since = before.since if unbroken and beats == before.beats else now
            seen = Sibling(before.member, beats, since, now, sends=unbroken and beats != before.beats)
            if place == 0:
                return dataclasses.replace(self, sibling=seen)
            return dataclasses.replace(self, beyond=(*self.beyond[: place - 1], seen, *self.beyond[place:]))
        # It has not begun: no monitor judges it.
        if beats == 0:
            return dataclasses.replace(self, probed=member)
        return dataclasses.replace(self, sibling=Sibling(member, beats, now, now), probed=None, beyond=())

    def out_of_touch(self) -> Ring:
        """The store did not answer: the time of those that are watched starts again."""
        if self.sibling is None:
            return self
        return dataclasses.replace(self, sibling=dataclasses.replace(self.sibling, seen_at=-math.inf), beyond=())

    def silent(self, asked_at: float) -> tuple[int, ...]:
        """The members that are dead: their heartbeats were asked for at `asked_at`, and are as many as a timeout
        earlier."""
        watched = (self.sibling, *self.beyond)
        return tuple(
            each.member for each in watched if each and each.beats and asked_at - each.since >= self.timeout_s
        )

    def beats_since(self, asked_at: float) -> bool:
        """Whether the sibling was seen to send a heartbeat, or to be another one, after `asked_at`."""
        return self.sibling is not None and self.sibling.since >= asked_at


class SiblingProcess:
    """A member's process; the poller reports its end. `record_at`: when its end is to be recorded, unless its monitor
    has; infinite while it lives, and where it cannot be seen from here."""

    def __init__(self, member: int, own: MemberProcess, theirs: MemberProcess, poller: select.poll) -> None:
        self.member, self.host = member, theirs.host
        self.record_at = math.inf
        self._pidfd: int | None = None
        if own.host == theirs.host:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(theirs.pid)
                # After the pidfd was opened: that is the process which began then, and no later one of its number.
                if started_ticks(theirs.pid) == theirs.began:
                    self._pidfd = pidfd
                    poller.register(pidfd, select.POLLIN)
                else:
                    os.close(pidfd)

    def forget(self, poller: select.poll) -> None:
        """Stop watching it."""
        if self._pidfd is not None:
            poller.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
