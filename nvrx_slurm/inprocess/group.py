"""This rank's part in what its group agrees on: it listens, arrives at barriers, and proposes.

The listener thread reads the log and moves the cycle on; that wakes the threads that wait for it. The main thread
arrives at barriers; a member that finds that all have arrived proposes the entry that closes the barrier. Each of the
two threads has a connection of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.barriers import MemberProcess, Noticing, Payload, pack, unpacked
from nvrx_slurm.inprocess.cycle import CyclePhase, Event, RankCycle
from nvrx_slurm.inprocess.exception import InternalError, RestartError, TimeoutError
from nvrx_slurm.inprocess.ledger import (
    AnyEntry,
    GroupLedger,
    Interrupted,
    IterationStage,
    Log,
    Lost,
    Sealed,
    Settled,
    decode,
)
from nvrx_slurm.inprocess.store import Cancelled, Connection, Store
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import SignalSafeEvent

log = get_logger("inprocess")

LISTEN_S = 600.0  # how long one read of the log waits; the entry itself wakes it
P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, slots=True)
class Barrier:
    """Where a rank waits for others, at most `bound_s`: for how many, and what to propose once they have arrived.

    `phases`: a rank waits there in one of these, and in no other. `atomic`: the barrier of those that are in an
    atomic part. As long as one of them is missing here, the bound does not count; `extended` is called each time it
    has passed.
    """

    name: str
    phases: tuple[CyclePhase, ...]
    bound_s: float
    expected: Callable[[GroupLedger], int]
    close: Callable[[Mapping[int, bytes]], AnyEntry]
    atomic: str = ""
    extended: Callable[[], None] = lambda: None


class Group:
    """One rank in one call of its group. For the main thread, unless a method names another."""

    def __init__(
        self,
        store: Store,
        group: str,
        call: int,
        cycle: RankCycle,
        *,
        tick: Callable[[], None],
        tick_s: float,
        on_phase: Callable[[RankCycle], None],
        on_heard: Callable[[CyclePhase], None],
    ) -> None:
        self._tick, self._tick_s = tick, tick_s
        self._on_phase, self._on_heard = on_phase, on_heard
        self.cycle = cycle
        self.failure: RestartError | None = None
        self.leaves = False
        self._moving = threading.RLock()
        # Set, and replaced by another one, when the cycle moves.
        self._changed = SignalSafeEvent()
        self._connect: Callable[[], Connection] = partial(store.connect, group, call)
        # The iteration of the last notice, and how many had arrived with it.
        self._noticed = (-1, 0)
        self._connection = self._connect()
        self._log = Log(self._connection, cycle.ledger.members)
        self._heard = self._connect()
        self._listener = threading.Thread(target=self._listen, name="nvrx-listener", daemon=True)

    # ---- coming and going

    def join(self, process: MemberProcess, lost: Mapping[int, Lost]) -> None:
        """Join, record the members that were lost in earlier calls, and start to listen."""
        self._connection.arrive(barriers.JOIN, self.cycle.member, pack(process))
        self._log.refresh()
        for each in lost.values():
            self._log.propose(msgspec.structs.replace(each, iteration=0, inherited=True))
        self._take(0, self._connection.read(0, 0.0))
        self._listener.start()

    def close(self) -> None:
        """Stop listening. The last member to leave a completed call clears the call's keys."""
        self._heard.cancel()
        # Without a listener this rank had not joined.
        if self._listener.ident is not None:
            self._listener.join()
            if self.failure is None and not self.leaves:
                try:
                    if self._connection.arrive(barriers.LEFT, self.cycle.member) >= self.cycle.ledger.left:
                        self._connection.clear()
                except RestartError as error:
                    log.debug("the keys of this call will expire: %s", error)
        self._connection.close()
        self._heard.close()

    # ---- the cycle

    @property
    def phase(self) -> CyclePhase:
        return self.cycle.phase

    @property
    def ledger(self) -> GroupLedger:
        return self.cycle.ledger

    @property
    def sealed(self) -> Sealed:
        """The entry that the current rank assignment goes by. Only once there is one."""
        assert self.cycle.sealed is not None, "no phase needs it before"
        return self.cycle.sealed

    def feed(self, event: Event) -> None:
        """From any thread: this rank did something."""
        with self._moving:
            self._move(self.cycle.feed(event))

    def wait_while(self, *phases: CyclePhase, within_s: float | None = None) -> bool:
        """From any thread: wait until the phase is none of these. Returns whether it is. Raises what ended the
        listener."""
        return self._wait_until(
            lambda: self.cycle.phase not in phases,
            deadline=math.inf if within_s is None else time.monotonic() + within_s,
        )

    def _wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        while True:
            # Read before the condition: a change after that sets this event.
            changed = self._changed
            if self.failure is not None:
                raise self.failure
            if holds():
                return True
            left_s = min(self._tick_s, deadline - time.monotonic())
            if left_s <= 0:
                return False
            changed.wait(left_s)
            # A main thread that waits here makes progress.
            if threading.current_thread() is threading.main_thread():
                self._tick()

    def _move(self, cycle: RankCycle) -> None:
        before, self.cycle = self.cycle, cycle
        if cycle.phase is not before.phase:
            self._on_phase(cycle)
        # Replaced before it is set: a thread that wakes up and waits again waits for the next move.
        changed, self._changed = self._changed, SignalSafeEvent()
        changed.set()

    # ---- barriers

    def arrive(self, barrier: Barrier, payload: Payload | None = None) -> None:
        """Wait at a barrier until the phase is none of its own; a member that finds that all have arrived closes it.

        Raises TimeoutError, naming the missing ranks, when the barrier's bound has passed.
        """
        member, data = self.cycle.member, pack(payload) if payload is not None else b""
        until, first = time.monotonic() + barrier.bound_s, 0
        # Not until the phase of this moment changes: the listener and the interrupter may have moved the rank on
        # since the main thread read its phase, and nothing but the main thread moves it out of some.
        while self.cycle.phase in barrier.phases:
            seen = self.cycle.ledger
            # Again on each new entry: an entry may lower the number of members that are expected.
            count = self._connection.arrive(barrier.name, member, data)
            # An unchanged count: no member has arrived after this one.
            first = first or count
            if count >= barrier.expected(seen) and barriers.reads_arrivals(member, seen, count == first):
                # Members that arrived may be lost since: only those that are left count.
                here = self._connection.arrivals(barrier.name)
                present = {member: data for member, data in here.items() if member not in seen.lost}
                if len(present) >= barrier.expected(seen):
                    self.propose(barrier.close(present))

            def has_news(length: int = seen.length) -> bool:
                return self.cycle.ledger.length > length or self.cycle.phase not in barrier.phases

            if not self._wait_until(has_news, until):
                here = self._connection.arrivals(barrier.name)
                missing = [m for m in range(self.ledger.members) if m not in here and m not in self.ledger.lost]
                who = barriers.missing_ranks(missing)
                in_atomic = self._connection.arrivals(barrier.atomic) if barrier.atomic else {}
                if any(in_atomic.get(member) == barriers.OPEN for member in missing):
                    # Its monitor kills it if it makes no progress there: then it is lost, and no longer missing.
                    log.info("waited %g s for %s, in an atomic part: waits on", barrier.bound_s, who)
                    until = time.monotonic() + barrier.bound_s
                    barrier.extended()
                    continue
                raise TimeoutError(f"waited {barrier.bound_s:g} s for {who} at the barrier {barrier.name}")

    def report_atomic(self, iteration: int, payload: bytes) -> None:
        """From the interrupter: this rank's restart waits for the end of an atomic part, or does so no longer."""
        with contextlib.suppress(RestartError), contextlib.closing(self._connect()) as connection:
            connection.arrive(barriers.atomic(iteration), self.cycle.member, payload)

    def arrivals(self, barrier: str, kind: type[P]) -> dict[int, P]:
        """From the main thread or the listener: the members that have arrived at a barrier, with their payloads."""
        own = self._heard if threading.current_thread() is self._listener else self._connection
        return unpacked(own.arrivals(barrier), kind)

    # ---- proposals

    def propose(self, entry: AnyEntry) -> bool:
        """Put an entry into the log, unless it means nothing any more. Returns whether this call has put it there."""
        # The listener has read further than this thread: its ledger saves a read.
        if self._log.ledger.length < self.cycle.ledger.length:
            self._log.ledger = self.cycle.ledger
        return self._log.propose(entry)

    def interrupt(self, entry: Interrupted) -> None:
        """This rank has failed, and so has the iteration. Where the log has a failure of it already, this rank's own
        goes to the barrier of notices."""
        if not self.propose(entry):
            notice = pack(Noticing(fault=entry.record()))
            self._connection.arrive(barriers.notice(entry.iteration), self.cycle.member, notice)

    def propose_loss(self, lost: Lost) -> None:
        """This rank is out. If the store does not answer, the others see it when this rank's heartbeats end."""
        with contextlib.suppress(RestartError):
            self.propose(lost)

    def notice(self, iteration: int, notice: Noticing) -> None:
        """From the listener, on each entry: this rank knows of the interruption, and `notice` is its own part in it.
        A member that finds that all members that are left know of it proposes `Settled`."""
        seen, barrier = self.cycle.ledger, barriers.notice(iteration)
        count = self._heard.arrive(barrier, self.cycle.member, pack(notice))
        if self._noticed[0] != iteration:
            self._noticed = (iteration, count)
        if count >= seen.left and barriers.reads_arrivals(self.cycle.member, seen, count == self._noticed[1]):
            here = self._heard.arrivals(barrier)
            if sum(member not in seen.lost for member in here) >= seen.left:
                own = Log(self._heard, seen.members)
                own.ledger = seen
                own.propose(Settled(iteration=iteration))

    # ---- the listener

    def _listen(self) -> None:
        try:
            while True:
                after = self.cycle.ledger.length
                self._take(after, self._heard.read(after, LISTEN_S))
        except Cancelled:
            return
        except Exception as error:
            # Of any kind: the log is read no longer, and the main thread would wait without end.
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """From any thread: this rank must leave. The main thread raises `failure`, unless all have completed."""
        with self._moving:
            if self.cycle.ledger.stage is IterationStage.COMPLETED:
                return
            self.failure = error if isinstance(error, RestartError) else InternalError(f"a thread failed: {error!r}")
            self.failure.__cause__ = error if error is not self.failure else error.__cause__
            self._move(self.cycle.feed(Event.LEAVES))

    def _take(self, after: int, entries: list[bytes]) -> None:
        """Fold in entries of the log, from place `after` on; some may have been read before."""
        with self._moving:
            fresh, before = entries[self.cycle.ledger.length - after :], self.cycle.phase
            for cycle in self.cycle.read([decode(data) for data in fresh]):
                self._move(cycle)
        if self.cycle.expelled and not self.leaves:
            sys.stderr.write(f"nvrx: the group goes on without rank {self.cycle.member}, so this process ends\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self._on_heard(before)
