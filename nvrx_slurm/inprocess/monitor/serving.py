"""A monitor's loop: its rank's end, its silence, its orders, and the lease. It waits for none but these."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.ledger import Lost
from nvrx_slurm.inprocess.monitor import wire
from nvrx_slurm.inprocess.monitor.guard import (
    KILL,
    ProgressBounds,
    RankGuard,
    RecordTimeout,
    SendSignals,
    WatchedRank,
    look,
)
from nvrx_slurm.inprocess.monitor.log_writer import HeartbeatLease, LogWriter
from nvrx_slurm.inprocess.monitor.process import WatchedProcess
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess.monitor")

MOST_LAST_WORDS = 4000


def serve(start_file: IO[bytes]) -> None:
    """Read what to watch, say that it is watched, and watch. Does not return."""
    for number in wire.NOT_FOR_MONITORS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wire.NOT_FOR_MONITORS)
    control = socket.socket(fileno=int(pickle.load(start_file)))
    try:
        with start_file:
            start: wire.Start = pickle.load(start_file)
        # It may have held a password.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.close(nothing)
        monitor = MonitorLoop(start, control)
        monitor.open()
    except Exception as error:
        with suppress(ConnectionError):
            control.send(f"{type(error).__name__}: {error}".encode()[:MOST_LAST_WORDS])
        os._exit(1)
    monitor.run()
    os._exit(0)  # without a wait for the store's own threads


class MonitorLoop:
    """One rank's monitor. Everything happens in `run`; the log writer's thread posts to it."""

    def __init__(self, start: wire.Start, control: socket.socket) -> None:
        options = start.options
        self._options, self._control = options, control
        self._process = WatchedProcess(start.pidfd, start.pid)
        self._stamps = ProgressStamps.attach(start.stamps)
        self._watched = WatchedRank(
            member=options.member, rank=options.rank, host=options.host or os.uname().nodename, iteration=0
        )
        self._bounds = ProgressBounds(
            soft_s=options.soft_timeout_s, hard_s=options.hard_timeout_s, grace_s=options.grace_s
        )
        self._guard = RankGuard()
        self._log_handler = set_up(
            f"monitor of rank {options.member}",
            None if options.logfile is None else Path(options.logfile.replace("{rank}", str(options.member))),
        )
        self._lease = HeartbeatLease(options.heartbeat_timeout_s)
        self._ends: queue.SimpleQueue[Lost] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        store = options.store_factory(**options.store_kwargs)
        self._log_writer = LogWriter(
            options, self._lease, lambda call: store.connect(options.group, call), self._must_end
        )
        self._poller = select.poll()
        for descriptor in (self._process.pidfd, control.fileno(), self._wake):
            self._poller.register(descriptor, select.POLLIN)

    def open(self) -> None:
        """Get in touch with the store, and give the rank its end of the pipe that ends it when this process does.

        The pipe is made here: no child that the rank forks can then hold the monitor's end of it. Raises what the
        store does.
        """
        self._log_writer.start()
        self._log_writer.opened.result()
        theirs, self._lifetime_link = os.pipe2(os.O_CLOEXEC)
        with suppress(ConnectionError):
            # The rank has died already: that is what `run` sees first.
            socket.send_fds(self._control, [wire.READY], [theirs])
        os.close(theirs)
        log.info(
            "watches process %d, member %d of %d", self._process.pid, self._options.member, self._options.members
        )

    def run(self) -> None:
        """Watch the rank until one of the two ends."""
        try:
            self._watch()
        except Exception as error:
            log.exception("the monitor has failed")
            self._must_end(error)
            self._take_ends()
            self._process.send(KILL)
            self._process.ended_within(self._lease.left_s)
        # The rank is dead: record it, while the lease lasts, and hold nothing that others wait for.
        pending_kill = self._guard.pending_kill
        lost = (
            self._watched.lost(Interruption.TERMINATED, self._process.how_it_ended())
            if pending_kill is None
            else pending_kill.lost
        )
        log.info("process %d is dead: %s", self._process.pid, lost.text)
        self._log_handler.let_go()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._log_writer.record_last(lost)
        self._log_writer.join(max(0.0, self._lease.left_s))
        self._log_handler.finish()

    def _watch(self) -> None:
        while self._process.pidfd not in (ready := self._ready()):
            if self._control.fileno() in ready:
                if data := self._control.recv(wire.MOST_BYTES):
                    self._take(data)
                else:
                    self._lost_contact()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._take_ends()
            if self._lease.left_s <= 0:
                self._give_up()
            self._look()
        # What the rank said before it died counts.
        self._control.setblocking(False)
        with suppress(BlockingIOError, ConnectionError):
            while data := self._control.recv(wire.MOST_BYTES):
                self._take(data)

    def _ready(self) -> set[int]:
        left_s = min(self._options.interval_s, self._lease.left_s)
        if self._guard.pending_kill is not None:
            left_s = min(left_s, self._guard.pending_kill.kill_at - time.monotonic())
        return {descriptor for descriptor, _ in self._poller.poll(max(0, int(left_s * 1000) + 1))}

    # ---- what comes in

    def _lost_contact(self) -> None:
        self._poller.unregister(self._control)
        if self._guard.pending_kill is None and not self._process.is_ending():
            text = "the process became another program, or closed the socket to its monitor"
            self._order_kill(self._watched.lost(Interruption.TERMINATED, text), 0.0)

    def _take(self, data: bytes) -> None:
        try:
            order = wire.decode(data)
        except MalformedRecord as error:
            log.error("%s; it is passed over", error)
            return
        match order:
            case wire.NewRankOrder(iteration=iteration, rank=rank):
                self._watched = WatchedRank(
                    member=self._watched.member, rank=rank, host=self._watched.host, iteration=iteration
                )
            case wire.TerminateOrder(lost=lost, grace_s=grace_s):
                self._order_kill(lost, grace_s)

    def _must_end(self, why: Lost | Exception) -> None:
        """From the log writer: the group goes on without this rank, or the log writer itself has failed."""
        if isinstance(why, Exception):
            why = self._watched.lost(Interruption.MONITOR_PROCESS_EXCEPTION, f"its monitor failed: {why!r}")
        self._ends.put(why)
        os.eventfd_write(self._wake, 1)

    def _take_ends(self) -> None:
        while not self._ends.empty():
            self._order_kill(self._ends.get(), 0.0)

    def _order_kill(self, lost: Lost, grace_s: float) -> None:
        self._guard = self._guard.with_kill(lost, time.monotonic() + grace_s)

    # ---- what goes out

    def _look(self) -> None:
        now = time.monotonic()
        silent_s = self._stamps.silent_s(time.monotonic_ns())
        self._guard, act = look(self._guard, self._bounds, self._watched, now, silent_s)
        match act:
            case SendSignals(signals=signals, why=why):
                names = ", ".join(number.name for number in signals)
                log.warning("%s for process %d: %s", names, self._process.pid, why)
                self._process.send(signals)
            case RecordTimeout(entry=entry):
                log.warning("process %d: %s", self._process.pid, entry.text)
                self._log_writer.record(entry)

    def _give_up(self) -> None:
        """The lease is over: from now on another monitor may declare this rank dead."""
        self._process.send(KILL)
        log.error(
            "process %d is killed: no beat has reached the store for %.3g s, and the others go on without it",
            self._process.pid,
            self._options.heartbeat_timeout_s - self._lease.left_s,
        )
        self._log_handler.finish()
        os._exit(1)


STDERR = 2
LAST_WORDS_S = 1.0


class MonitorLogHandler(logging.Handler):
    """Warnings go to the rank's standard error, for as long as the rank lives; all lines to the log file, if any."""

    def __init__(self, name: str, logfile: Path | None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {name}: %(message)s", "%H:%M:%S"))
        self._file = None if logfile is None else os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do, name="nvrx-voice", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._work.put(partial(self._write, record.levelno, f"{self.format(record)}\n".encode()))

    def let_go(self) -> None:
        """After what was said so far, hold the rank's standard error no longer: who reads it waits for its end."""
        self._work.put(_release_stderr)

    def finish(self) -> None:
        """Write what is left, unless that takes longer than it is worth."""
        self._work.put(None)
        self._thread.join(LAST_WORDS_S)

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            with contextlib.suppress(OSError):
                # No reader, or a full disk: there is no place to report it.
                work()

    def _write(self, level: int, line: bytes) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.write(self._file, line)
        if level >= logging.WARNING:
            os.write(STDERR, line)


def _release_stderr() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, STDERR)
    os.close(nothing)


def set_up(name: str, logfile: Path | None) -> MonitorLogHandler:
    """Send this process's log lines there. Raises OSError for the log file."""
    voice = MonitorLogHandler(name, logfile)
    root = logging.getLogger("nvrx")
    root.handlers[:] = [voice]
    root.setLevel(logging.WARNING if logfile is None else logging.INFO)
    root.propagate = False
    return voice
