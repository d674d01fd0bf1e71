"""A monitor's thread for the store: it beats, reads the log, writes what is to be recorded, and watches a sibling.

It may wait for the store as long as the lease lets it; the loop beside it waits for nothing.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from nvrx_slurm.inprocess import gates
from nvrx_slurm.inprocess.attribution import DEATHS, Interruption
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.gates import Joining, Starting
from nvrx_slurm.inprocess.ledger import Interrupted, Lost, Stage
from nvrx_slurm.inprocess.monitor import process
from nvrx_slurm.inprocess.monitor.lease import Lease
from nvrx_slurm.inprocess.monitor.ring import Ring
from nvrx_slurm.inprocess.monitor.wire import MonitorOptions
from nvrx_slurm.inprocess.proposing import Log
from nvrx_slurm.inprocess.store.port import Connection
from nvrx_slurm.log import get_logger

log = get_logger("inprocess.monitor")

HEAD_START_S = 0.1
"""A process that has ended is first left to its own monitor, which knows how, and why."""

READ_SHARE = 0.1
"""Of the heartbeat timeout: how often the log is read, if nothing else is a reason to."""

AGAIN_S = 0.1
"""How soon a record is tried again that the store did not take."""


@dataclass(slots=True)
class Neighbour:
    """The sibling's process, if it is on this host; `record_at`: when we record its end, unless its monitor has."""

    member: int
    host: str = ""
    pidfd: int | None = None
    record_at: float | None = None


class Scribe(threading.Thread):
    """`opened` is done when the first beat has got through; `on_end` is called here if the rank must end."""

    def __init__(
        self,
        options: MonitorOptions,
        lease: Lease,
        connect: Callable[[int], Connection],
        on_end: Callable[[Lost | Exception], None],
    ) -> None:
        super().__init__(name="nvrx-scribe", daemon=True)
        self.opened: Future[None] = Future()
        self._options, self._lease, self._connect, self._on_end = options, lease, connect, on_end
        self._ring = Ring(
            member=options.member, timeout_s=options.heartbeat_timeout_s, interval_s=options.heartbeat_interval_s
        )
        self._neighbour: Neighbour | None = None
        self._inbox: deque[Interrupted | Lost] = deque()
        self._last: Future[Lost] = Future()
        self._beat_at = self._read_at = 0.0
        self._touch = True
        self._sentenced = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)

    # ---- for the loop

    def tell(self, entry: Interrupted) -> None:
        """Have this recorded, as soon as the store takes it."""
        self._inbox.append(entry)
        os.eventfd_write(self._bell, 1)

    def bury(self, lost: Lost) -> None:
        """The rank is dead: have this recorded as the last thing. The thread then ends."""
        self._last.set_result(lost)
        os.eventfd_write(self._bell, 1)

    # ---- the thread

    def run(self) -> None:
        try:
            self._connection = self._connect(self._options.call)
            self._log = Log(self._connection, self._options.members)
            self._beat()
        except Exception as error:
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        try:
            self._serve()
        except Exception as error:  # whatever it is: a rank is not left unwatched
            log.exception("the monitor has failed")
            self._on_end(error)
            self._record_last(self._last.result())

    def _serve(self) -> None:
        while True:
            for descriptor, _ in self._poller.poll(self._pause_s() * 1000):
                self._rung(descriptor)
            try:
                if self._step():
                    return
            except StoreError as error:
                self._missed(error)

    def _pause_s(self) -> float:
        if self._inbox or self._last.done():
            return 0.0 if self._touch else AGAIN_S
        moments = [self._beat_at]
        if self._neighbour is not None and self._neighbour.record_at is not None:
            moments.append(self._neighbour.record_at)
        return max(0.0, min(moments) - time.monotonic())

    def _rung(self, descriptor: int) -> None:
        if descriptor == self._bell:
            os.eventfd_read(self._bell)
        elif self._neighbour is not None:
            self._forget_process(self._neighbour)
            self._neighbour.record_at = time.monotonic() + HEAD_START_S

    def _step(self) -> bool:
        """Do what is due. Returns whether that was the last thing."""
        while self._inbox:
            self._log.propose(self._inbox[0])
            self._inbox.popleft()
        if self._last.done():
            self._record_last(self._last.result())
            return True
        self._record_neighbour()
        if time.monotonic() >= self._beat_at:
            self._beat()
        return False

    def _record_last(self, lost: Lost) -> None:
        """Also on the log of the next call, if this one had completed: there somebody would wait for the dead."""
        self._log.propose(lost)
        if self._log.ledger.stage is Stage.COMPLETED:
            following = Log(self._connect(self._options.call + 1), self._options.members)
            following.propose(msgspec.structs.replace(lost, iteration=0, inherited=True))

    def _missed(self, error: StoreError) -> None:
        if self._touch:
            log.warning("%s; without it this rank can live for %.1f s yet", error, max(0.0, self._lease.left_s))
        self._touch = False
        self._ring = self._ring.out_of_touch()
        self._beat_at = time.monotonic() + AGAIN_S

    # ---- signs of life

    def _beat(self) -> None:
        sent = time.monotonic()
        self._beat_at = sent + self._options.heartbeat_interval_s
        for member in self._ring.asked(self._log.ledger):
            asked_at = time.monotonic()
            beats = self._connection.beat(self._options.member, member)
            self._lease.renew(asked_at)
            self._ring = self._ring.answered(member, beats, time.monotonic())
        if sent >= self._read_at or not self._ring.beats_since(sent):
            self._read(sent)
        self._meet()
        self._touch = True

    def _read(self, sent: float) -> None:
        """The log matters to a monitor only when its sibling is quiet, and once in a while."""
        self._read_at = sent + READ_SHARE * self._options.heartbeat_timeout_s
        self._log.refresh()
        self._obey()
        self._judge(sent)

    def _obey(self) -> None:
        """The group goes on without this rank, for whatever reason: so it must be dead."""
        lost = self._log.ledger.lost.get(self._options.member)
        if lost is not None and lost.interruption in DEATHS and not self._sentenced:
            self._sentenced = True
            self._on_end(lost)

    def _may_judge(self) -> bool:
        """Once the call is over, members end as they please."""
        return self._log.ledger.stage not in (Stage.COMPLETED, Stage.BROKEN)

    def _judge(self, asked_at: float) -> None:
        member = self._ring.silent(asked_at)
        if member is not None and self._may_judge():
            text = f"no sign of life for {self._options.heartbeat_timeout_s:g} s"
            self._record(member, Interruption.UNRESPONSIVE, text)

    def _record(self, member: int, interruption: Interruption, text: str) -> None:
        """A member's end, as its sibling saw it."""
        ledger = self._log.ledger
        host = self._neighbour.host if self._neighbour is not None and self._neighbour.member == member else ""
        lost = Lost(
            iteration=ledger.iteration,
            member=member,
            interruption=interruption,
            rank=self._rank_of(member),
            text=text,
            host=host,
        )
        if self._log.propose(lost):
            log.warning("rank %s (member %d) is lost: %s", lost.rank, member, text)

    def _rank_of(self, member: int) -> int | None:
        """The rank that a member has, or had last."""
        for iteration in range(self._log.ledger.iteration, -1, -1)[:2]:
            if (payload := self._connection.arrival(gates.start(iteration), member)) is not None:
                return msgspec.json.decode(payload, type=Starting).rank
        return None

    # ---- the sibling's process

    def _meet(self) -> None:
        """Watch the sibling's process too, if it is on this host: whose monitor died first is then known at once."""
        sibling = self._ring.sibling
        if sibling is None or (self._neighbour is not None and self._neighbour.member == sibling.member):
            return
        ours, theirs = (self._joined(member) for member in (self._options.member, sibling.member))
        if ours is None or theirs is None:
            return
        if self._neighbour is not None:
            self._forget_process(self._neighbour)
        self._neighbour = Neighbour(sibling.member, theirs.host)
        if ours.host == theirs.host:
            self._neighbour.pidfd = process.find(theirs.pid, theirs.began)
        if self._neighbour.pidfd is not None:
            self._poller.register(self._neighbour.pidfd, select.POLLIN)

    def _joined(self, member: int) -> Joining | None:
        payload = self._connection.arrival(gates.JOIN, member)
        return None if payload is None else msgspec.json.decode(payload, type=Joining)

    def _forget_process(self, neighbour: Neighbour) -> None:
        if neighbour.pidfd is not None:
            self._poller.unregister(neighbour.pidfd)
            os.close(neighbour.pidfd)
            neighbour.pidfd = None

    def _record_neighbour(self) -> None:
        """Its process has ended, and its monitor has had the time to say so."""
        neighbour = self._neighbour
        if neighbour is None or neighbour.record_at is None or time.monotonic() < neighbour.record_at:
            return
        self._log.refresh()
        if self._may_judge():
            text = f"its process has ended, and its monitor did not say how (seen by member {self._options.member})"
            self._record(neighbour.member, Interruption.TERMINATED, text)
        neighbour.record_at = None
