"""A monitor's thread for the store: it beats, reads the log, records what must be recorded, and watches a sibling.

It may wait for the store as long as the lease permits. The monitor's loop (`serving.py`) never waits for the store.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from nvrx_slurm.inprocess.attribution import DEATHS
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.ledger import Interrupted, IterationStage, Log, Lost
from nvrx_slurm.inprocess.monitor.sibling import SiblingWatch
from nvrx_slurm.inprocess.monitor.wire import MonitorOptions
from nvrx_slurm.inprocess.store.port import Connection
from nvrx_slurm.liveness.self_fence import SelfFenceTimer
from nvrx_slurm.util.log import get_logger

SHARE = 0.75
"""Of the heartbeat timeout. A sibling waits for all of it, so that what it calls dead has died before."""

SELF_FENCE_SHARE = 0.8
"""When the kernel kills a monitor that has not looked at its lease (it is frozen), and thereby its rank."""


class HeartbeatLease:
    """`ends_at`, on the monotonic clock: a moment that only a beat moves on, and that the first one sets. The log
    writer renews it, the loop obeys."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._self_fence = SelfFenceTimer()
        self.ends_at = math.inf

    def renew(self, sent_at: float) -> None:
        """A beat got through. What counts is when it was sent: the store may have had it since then."""
        self.ends_at = sent_at + SHARE * self._timeout_s
        self._self_fence.arm(sent_at + SELF_FENCE_SHARE * self._timeout_s - time.monotonic())

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()


log = get_logger("inprocess.monitor")

READ_SHARE = 0.1
"""Of the heartbeat timeout: how often the log is read, if nothing else is a reason to."""

AGAIN_S = 0.1
"""How soon a record is tried again that the store did not take."""


class LogWriter(threading.Thread):
    """`opened` is done when the first beat has got through; `on_end` is called here if the rank must end."""

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
        self._touch = True
        self._kill_ordered = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)

    # ---- for the loop

    def record(self, entry: Interrupted) -> None:
        """Have this recorded, as soon as the store takes it."""
        self._inbox.append(entry)
        os.eventfd_write(self._wake, 1)

    def record_last(self, lost: Lost) -> None:
        """The rank is dead: have this recorded as the last thing. The thread then ends."""
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
                pause_s = 0.0 if self._touch else AGAIN_S
            else:
                pause_s = max(0.0, min(self._beat_at, self._sibling.due_at) - time.monotonic())
            for descriptor, _ in self._poller.poll(pause_s * 1000):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._sibling.process_ended()
            try:
                if self._step():
                    return
            except StoreError as error:
                if self._touch:
                    log.warning(
                        "%s; without it this rank can live for %.1f s yet", error, max(0.0, self._lease.left_s)
                    )
                self._touch = False
                self._sibling.ring = self._sibling.ring.out_of_touch()
                self._beat_at = time.monotonic() + AGAIN_S

    def _step(self) -> bool:
        """Do what is due. Returns whether that was the last thing."""
        while self._inbox:
            self._log.propose(self._inbox[0])
            self._inbox.popleft()
        if self._last.done():
            self._record_last(self._last.result())
            return True
        self._sibling.record_ended()
        if time.monotonic() >= self._beat_at:
            self._beat()
        return False

    def _record_last(self, lost: Lost) -> None:
        """Also on the log of the next call, if this one had completed: there the others would wait for the dead
        rank."""
        self._log.propose(lost)
        if self._log.ledger.stage is IterationStage.COMPLETED:
            following = Log(self._connect(self._options.call + 1), self._options.members)
            following.propose(msgspec.structs.replace(lost, iteration=0, inherited=True))

    # ---- signs of life

    def _beat(self) -> None:
        sent = time.monotonic()
        self._beat_at = sent + self._options.heartbeat_interval_s
        sibling = self._sibling
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
            sibling.judge(sent)
        sibling.meet()
        self._touch = True
