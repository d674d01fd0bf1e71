"""The monitor: a process beside each rank, which sees what the rank itself cannot. Neither outlives the other.

Here is the rank's side, which starts its monitor, waits until that is ready, and leaves it; and their messages.

    monitor_main.py        where the monitor begins, with an interpreter that has nothing of the rank's
    monitor_loop.py        its loop: the rank's end, its silence, its orders, the lease
    monitor_guard.py       what it does about a silent rank. Pure
    monitor_heartbeats.py  its thread for the store: heartbeats, the lease, records, and the next member in the ring
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nvrx_slurm.inprocess.exception import InternalError, OptionError
from nvrx_slurm.inprocess.ledger import Lost
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from nvrx_slurm.inprocess.store import Store

log = get_logger("inprocess")

MOST_BYTES = 64 << 10

# The monitor's first message, with the rank's end of the pipe that links their lifetimes. Any other message says why
# the monitor cannot begin.
READY = b"ready"
# Slurm sends these to each process of a step. The rank acts on them; its monitor does not.
IGNORED_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
F_SETSIG = 10
LINGER_S = 5.0  # how long a killed monitor may take to end: it may hang in the store's file system
# Of `sys`: by these the monitor finds its modules as the rank does.
_INTERPRETER = ("path", "pycache_prefix", "dont_write_bytecode")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """What one monitor watches, and by which bounds (`_s`: seconds). `rank`: the one that the process begins with."""

    store_factory: type[Store]
    store_kwargs: Mapping[str, Any] = field(default_factory=dict)
    group: str
    call: int
    member: int
    members: int
    rank: int
    soft_timeout_s: float
    hard_timeout_s: float
    heartbeat_timeout_s: float
    heartbeat_interval_s: float
    interval_s: float
    grace_s: float
    logfile: str | None = None
    host: str = ""  # as records name it; the machine's own name if empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a monitor begins with: its options, the rank's process, and descriptors that it has inherited."""

    options: MonitorOptions
    pid: int
    pidfd: int
    stamps: int


class NewRankOrder(msgspec.Struct, frozen=True, kw_only=True, tag="entered"):
    """The rank's number in the iteration to come."""

    iteration: int
    rank: int


class TerminateOrder(msgspec.Struct, frozen=True, kw_only=True, tag="condemned"):
    """The rank is out: its process ends within the grace, by itself or by SIGKILL, and then this is recorded."""

    lost: Lost
    grace_s: float


AnyOrder = NewRankOrder | TerminateOrder

encode_order = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyOrder] = msgspec.json.Decoder(AnyOrder)


def decode_order(data: bytes) -> AnyOrder:
    """The order of these bytes. Raises MalformedRecord where they are none."""
    return decode(_decoder.decode, data, "an order of the rank")


class MonitorProcess:
    """The monitor of this process, from now on until `leave`. For one thread.

    Once it is ready neither outlives the other: when the monitor ends, in any way, the kernel kills this
    process, also if it is stopped. Processes that this one forks have no part in it.
    """

    def __init__(self, options: MonitorOptions, stamps: ProgressStamps) -> None:
        """Start it, without waiting for it. Raises OptionError for options that it cannot be given, InternalError
        if it cannot be started."""
        self._owner = os.getpid()
        self._lifetime_link: int | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _started(options, stamps, theirs)
        except BaseException:
            self._control.close()
            raise

    @property
    def pid(self) -> int:
        """The monitor's own process."""
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it watches this process and has reached the store. Raises InternalError, with what the monitor
        reported, if that fails; nothing is left of it then."""
        try:
            self._control.settimeout(timeout_s)
            message, descriptors, _, _ = socket.recv_fds(self._control, MOST_BYTES, 1)
            if message != READY or not descriptors:
                why = message.decode(errors="replace") or f"it ended with code {self._process.wait(LINGER_S)}"
                raise InternalError(f"the monitor process could not begin: {why}")
            pipe = self._lifetime_link = descriptors[0]
            # recv_fds takes a flag for this, and ignores it (CPython 3.11 to 3.13).
            os.set_inheritable(pipe, False)
            # When the monitor's end of the pipe closes, the kernel sends the pipe's owner, this process, SIGKILL.
            fcntl.fcntl(pipe, fcntl.F_SETOWN, self._owner)
            fcntl.fcntl(pipe, F_SETSIG, int(signal.SIGKILL))
            fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            # The other end may have closed before the signal was asked for: then none is sent.
            poller = select.poll()
            poller.register(pipe, 0)
            if poller.poll(0):
                raise InternalError("the monitor process has died as soon as it was ready")
            self._control.settimeout(None)
        except TimeoutError:
            self.leave()
            raise InternalError(f"the monitor process was not ready within {timeout_s:g} s") from None
        except BaseException:
            self.leave()
            raise

    def iteration(self, number: int, rank: int) -> None:
        """This process has another rank in the iteration to come."""
        self._send(NewRankOrder(iteration=number, rank=rank))

    def terminate_within(self, lost: Lost, grace_s: float) -> None:
        """This process is out: it ends within `grace_s`, by itself or by SIGKILL, and then `lost` is recorded. The
        handle may be forgotten."""
        self._send(TerminateOrder(lost=lost, grace_s=grace_s))
        self._control.close()
        # The pipe stays open, and the lifetimes linked.
        self._lifetime_link = None
        # Popen must not wait for the monitor: it outlives this process.
        self._process.returncode = 0

    def _send(self, order: AnyOrder) -> None:
        # Where the pipe is broken the monitor has died, and the kernel kills this process at this moment.
        with suppress(BrokenPipeError):
            self._control.send(encode_order(order))

    def leave(self) -> None:
        """End the monitor, in milliseconds; nothing is left of it. In a forked child only the child's copies go."""
        if self._control.fileno() < 0:
            return
        if os.getpid() == self._owner:
            if self._lifetime_link is not None:
                # No signal when the monitor ends now. To close the pipe is not enough: a forked child may hold it.
                fcntl.fcntl(self._lifetime_link, fcntl.F_SETFL, os.O_NONBLOCK)
            if self._process.poll() is None:
                pidfd = os.pidfd_open(self._process.pid)
                try:
                    self._process.kill()
                    if not ended_within(pidfd, LINGER_S):
                        log.warning(
                            "the monitor process %d hangs in the kernel; it is left behind", self._process.pid
                        )
                        # Popen must not wait for it any longer.
                        self._process.returncode = 0
                    self._process.wait()
                finally:
                    os.close(pidfd)
        self._control.close()
        if self._lifetime_link is not None:
            os.close(self._lifetime_link)
            self._lifetime_link = None


def ended_within(pidfd: int, seconds: float) -> bool:
    """Wait for a process's end, at most this time. Returns whether it has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def _started(options: MonitorOptions, stamps: ProgressStamps, control: socket.socket) -> subprocess.Popen[bytes]:
    """By vfork and exec: nothing of this process is copied, and none of its threads has a part in it. The monitor
    inherits what it needs to, and no other descriptor; standard error is the rank's, for its warnings."""
    import subprocess  # here: the monitor loads this module too, for its messages

    inherited = [control.fileno(), stamps.fd]
    # Until the monitor ignores these signals.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        inherited.append(os.pidfd_open(os.getpid()))
        # What the monitor reads first: a file that is in memory only, since the options may hold a password.
        with os.fdopen(os.memfd_create("nvrx-monitor"), "w+b") as file:
            interpreter = {name: getattr(sys, name) for name in _INTERPRETER}
            interpreter["path"] = [str(Path(place).absolute()) for place in sys.path]
            pickle.dump(interpreter, file)
            pickle.dump(control.fileno(), file)
            start = Start(options=options, pid=os.getpid(), pidfd=inherited[-1], stamps=stamps.fd)
            _ImportablePickler(file).dump(start)
            file.seek(0)
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("monitor_main.py"))],
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
            )
    except OSError as error:
        why = {
            errno.ENOSYS: ": it needs Linux 5.3 or later",
            errno.EMFILE: ": raise `ulimit -n`",
            errno.EAGAIN: ": raise `ulimit -u`",
        }
        hint = why.get(error.errno or 0, "")
        raise InternalError(f"the monitor process cannot be started ({error}){hint}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for pidfd in inherited[2:]:
            os.close(pidfd)


class _ImportablePickler(pickle.Pickler):
    """Refuses what only the rank's own script defines: another process cannot import that."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) in ("__main__", "__mp_main__"):
            name = getattr(value, "__qualname__", type(value).__qualname__)
            raise OptionError(
                f"{name} is defined in the script itself, where the monitor process cannot find it: store_factory"
                " and store_kwargs may only name what a module has that can be imported"
            )
        return NotImplemented
