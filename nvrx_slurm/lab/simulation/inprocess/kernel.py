"""What the kernel does for ranks and monitors: signals to the main thread, linked lifetimes, sockets, shared words.

The product's monitor loop, its log writer, its guard, the group, the interrupter and the call run unchanged on it.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from nvrx_slurm.inprocess import (
    call,
    group,
    interrupter,
    monitor,
    monitor_heartbeats,
    monitor_loop,
    progress,
    rank,
    timeline,
)
from nvrx_slurm.inprocess.exception import InternalError, RankShouldRestart
from nvrx_slurm.inprocess.monitor import MOST_BYTES, READY, MonitorOptions, MonitorProcess, Start
from nvrx_slurm.inprocess.monitor_heartbeats import LogWriter
from nvrx_slurm.inprocess.progress import CELL_BYTES, CELLS, ProgressStamps
from nvrx_slurm.inprocess.region import ENDS, CallInterrupted, Raised, Returned
from nvrx_slurm.lab.simulation.threads import (
    Substitution,
    ThreadScheduler,
    VirtualCondition,
    VirtualDescriptors,
    VirtualEvent,
    VirtualPoller,
    VirtualProcess,
    VirtualThread,
)
from nvrx_slurm.util import threads as util_threads

T = TypeVar("T")


class RankKernel:
    """The kernels of all hosts of a history."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self.scheduler = scheduler
        self.descriptors = VirtualDescriptors(scheduler)
        self.processes: dict[int, VirtualProcess] = {}
        self.quiet: set[int] = set()  # processes whose main thread runs no Python
        self.deaf: set[int] = set()  # those where no signal changes that
        self._shared: dict[int, SharedWords] = {}

    def process(self, name: str, host: str) -> VirtualProcess:
        process = VirtualProcess(self.scheduler, name, host)
        self.processes[process.pid] = process
        return process

    # ---- the calls of `os`, `mmap`, …

    def memfd_create(self, _: str) -> int:
        number, _descriptor = self.descriptors.add()
        self._shared[number] = SharedWords(CELLS * CELL_BYTES)
        return number

    def mmap(self, number: int, _: int) -> SharedWords:
        return self._shared[number]

    def started_ticks(self, pid: int) -> int | None:
        process = self.processes.get(pid)
        return process.began if process is not None and process.alive else None

    def pidfd_open(self, pid: int) -> int:
        process = self.processes.get(pid)
        if process is None or not process.alive:
            raise ProcessLookupError(pid)
        number, descriptor = self.descriptors.add()
        process.on_death(descriptor.becomes_readable)
        return number

    def kill(self, pid: int, _: int) -> None:
        self.processes[pid].kill()

    def substituted(self) -> Substitution:
        """The product's modules on this kernel."""
        names = Substitution(self.scheduler)
        os_calls = SimpleNamespace(
            EFD_NONBLOCK=0,
            EFD_CLOEXEC=0,
            O_CLOEXEC=0,
            close=self.descriptors.close,
            eventfd=self.descriptors.eventfd,
            eventfd_read=self.descriptors.eventfd_read,
            eventfd_write=self.descriptors.eventfd_write,
            ftruncate=lambda *_: None,
            getpid=lambda: self.scheduler.process.pid,
            kill=self.kill,
            memfd_create=self.memfd_create,
            pidfd_open=self.pidfd_open,
            pipe2=lambda _: (0, 0),
            uname=lambda: SimpleNamespace(nodename=self.scheduler.process.host),
            _exit=lambda code: self.scheduler.process.exit(code),
        )
        poll = SimpleNamespace(poll=lambda: VirtualPoller(self.scheduler, self.descriptors), POLLIN=1)
        watched_by_kernel = {"select": poll, "os": os_calls, "time": names.time}
        names.over(util_threads, threading=names.threading, time=names.time, queue=names.queue)
        names.over(group, threading=names.threading, time=names.time, os=os_calls, sys=_SILENT)
        names.over(interrupter, threading=names.threading)
        names.over(timeline, time=names.time, send_to_agent=lambda _: None)
        names.over(
            progress,
            threading=names.threading,
            monotonic_ns=names.time.monotonic_ns,
            os=os_calls,
            mmap=SimpleNamespace(mmap=self.mmap),
        )
        names.over(
            rank, os=os_calls, gc=SimpleNamespace(collect=lambda: 0), restarting=lambda _: contextlib.nullcontext()
        )
        names.over(
            call,
            MonitorProcess=partial(SimulatedMonitor, self),
            RankVariables=_UnsetVariables,
            Region=lambda on_signal, _: SimulatedRegion(self, on_signal),
            gc=SimpleNamespace(get_freeze_count=lambda: 1),
            os=os_calls,
            watchdog_method=lambda: "signal",
        )
        names.over(monitor, select=poll)
        names.over(
            monitor_loop,
            **watched_by_kernel,
            queue=names.queue,
            signal=SimpleNamespace(signal=lambda *_: None, SIGTERM=signal.SIGTERM, SIG_DFL=signal.SIG_DFL),
            socket=SimpleNamespace(send_fds=lambda control, data, _: control.send(data[0])),
            LogWriter=partial(ThreadedLogWriter, self.scheduler),
            MonitorLogHandler=_NoLog,
            WatchedProcess=partial(SimulatedWatchedProcess, self),
        )
        names.over(
            monitor_heartbeats,
            **watched_by_kernel,
            Future=names.future,
            SelfFenceTimer=lambda: SimulatedSelfFence(self.scheduler, self.scheduler.process),
            started_ticks=self.started_ticks,
        )
        return names


class ThreadedLogWriter(LogWriter):
    """The product's, in a virtual thread."""

    def __init__(self, scheduler: ThreadScheduler, *args: Any) -> None:
        super().__init__(*args)
        self._virtual = VirtualThread(scheduler, scheduler.process, self.run, "log writer")

    def start(self) -> None:
        self._virtual.start()

    def join(self, timeout: float | None = None) -> None:
        self._virtual.join(timeout)


class SharedWords(bytearray):
    """A file in memory, and every mapping of it."""

    def close(self) -> None:
        """Other mappings stay."""


class SimulatedRegion:
    """The main thread's region: a restart is raised in the function's next step, unless it is stuck in C, and at
    once where it waits. Its atomic blocks are its own."""

    def __init__(self, kernel: RankKernel, on_signal: Callable[[], None]) -> None:
        self._scheduler, self._kernel, self._on_signal = kernel.scheduler, kernel, on_signal
        self._changed = VirtualCondition(kernel.scheduler)
        self._open = self._holders = 0
        self._inside: VirtualThread | None = None
        self._left = VirtualEvent(kernel.scheduler)
        self._delivered = False

    def __enter__(self) -> SimulatedRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def call(self, function: Callable[[], T]) -> Returned[T] | Raised | CallInterrupted:
        thread = self._scheduler.current
        assert thread is not None
        self._inside, self._left = thread, VirtualEvent(self._scheduler)
        self._delivered = False
        thread.is_interruptible = True
        try:
            value = function()
            error: BaseException | None = None
        except (Exception, RankShouldRestart, *ENDS) as caught:
            error = caught
        finally:
            thread.is_interruptible = False
            thread.pending = self._inside = None
            self._left.set()
        if self._delivered:
            return CallInterrupted(error if isinstance(error, ENDS) else None)
        return Returned(value) if error is None else Raised(error)

    def interrupt(self, *, again_s: float) -> None:
        left = self._left
        while self._inside is not None and not left.is_set():
            thread = self._inside
            if not self._open and thread.process.pid not in self._kernel.deaf:
                self._delivered = True
                self._scheduler.interrupt(thread, RankShouldRestart("the group restarts"))
            left.wait(again_s / 4)

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """As the function's own code uses it: a restart waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holders)
            self._open += 1
            assert self._inside is not None
            self._inside.is_interruptible = False
        try:
            yield
        finally:
            with self._changed:
                self._open -= 1
                if self._inside is not None:
                    self._inside.is_interruptible = True
                self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        with self._changed:
            self._holders += 1
            must_wait = self._open > 0
        if must_wait:
            on_wait()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def ask(self) -> None:
        if self._scheduler.process.pid not in self._kernel.quiet:
            self._on_signal()


class ControlSocket:
    """One end of the socket between a rank and its monitor."""

    def __init__(self, kernel: RankKernel) -> None:
        self.number, self.descriptor = kernel.descriptors.add()
        self._messages: deque[bytes] = deque()
        self.peer: ControlSocket = self
        self._is_closed = False

    def fileno(self) -> int:
        return -1 if self._is_closed else self.number

    def setblocking(self, _: bool) -> None:
        """Reads are after a poll, or non-blocking."""

    def send(self, data: bytes) -> None:
        if self.peer._is_closed or self._is_closed:
            raise BrokenPipeError
        self.peer._messages.append(data)
        self.peer.descriptor.becomes_readable()

    def recv(self, _: int) -> bytes:
        if self._messages:
            data = self._messages.popleft()
            self.descriptor.is_readable = bool(self._messages) or self.peer._is_closed
            return data
        if self.peer._is_closed:
            return b""
        raise BlockingIOError

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.peer.descriptor.becomes_readable()


class SimulatedMonitor(MonitorProcess):
    """The rank's side: the monitor is the product's loop in a process of its own."""

    _control: ControlSocket  # type: ignore[assignment]
    _process: VirtualProcess  # type: ignore[assignment]

    def __init__(self, kernel: RankKernel, options: MonitorOptions, stamps: ProgressStamps) -> None:
        self._kernel, self._rank = kernel, kernel.scheduler.process
        self._control, theirs = ControlSocket(kernel), ControlSocket(kernel)
        self._control.peer, theirs.peer = theirs, self._control
        self._is_linked = False
        self._process = kernel.process(f"monitor {options.member}", self._rank.host)
        start = Start(options=options, pid=self._rank.pid, pidfd=kernel.pidfd_open(self._rank.pid), stamps=stamps.fd)
        self._process.on_death(theirs.close)
        # The kernel kills the rank when the monitor's end of their pipe closes.
        self._process.on_death(lambda: self._rank.kill() if self._is_linked else None)
        self._rank.on_death(self._control.close)

        def main() -> int:
            # As `monitor_loop.serve`, without the files that it reads first.
            try:
                loop = monitor_loop.MonitorLoop(start, theirs)  # type: ignore[arg-type]  # it uses what is here
                loop.open()
            except Exception as error:
                with contextlib.suppress(BrokenPipeError):
                    theirs.send(str(error).encode())
                return 1
            loop.run()
            return 0

        self._process.start(main)

    def wait_ready(self, timeout_s: float) -> None:
        poller = VirtualPoller(self._kernel.scheduler, self._kernel.descriptors)
        poller.register(self._control.number)
        message = self._control.recv(MOST_BYTES) if poller.poll(timeout_s * 1000) else b"it was not ready in time"
        if message != READY:
            self.leave()
            raise InternalError(f"the monitor process could not begin: {message.decode()}")
        self._is_linked = True
        # It may have died after READY and before the link: then its death has not killed this rank.
        if not self._process.alive:
            self.leave()
            raise InternalError("the monitor process has died as soon as it was ready")

    def leave(self) -> None:
        if self._control.fileno() < 0:
            return
        self._is_linked = False
        self._process.kill()
        self._control.close()


class SimulatedWatchedProcess:
    """The rank's process, as its monitor sees it."""

    def __init__(self, kernel: RankKernel, number: int, pid: int) -> None:
        self.pidfd, self.pid = number, pid
        self._process = kernel.processes[pid]

    def send(self, signals: Iterable[signal.Signals]) -> None:
        """SIGTERM ends it as SIGKILL does, once it is not stopped."""
        numbers = tuple(signals)
        if signal.SIGCONT in numbers:
            self._process.thaw()
        if signal.SIGKILL in numbers or not self._process.frozen:
            self._process.kill()

    def is_ending(self) -> bool:
        return not self._process.alive

    def how_it_ended(self) -> str:
        return f"process {self.pid} ended with code {self._process.exit_code}"


class SimulatedSelfFence:
    """The kernel's timer: kills the monitor, frozen or not."""

    def __init__(self, scheduler: ThreadScheduler, process: VirtualProcess) -> None:
        self._scheduler, self._process = scheduler, process
        self._armed = 0  # how often: only the newest timer counts

    def arm(self, seconds: float) -> None:
        self._armed = number = self._armed + 1
        self._scheduler.call_later(max(0.0, seconds), lambda: self._process.kill() if number == self._armed else None)


class _UnsetVariables:
    """RANK and WORLD_SIZE: one process has all ranks here."""

    def __enter__(self) -> _UnsetVariables:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was set."""

    def set(self, _: object) -> None:
        """The function here reads its state."""


class _NoLog:
    def __init__(self, *_: object) -> None:
        """The logs of a history are not read."""

    def install(self) -> None: ...
    def release_stderr(self) -> None: ...
    def finish(self) -> None: ...


_SILENT = SimpleNamespace(stderr=SimpleNamespace(write=lambda _: None, flush=lambda: None))
