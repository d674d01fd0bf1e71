"""The supervisor's warm processes: one a role, from which its workers are forked. Standard library only.

`diagnostics/stacks/hook/nvrx_warm.py` is what runs in them, and says what they exchange with this side. A warm
process may die, hang or be out of date at any moment: then its workers start cold.

A fork of a process with torch in it takes 10 ms, twice. So as many as the node has workers are forked ahead, and wait
to be told who they are. So that a rank never runs twice, each is told once, and one that does not answer is killed,
and dead, before its rank starts cold.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.agent.child import become, fork_child

# How long a warm process may take to fork a worker. Then it is killed, and the worker starts cold.
FORK_S = 10.0

# How long after a start of workers the next ones are forked: not while these need the processors.
AHEAD_AFTER_S = 1.0

LAST_BYTES = 4096


@dataclass(slots=True)
class WarmProcess:
    """`ahead`: how many workers are forked ahead; `err`: the read end of its standard error, while it warms up."""

    pid: int
    ahead: int
    channel: socket.socket
    err: int
    is_ready: bool = False
    has_told: bool = False


@dataclass(slots=True)
class Fork:
    """A process that a warm process forks, or has forked. `own`: its socket; `pid`: once it has said it; `order`: the
    worker that it is to be, None: it waits for one; `fds`: that worker's output, also for a cold start."""

    role: str
    own: socket.socket
    pid: int | None = None
    order: dict[str, Any] | None = None
    fds: list[int] = field(default_factory=list)
    until: float = 0.0
    is_killed: bool = False


class WarmProcesses:
    """`say`: tells the agent; `forked`, `start_cold`: what the supervisor does with a worker that is there, and with
    one that is not, and why."""

    def __init__(
        self,
        poller: select.poll,
        *,
        say: Callable[..., None],
        forked: Callable[[dict[str, Any], int], None],
        start_cold: Callable[[dict[str, Any], list[int], str], None],
    ) -> None:
        self._poller, self._say, self._forked, self._start_cold = poller, say, forked, start_cold
        self._by_role: dict[str, WarmProcess] = {}
        self._lost: dict[str, str] = {}  # role → why its last warm process was lost
        self._forks: dict[int, Fork] = {}  # by the descriptor of its socket
        self._dying: set[int] = set()  # killed, and not yet reaped
        self._ahead_at: float | None = None

    @property
    def pids(self) -> set[int]:
        """Children of the supervisor that are no workers."""
        waiting = {fork.pid for fork in self._forks.values() if fork.order is None and fork.pid is not None}
        return {each.pid for each in self._by_role.values()} | waiting | self._dying

    def deadlines(self) -> list[float]:
        deadlines = [fork.until for fork in self._forks.values() if fork.order is not None and not fork.is_killed]
        return deadlines if self._ahead_at is None else [*deadlines, self._ahead_at]

    # ---- orders

    def start(self, order: dict[str, Any], environment: dict[str, str]) -> None:
        """Start a warm process for a role, in the place of an earlier one."""
        role, argv = order["id"], order["argv"]
        self.end(role)
        self._lost.pop(role, None)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        own.setblocking(False)
        pipes = [os.pipe() for _ in range(2)]  # its output; of the kind that workers have
        inherited = [theirs.fileno(), *(read for read, _ in pipes)]
        env = {**environment, "NVRX_WARM_FD": ",".join(map(str, inherited))}
        supervisor = os.getpid()
        own.send(b"\0".join(os.fsencode(each) for each in (str(supervisor), *order["spec"])))
        try:
            pid = fork_child()
        except OSError as error:
            why, pid = f"{error.strerror}: {argv[0]}", -1
        if pid == 0:
            for descriptor in inherited:
                os.set_inheritable(descriptor, True)
            # What keeps it from its program is the last line on its standard error. This process waits for no execve:
            # the work folder may be on a dead file system.
            out, err = (write for _, write in pipes)
            become(supervisor, err, argv, env, order["cwd"], out, err)
        theirs.close()
        # The process has its own ends. Kept here is one of its standard error: the last line there says why it ended.
        (out_read, out_write), (err_read, err_write) = pipes
        for descriptor in (out_read, out_write, err_write):
            os.close(descriptor)
        if pid < 0:
            own.close()
            os.close(err_read)
            self._say(op="warm", id=role, said=["failed", why])
            return
        os.set_blocking(err_read, False)
        self._by_role[role] = WarmProcess(pid, order["ahead"], own, err_read)
        self._poller.register(own, select.POLLIN)

    def end(self, role: str, *, is_reaped: bool = False) -> None:
        """Kill a role's warm process, if it has one, what that has started, and the forks that wait. Its workers go
        on, and so does what is about to be one."""
        if (warm := self._by_role.pop(role, None)) is None:
            return
        with contextlib.suppress(KeyError):  # unregistered, once its end was heard
            self._poller.unregister(warm.channel)
        warm.channel.close()
        os.close(warm.err)
        if not is_reaped:
            self._dying.add(warm.pid)
            os.kill(warm.pid, signal.SIGKILL)  # it may not have its group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(warm.pid, signal.SIGKILL)  # each worker has a group of its own
        for fork in self._waiting(role):
            self._drop(fork)

    def fork(self, role: str, order: dict[str, Any], fds: list[int]) -> str | None:
        """Have a worker, and keep its output; what comes of it is told by `forked` or `start_cold`. Returns why that
        cannot be asked for."""
        waiting = sorted(self._waiting(role), key=lambda each: each.pid is None)  # first those that are there
        fork = waiting[0] if waiting else self._ask(role)
        if isinstance(fork, str):
            return fork
        fork.order, fork.fds, fork.until = order, fds, time.monotonic() + FORK_S
        if fork.pid is not None:
            self._tell(fork)
        return None

    def give_up(self) -> list[dict[str, Any]]:
        """The workers are stopped: what has not begun never will. Returns its orders."""
        given_up = [fork for fork in self._forks.values() if fork.order is not None]
        for fork in given_up:
            self._drop(fork)
        return [fork.order for fork in given_up if fork.order is not None]

    def drop_unknown(self) -> None:
        """Have those that wait, and whose process id is not known yet, end by themselves."""
        # A teardown cannot leave them out of what it signals, and as a worker of the next cycle each would end by its
        # signal.
        for fork in [each for each in self._forks.values() if each.order is None and each.pid is None]:
            self._drop(fork)

    def close(self) -> None:
        """End them all; they are children as any others from now on."""
        for fork in list(self._forks.values()):
            self._drop(fork)
        for role in list(self._by_role):
            self.end(role)
        self._dying.clear()

    # ---- what happens

    def look(self, ready: set[int]) -> None:
        """Serve what has arrived on these descriptors, and what should have by now."""
        for descriptor in ready & self._forks.keys():
            # One that is out of date ends the warm process, and with it the forks that wait.
            if descriptor in self._forks:
                self._answered(self._forks[descriptor])
        for role, warm in list(self._by_role.items()):
            if warm.channel.fileno() in ready:
                self._hear(role, warm)
        now = time.monotonic()
        for fork in [each for each in self._forks.values() if each.order is not None and each.until <= now]:
            self._too_late(fork)
        if self._ahead_at is not None and self._ahead_at <= now:
            self._ahead_at = None
            for role in self._by_role:
                self._fork_ahead(role)

    def look_at_forks(self) -> None:
        """Before an unknown child is reaped: it may be a worker that has begun, and died."""
        for descriptor, fork in list(self._forks.items()):
            if self._forks.get(descriptor) is fork:  # one that is out of date ends those that wait
                self._answered(fork)

    def reaped(self, pid: int, how: str) -> None:
        """A child has ended."""
        self._dying.discard(pid)
        for fork in [each for each in self._forks.values() if each.pid == pid and each.is_killed]:
            self._begin_cold(fork)
        for role, warm in list(self._by_role.items()):
            if warm.pid == pid:
                # Its last words may be in the socket, unread.
                self._hear(role, warm)
                self._lose(role, how, is_reaped=True)

    def _lose(self, role: str, why: str, *, is_reaped: bool = False) -> None:
        """A role has no warm process any more."""
        if (warm := self._by_role.get(role)) is not None:
            self._lost[role] = why
            said = _last_line(warm.err) if not warm.is_ready else ""
            has_told = warm.has_told
            self.end(role, is_reaped=is_reaped)
            if not has_told:
                self._say(op="warm", id=role, said=["ended", f"{why}: {said}" if said else why])

    def _hear(self, role: str, warm: WarmProcess) -> None:
        with contextlib.suppress(OSError, KeyError):
            while data := warm.channel.recv(1 << 20):
                said = [each.decode(errors="replace") for each in data.split(b"\0")]
                warm.is_ready = said[0] == "ready"
                warm.has_told = not warm.is_ready
                self._say(op="warm", id=role, said=said)
                if warm.is_ready:
                    self._fork_ahead(role)
            self._poller.unregister(warm.channel)  # its end follows

    # ---- forks

    def _waiting(self, role: str) -> list[Fork]:
        return [fork for fork in self._forks.values() if fork.role == role and fork.order is None]

    def _fork_ahead(self, role: str) -> None:
        missing = self._by_role[role].ahead - len(self._waiting(role))
        while missing > 0 and not isinstance(self._ask(role), str):
            missing -= 1

    def _ask(self, role: str) -> Fork | str:
        """Have a process forked. Returns why not, if that cannot be asked for."""
        warm = self._by_role.get(role)
        if warm is None or not warm.is_ready:
            return self._lost.get(role, "the warm process has ended")
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            socket.send_fds(warm.channel, [b"fork"], [theirs.fileno()])
        except OSError:  # it is dead, or has stopped reading
            own.close()
            return "the warm process takes no orders"
        finally:
            theirs.close()
        own.setblocking(False)
        fork = self._forks[own.fileno()] = Fork(role, own)
        self._poller.register(own, select.POLLIN)
        return fork

    def _tell(self, fork: Fork) -> None:
        """Tell a process which worker it is."""
        assert fork.order is not None
        environment = {**os.environ, **fork.order["env"]}
        strings = [fork.order["cwd"], *(f"{name}={value}" for name, value in environment.items())]
        try:
            socket.send_fds(fork.own, [b"\0".join(map(os.fsencode, strings))], fork.fds)
        except OSError:  # it is dead, or its environment is too large
            self._too_late(fork)

    def _answered(self, fork: Fork) -> None:
        try:
            data = fork.own.recv(LAST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        word, _, rest = os.fsdecode(data).partition("\0")
        if word == "pid":
            fork.pid = int(rest)
            if fork.order is not None:
                self._tell(fork)
        elif word == "begun" and not fork.is_killed:
            self._forget(fork)
            assert fork.order is not None
            assert fork.pid is not None
            self._forked(fork.order, fork.pid)
            self._close(fork)
            self._ahead_at = time.monotonic() + AHEAD_AFTER_S
        elif word == "stale":
            self._lose(fork.role, f"{rest} has changed since it was imported")
            self._begin_cold(fork)
        elif word != "begun" and fork.order is None:
            self._drop(fork)
        elif word != "begun" and not fork.is_killed:
            self._begin_cold(fork)

    def _too_late(self, fork: Fork) -> None:
        self._lose(fork.role, "the warm process has forked no worker in time")
        if fork.pid is None:
            self._begin_cold(fork)  # it cannot begin: nothing has told it who it is, or ever will
        elif not fork.is_killed:
            fork.is_killed, fork.until = True, float("inf")
            os.kill(fork.pid, signal.SIGKILL)  # its rank starts when it is reaped

    def _begin_cold(self, fork: Fork) -> None:
        self._forget(fork)
        fork.own.close()
        assert fork.order is not None
        self._start_cold(fork.order, fork.fds, self._lost.get(fork.role, "the warm process has ended"))

    def _drop(self, fork: Fork) -> None:
        """Kill it, whichever worker it was to be."""
        self._forget(fork)
        self._close(fork)
        if fork.pid is not None:
            if fork.order is None:
                self._dying.add(fork.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGKILL)

    def _forget(self, fork: Fork) -> None:
        del self._forks[fork.own.fileno()]
        with contextlib.suppress(KeyError):
            self._poller.unregister(fork.own)

    def _close(self, fork: Fork) -> None:
        fork.own.close()
        for descriptor in fork.fds:
            os.close(descriptor)


def _last_line(descriptor: int) -> str:
    """The last that a process has printed before it ended."""
    said = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 65536):
            said = (said + chunk)[-LAST_BYTES:]
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
