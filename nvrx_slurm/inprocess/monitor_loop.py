"""A monitor's loop: its rank's end, its silence, its orders, and the lease. It waits for none but these."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess import store_tcp
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.ledger import Interrupted, Lost
from nvrx_slurm.inprocess.monitor import (
    IGNORED_SIGNALS,
    MOST_BYTES,
    READY,
    NewRankOrder,
    Start,
    TerminateOrder,
    decode_order,
    ended_within,
)
from nvrx_slurm.inprocess.monitor_guard import (
    KILL,
    ProgressBounds,
    RankGuard,
    SendSignals,
    WatchedRank,
    look,
)
from nvrx_slurm.inprocess.monitor_heartbeats import SHARE, HeartbeatLease, LogWriter
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import started_ticks, stat_fields
from nvrx_slurm.util.signals import signal_name

log = get_logger("inprocess.monitor")

MOST_ERROR_BYTES = 4000


def serve(start_file: IO[bytes]) -> None:
    """Read what to watch, report that it is watched, and watch. Does not return."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    control = socket.socket(fileno=int(pickle.load(start_file)))
    store_tcp.only_store_of_torch()
    try:
        with start_file:
            start: Start = pickle.load(start_file)
        # Standard input is the same file, which may hold a password.
        _point_to_nothing(0)
        monitor = MonitorLoop(start, control)
        # Slurm announces a suspension by it: see `LogWriter._follow_suspension`. Before the rank is told that this
        # process is ready: without a handler the signal stops it, and it announces nothing.
        signal.signal(signal.SIGTSTP, lambda *_: monitor.log_writer.suspend())
        monitor.open()
    except Exception as error:
        with suppress(ConnectionError):
            control.send(f"{type(error).__name__}: {error}".encode()[:MOST_ERROR_BYTES])
        os._exit(1)
    monitor.run()
    os._exit(0)  # without a wait for the store's own threads


class MonitorLoop:
    """One rank's monitor. Everything happens in `run`; the log writer's thread posts to it."""

    def __init__(self, start: Start, control: socket.socket) -> None:
        options = start.options
        self._options, self._control = options, control
        self._process = WatchedProcess(start.pidfd, start.pid)
        self._stamps = ProgressStamps(start.stamps)
        self._watched = WatchedRank(
            member=options.member, rank=options.rank, host=options.host or os.uname().nodename
        )
        self._bounds = ProgressBounds(
            soft_s=options.soft_timeout_s, hard_s=options.hard_timeout_s, grace_s=options.grace_s
        )
        self._guard = RankGuard()
        self._log_handler = MonitorLogHandler(
            f"monitor of rank {options.member}",
            None if options.logfile is None else Path(options.logfile.replace("{rank}", str(options.member))),
        )
        self._log_handler.install()
        self._lease = HeartbeatLease(options.heartbeat_timeout_s)
        self._ends: queue.SimpleQueue[Lost] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        store = options.store_factory(**options.store_kwargs)
        self.log_writer = LogWriter(
            options, self._lease, lambda call: store.connect(options.group, call), self._must_end
        )
        self._poller = select.poll()
        for descriptor in (self._process.pidfd, control.fileno(), self._wake):
            self._poller.register(descriptor, select.POLLIN)

    def open(self) -> None:
        """Connect to the store, and give the rank its end of the pipe that ends the rank when this process ends.

        The pipe is made here: no child that the rank forks can then hold the monitor's end of it. Raises what the
        store does.
        """
        self.log_writer.start()
        self.log_writer.opened.result()
        theirs, self._lifetime_link = os.pipe2(os.O_CLOEXEC)
        # Where the connection is gone the rank has died already: `run` sees that first.
        with suppress(ConnectionError):
            socket.send_fds(self._control, [READY], [theirs])
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
            ended_within(self._process.pidfd, self._bounded_lease_s)
        # The rank is dead: record it, while the lease lasts, and hold nothing that others wait for.
        pending_kill = self._guard.pending_kill
        lost = (
            self._watched.lost(Interruption.TERMINATED, self._process.how_it_ended())
            if pending_kill is None
            else pending_kill.lost
        )
        log.info("process %d is dead: %s", self._process.pid, lost.text)
        self._log_handler.release_stderr()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.log_writer.record_last(lost)
        self.log_writer.join(self._bounded_lease_s)
        self._log_handler.finish()

    @property
    def _bounded_lease_s(self) -> float:
        """For how long what others must know may still be recorded: a lease that is suspended has no end."""
        return max(0.0, min(self._lease.left_s, self._options.heartbeat_timeout_s))

    def _watch(self) -> None:
        while True:
            left_s = min(self._options.interval_s, self._lease.left_s)
            if self._guard.pending_kill is not None:
                left_s = min(left_s, self._guard.pending_kill.kill_at - time.monotonic())
            ready = {descriptor for descriptor, _ in self._poller.poll(max(0, int(left_s * 1000) + 1))}
            if self._process.pidfd in ready:
                break
            if self._control.fileno() in ready:
                if data := self._control.recv(MOST_BYTES):
                    self._take(data)
                else:
                    self._poller.unregister(self._control)
                    # A process that is ending closes its sockets first: its end follows.
                    if self._guard.pending_kill is None and not self._process.is_ending():
                        text = "the process became another program, or closed the socket to its monitor"
                        self._order_kill(self._watched.lost(Interruption.TERMINATED, text), 0.0)
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._take_ends()
            if self._lease.left_s <= 0:
                # From now on another monitor may declare this rank dead.
                self._process.send(KILL)
                log.error(
                    "process %d is killed: no heartbeat has reached the store for %.3g s, and the others go on"
                    " without it",
                    self._process.pid,
                    SHARE * self._options.heartbeat_timeout_s - self._lease.left_s,
                )
                self._log_handler.finish()
                os._exit(1)
            self._look()
        # Orders that the rank sent before it died still count.
        self._control.setblocking(False)
        with suppress(BlockingIOError, ConnectionError):
            while data := self._control.recv(MOST_BYTES):
                self._take(data)

    def _look(self) -> None:
        """What the guard decides about the rank's silence."""
        if self._lease.is_suspended:
            return
        now = time.monotonic()
        # While all processes stood still the rank could make no progress.
        silent_s = min(self._stamps.silent_s(time.monotonic_ns()), now - self.log_writer.resumed_at)
        guard, act = look(self._guard, self._bounds, self._watched, now, silent_s)
        if guard.pending_kill is not None and self._guard.pending_kill is None:
            # Before the stamps are read again: a rank that goes on stamps first, and reads this then. So either it
            # sees that it is about to be killed, or its progress is seen here, and it is not.
            self._stamps.kill_pending = True
            if self._stamps.silent_s(time.monotonic_ns()) < self._bounds.hard_s:
                self._stamps.kill_pending = False
                return
        self._guard = guard
        match act:
            case SendSignals(signals=signals, why=why):
                names = ", ".join(number.name for number in signals)
                log.warning("%s for process %d: %s", names, self._process.pid, why)
                self._process.send(signals)
            case Interrupted():
                log.warning("process %d: %s", self._process.pid, act.text)
                self.log_writer.record(act)

    def _take(self, data: bytes) -> None:
        try:
            order = decode_order(data)
        except MalformedRecord as error:
            log.error("%s; it is passed over", error)
            return
        match order:
            case NewRankOrder(iteration=iteration, rank=rank):
                self._watched = dataclasses.replace(self._watched, rank=rank, iteration=iteration)
            case TerminateOrder(lost=lost, grace_s=grace_s):
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
        self._stamps.kill_pending = True
        self._guard = self._guard.with_kill(lost, time.monotonic() + grace_s)


# Places in `stat_fields`: fields 9 and 52 of /proc/PID/stat (proc(5)).
_FLAGS, _EXIT_CODE = 6, 49
_PF_EXITING = 0x4


class WatchedProcess:
    """One process, by a pidfd: it is readable once the process has ended, reaped or not. No signal reaches a later
    process of the same number."""

    def __init__(self, pidfd: int, pid: int) -> None:
        self.pidfd, self.pid = pidfd, pid
        self._began = started_ticks(pid)

    def send(self, signals: Iterable[signal.Signals]) -> None:
        """Send signals, in order; none if the process has ended."""
        with suppress(ProcessLookupError):
            for number in signals:
                signal.pidfd_send_signal(self.pidfd, number)

    def is_ending(self) -> bool:
        """Whether it is on its way out: it has closed its descriptors, and may still free memory and devices."""
        fields = stat_fields(self.pid)
        return fields is None or bool(int(fields[_FLAGS]) & _PF_EXITING)

    def how_it_ended(self) -> str:
        """A text for the log. Where its parent has waited for it, the kernel no longer knows how it ended."""
        fields = stat_fields(self.pid)
        if fields is None or started_ticks(self.pid) != self._began:
            return f"process {self.pid} has ended"
        status = int(fields[_EXIT_CODE])
        if os.WIFSIGNALED(status):
            return f"process {self.pid} was ended by {signal_name(os.WTERMSIG(status))}"
        return f"process {self.pid} ended with exit code {os.WEXITSTATUS(status)} and had not left the call"


STDERR = 2
FLUSH_S = 1.0


class MonitorLogHandler(logging.Handler):
    """Warnings go to the rank's standard error, for as long as the rank lives; all lines to the log file, if any.

    Raises OSError for the log file.
    """

    def __init__(self, name: str, logfile: Path | None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {name}: %(message)s", "%H:%M:%S"))
        self._file = None if logfile is None else os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # A thread writes: standard error may be a pipe that is full, and the loop never waits for its reader.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do, name="nvrx-monitor-log", daemon=True)
        self._thread.start()

    def install(self) -> None:
        """Receive all of this process's log lines."""
        root = logging.getLogger("nvrx")
        root.handlers[:] = [self]
        root.setLevel(logging.WARNING if self._file is None else logging.INFO)
        root.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._work.put(partial(self._write, record.levelno, f"{self.format(record)}\n".encode()))

    def release_stderr(self) -> None:
        """After the lines so far, hold the rank's standard error no longer: its reader waits for its end."""
        self._work.put(partial(_point_to_nothing, STDERR))

    def finish(self) -> None:
        """Write what is left, for at most `FLUSH_S`."""
        self._work.put(None)
        self._thread.join(FLUSH_S)

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            # Without a reader, or with a full disk, there is no place to report it.
            with suppress(OSError):
                work()

    def _write(self, level: int, line: bytes) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.write(self._file, line)
        if level >= logging.WARNING:
            os.write(STDERR, line)


def _point_to_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)
