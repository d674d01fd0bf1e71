"""A rank's side of its monitor: start it by exec, wait until it is ready, leave it."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from nvrx_slurm.inprocess.exception import InternalError, OptionError
from nvrx_slurm.inprocess.ledger import Lost
from nvrx_slurm.inprocess.monitor import __main__ as program
from nvrx_slurm.inprocess.monitor import wire
from nvrx_slurm.inprocess.monitor.process import ended_within
from nvrx_slurm.inprocess.monitor.wire import MonitorOptions, Start
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.util.log import get_logger

__all__ = ["MonitorOptions", "MonitorProcess"]

log = get_logger("inprocess")

F_SETSIG = 10
LINGER_S = 5.0
"""How long a killed monitor may take to end: it may hang in the store's file system."""

_INTERPRETER = ("path", "pycache_prefix", "dont_write_bytecode")
"""Of `sys`: by these the monitor finds its modules as the rank does."""


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
        """Until it watches this process and is in touch with the store. Raises InternalError, with its last words,
        if that fails; nothing is left of it then."""
        try:
            self._control.settimeout(timeout_s)
            words, descriptors, _, _ = socket.recv_fds(self._control, wire.MOST_BYTES, 1)
            if words != wire.READY or not descriptors:
                said = words.decode(errors="replace") or f"it ended with code {self._process.wait(LINGER_S)}"
                raise InternalError(f"the monitor process could not begin: {said}")
            self._lifetime_link = descriptors[0]
            self._link_lifetimes(self._lifetime_link)
            self._control.settimeout(None)
        except TimeoutError:
            self.leave()
            raise InternalError(f"the monitor process was not ready within {timeout_s:g} s") from None
        except BaseException:
            self.leave()
            raise

    def _link_lifetimes(self, pipe: int) -> None:
        """When the other end of this pipe closes, the kernel signals its owner, this process, with SIGKILL."""
        # recv_fds takes a flag for this, and ignores it (CPython 3.11 to 3.13).
        os.set_inheritable(pipe, False)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, self._owner)
        fcntl.fcntl(pipe, F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        poller = select.poll()
        poller.register(pipe, 0)
        if poller.poll(0):
            # Its end came before the signal was asked for.
            raise InternalError("the monitor process has died as soon as it was ready")

    def iteration(self, number: int, rank: int) -> None:
        """This process has another rank in the iteration to come."""
        self._send(wire.NewRankOrder(iteration=number, rank=rank))

    def terminate_within(self, lost: Lost, grace_s: float) -> None:
        """This process is out: it ends within `grace_s`, by itself or by SIGKILL, and then `lost` is recorded. The
        handle may be forgotten."""
        self._send(wire.TerminateOrder(lost=lost, grace_s=grace_s))
        self._control.close()
        # It stays open, and the lifetimes linked.
        self._lifetime_link = None
        # No wait for it: it outlives this process.
        self._process.returncode = 0

    def _send(self, order: wire.AnyOrder) -> None:
        with suppress(BrokenPipeError):
            # It has died, and so do we in this moment.
            self._control.send(wire.encode(order))

    def leave(self) -> None:
        """End the monitor, in milliseconds; nothing is left of it. In a forked child only the child's copies go."""
        if self._control.fileno() < 0:
            return
        if os.getpid() == self._owner:
            self._end()
        self._control.close()
        if self._lifetime_link is not None:
            os.close(self._lifetime_link)
            self._lifetime_link = None

    def _end(self) -> None:
        if self._lifetime_link is not None:
            # A forked child may hold this pipe too: closing it would not be enough.
            fcntl.fcntl(self._lifetime_link, fcntl.F_SETFL, os.O_NONBLOCK)
        if self._process.poll() is not None:
            return
        pidfd = os.pidfd_open(self._process.pid)
        try:
            self._process.kill()
            if not ended_within(pidfd, LINGER_S):
                log.warning("the monitor process %d hangs in the kernel; it is left behind", self._process.pid)
                # No further wait for it.
                self._process.returncode = 0
            self._process.wait()
        finally:
            os.close(pidfd)


# ---- the start


def _started(options: MonitorOptions, stamps: ProgressStamps, control: socket.socket) -> subprocess.Popen[bytes]:
    """By vfork and exec: nothing of this process is copied, and none of its threads is asked. The monitor inherits
    what it needs to, and no other descriptor; standard error is the rank's, for its warnings."""
    inherited = [control.fileno(), stamps.fd]
    # Until it ignores them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, wire.NOT_FOR_MONITORS)
    try:
        inherited.append(os.pidfd_open(os.getpid()))
        start = Start(options=options, pid=os.getpid(), pidfd=inherited[-1], stamps=stamps.fd)
        with _start_file(control.fileno(), start) as file:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", program.__file__],
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
            )
    except OSError as error:
        raise InternalError(
            f"the monitor process cannot be started (it needs Linux 5.3 or later): {error}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for pidfd in inherited[2:]:
            os.close(pidfd)


def _start_file(control: int, start: Start) -> BinaryIO:
    """What the monitor reads first: a file that is in memory only, since the options may hold a password."""
    file = os.fdopen(os.memfd_create("nvrx-monitor"), "w+b")
    try:
        interpreter = {name: getattr(sys, name) for name in _INTERPRETER}
        interpreter["path"] = [str(Path(place).absolute()) for place in sys.path]
        pickle.dump(interpreter, file)
        pickle.dump(control, file)
        _Pickler(file).dump(start)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


class _Pickler(pickle.Pickler):
    """Refuses what only the rank's own script defines: another process cannot import that."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) in ("__main__", "__mp_main__"):
            name = getattr(value, "__qualname__", type(value).__qualname__)
            raise OptionError(
                f"{name} is defined in the script itself, where the monitor process cannot find it: store_factory"
                " and store_kwargs may only name what a module has that can be imported"
            )
        return NotImplemented
