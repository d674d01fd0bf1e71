"""The supervisor's warm processes: one a role, from which its workers are forked. Standard library only.

`diagnostics/stacks/hook/nvrx_warm.py` is what runs in them, and says what they exchange with this side. A warm
process may die, hang or be out of date at any moment: then its workers start cold. So that a rank never runs twice,
a fork becomes a worker only with the word "go", which is not said to one that has been given up.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.agent.child import become, find_program

FORK_S = 10.0
"""How long a warm process may take to fork a worker. Then it is killed, and the worker starts cold."""

LAST_BYTES = 4096


@dataclass(slots=True)
class WarmProcess:
    """`err`: the read end of its standard error, while it warms up."""

    pid: int
    channel: socket.socket
    err: int
    is_ready: bool = False
    has_told: bool = False


@dataclass(slots=True)
class Fork:
    """A worker that a warm process was asked for. `own`: the worker's socket; `fds`: its output, in case of a cold
    start."""

    role: str
    order: dict[str, Any]
    fds: list[int]
    own: socket.socket
    until: float

    def close(self) -> None:
        self.own.close()
        for descriptor in self.fds:
            os.close(descriptor)


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
        self._dying: set[int] = set()  # killed, and not yet reaped
        self._lost: dict[str, str] = {}  # role → why its last warm process was lost
        self._forks: dict[int, Fork] = {}  # by the descriptor of the worker's socket

    @property
    def pids(self) -> set[int]:
        """Children of the supervisor that are no workers."""
        return {each.pid for each in self._by_role.values()} | self._dying

    def deadlines(self) -> list[float]:
        return [fork.until for fork in self._forks.values()]

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
        failure, failure_end = os.pipe2(os.O_CLOEXEC)
        inherited = [theirs.fileno(), *(read for read, _ in pipes)]
        env = {**environment, "NVRX_WARM_FD": ",".join(map(str, inherited))}
        supervisor = os.getpid()
        own.send(b"\0".join(os.fsencode(each) for each in (str(supervisor), *order["spec"])))
        why = ""
        try:
            program = find_program(argv[0], env.get("PATH", os.defpath))
            pid = os.fork()
        except OSError as error:
            why, pid = f"{error.strerror}: {argv[0]}", -1
        if pid == 0:
            for descriptor in inherited:
                os.set_inheritable(descriptor, True)
            become(supervisor, failure_end, program, argv, env, order["cwd"], *(write for _, write in pipes))
        theirs.close()
        os.close(failure_end)
        (out_read, out_write), (err_read, err_write) = pipes
        for descriptor in (out_read, out_write, err_write):
            os.close(descriptor)
        if pid > 0:
            why = os.read(failure, LAST_BYTES).decode(errors="replace")  # closed by execve
        os.close(failure)
        if why:
            own.close()
            os.close(err_read)
            self._say(op="warm", id=role, said=["failed", why])
            return
        os.set_blocking(err_read, False)
        self._by_role[role] = WarmProcess(pid, own, err_read)
        self._poller.register(own, select.POLLIN)

    def end(self, role: str, *, is_reaped: bool = False) -> None:
        """Kill a role's warm process, if it has one, and what that has started. Its workers go on."""
        if (warm := self._by_role.pop(role, None)) is not None:
            with contextlib.suppress(KeyError):  # unregistered, once its end was heard
                self._poller.unregister(warm.channel)
            warm.channel.close()
            os.close(warm.err)
            if not is_reaped:
                self._dying.add(warm.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(warm.pid, signal.SIGKILL)  # each worker has a group of its own

    def fork(self, role: str, order: dict[str, Any], fds: list[int]) -> str | None:
        """Ask for a worker, and keep its output; what comes of it is told by `forked` or `start_cold`. Returns why
        that cannot be asked for."""
        warm = self._by_role.get(role)
        if warm is None or not warm.is_ready:
            return self._lost.get(role, "the warm process has ended")
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **order["env"]}
        strings = [order["cwd"], *(f"{name}={value}" for name, value in environment.items())]
        try:
            data = b"\0".join(map(os.fsencode, strings))
            socket.send_fds(warm.channel, [data], [*fds, theirs.fileno()])
        except OSError:  # it is dead, or has stopped reading
            own.close()
            return "the warm process takes no orders"
        finally:
            theirs.close()
        own.setblocking(False)
        self._forks[own.fileno()] = Fork(role, order, fds, own, time.monotonic() + FORK_S)
        self._poller.register(own, select.POLLIN)
        return None

    def give_up(self) -> list[dict[str, Any]]:
        """The workers are stopped: what has not begun never will. Returns its orders."""
        orders = []
        for fork in list(self._forks.values()):
            self._forget(fork)
            fork.close()
            orders.append(fork.order)
        return orders

    def close(self) -> None:
        """End them all; they are children as any others from now on."""
        self.give_up()
        for role in list(self._by_role):
            self.end(role)
        self._dying.clear()

    # ---- what happens

    def look(self, ready: set[int]) -> None:
        """Serve what has arrived on these descriptors, and what should have by now."""
        for descriptor in ready & self._forks.keys():
            self._answered(self._forks[descriptor])
        for role, warm in list(self._by_role.items()):
            if warm.channel.fileno() in ready:
                self._hear(role, warm)
        now = time.monotonic()
        for fork in [each for each in self._forks.values() if each.until <= now]:
            self.lost(fork.role, f"the warm process did not fork within {FORK_S:.0f} s")
            self._begin_cold(fork, "the warm process did not fork")

    def look_at_forks(self) -> None:
        """Before a child is reaped that nobody knows: it may be a worker that has said its process id, and died."""
        for fork in list(self._forks.values()):
            self._answered(fork)

    def reaped(self, pid: int, how: str) -> None:
        """A child has ended."""
        self._dying.discard(pid)
        for role, warm in list(self._by_role.items()):
            if warm.pid == pid:
                self._hear(role, warm)
                self.lost(role, how, is_reaped=True)

    def lost(self, role: str, why: str, *, is_reaped: bool = False) -> None:
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
                said = [os.fsdecode(each) for each in data.split(b"\0")]
                warm.is_ready = said[0] == "ready"
                warm.has_told = not warm.is_ready
                self._say(op="warm", id=role, said=said)
            self._poller.unregister(warm.channel)  # its end follows

    def _answered(self, fork: Fork) -> None:
        try:
            data = fork.own.recv(LAST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        word, _, rest = os.fsdecode(data).partition("\0")
        if word != "pid":
            if word == "stale":
                self.lost(fork.role, f"{rest} has changed since it was imported")
            self._begin_cold(fork, self._lost.get(fork.role, "the warm process has ended"))
            return
        self._forget(fork)
        self._forked(fork.order, int(rest))
        with contextlib.suppress(OSError):
            fork.own.send(b"go")
        fork.close()

    def _begin_cold(self, fork: Fork, why: str) -> None:
        self._forget(fork)
        fork.own.close()  # from now on it cannot become a worker
        self._start_cold(fork.order, fork.fds, why)

    def _forget(self, fork: Fork) -> None:
        del self._forks[fork.own.fileno()]
        self._poller.unregister(fork.own)


def _last_line(descriptor: int) -> str:
    """The last that a process has printed before it ended."""
    said = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 65536):
            said = (said + chunk)[-LAST_BYTES:]
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
