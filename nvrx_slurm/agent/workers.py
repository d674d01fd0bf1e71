"""The agent's side of its supervisor: start workers, receive their ends, stop them, remove what they left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import nvrx_slurm
from nvrx_slurm.agent import supervisor
from nvrx_slurm.agent.teardown import KILL_S, Phase
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.commands import CommandEnd
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import restore_descriptor_limit
from nvrx_slurm.util.threads import in_thread

if TYPE_CHECKING:
    from nvrx_slurm.agent.machine import FenceSocketPort, Holdable

log = get_logger("agent")

# Of the processes that a dead supervisor has left so many are watched at once: each takes a descriptor.
MOST_WATCHED, LOOK_AGAIN_S = 64, 0.05


class _Said(msgspec.Struct, frozen=True, tag_field="op"):
    """A message of the supervisor's, as `supervisor.py` lists them."""


class Spawned(_Said, frozen=True, tag="spawned", rename={"rank": "id"}):
    """A worker runs. `warm`: it was forked from its role's warm process; `cold`: why it was not, though asked for."""

    rank: int
    pid: int
    warm: bool = False
    cold: str | None = None


class WarmSaid(_Said, frozen=True, tag="warm", rename={"role": "id", "words": "said"}):
    """What the warm process of a role has said, or `ended` and how: the words of `nvrx_warm.py`."""

    role: str
    words: tuple[str, ...]


class Exited(_Said, frozen=True, tag="exited", rename={"rank": "id", "code": "exit_code"}):
    """A worker ended (or could not be started: `error`). `at`: when, on the monotonic clock; `sent`: the signals with
    which the supervisor had asked it to."""

    rank: int
    code: int | None = None
    signal: int | None = None
    error: str | None = None
    at: float | None = None
    sent: frozenset[int] = frozenset()


class Tearing(_Said, frozen=True, tag="phase"):
    """A teardown is in this phase, and gives it `ends_in_s` more seconds. `left`: up to 64 processes still there."""

    phase: Phase
    left: tuple[int, ...]
    ends_in_s: float


class Stopped(_Said, frozen=True, tag="stopped"):
    """No worker and no descendant of one is left, but for `survivors` that not even SIGKILL ended.

    `lapsed`: the agent had not asked for it; the lease had not been renewed.
    """

    survivors: tuple[int, ...]
    lapsed: bool = False


class SupervisorDied(msgspec.Struct, frozen=True):
    """The supervisor was killed; what it had started is dead, but for `survivors` that not even SIGKILL ended."""

    survivors: tuple[int, ...] = ()


class Released(_Said, frozen=True, tag="released"):
    """The workers live by an ordinary lease again, and the kernel's timer with them. `grant`: the suspension by which
    they outlived it."""

    grant: int


class CommandExited(_Said, frozen=True, tag="command", rename={"request": "id"}):
    """A command that ran beside a worker has ended, or could not be run."""

    request: str
    end: CommandEnd


SaidBySupervisor = CommandExited | Spawned | WarmSaid | Exited | Tearing | Stopped | Released
WorkerEvent = SaidBySupervisor | SupervisorDied
_said = msgspec.json.Decoder[SaidBySupervisor](SaidBySupervisor)


_PACKAGES = Path(nvrx_slurm.__file__).parents[1]
# Without site-packages' start-up files, which would cost it more time and memory than all that it does itself.
_BOOT = "import sys; sys.path.append(sys.argv[2]); from nvrx_slurm.agent.supervisor import main; main()"


class Workers:
    """The workers of this node, at most one cycle of them at a time. What happens to them is posted to `post`.

    `lock`: a descriptor that the supervisor holds too, until the last worker is dead.
    """

    def __init__(self, post: Callable[[WorkerEvent], None], *, lock: int | None = None) -> None:
        self._post, self._lock = post, lock
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._others: list[int] = []  # processes that this one had started before

    def start(self) -> None:
        """Start the supervisor."""
        self._others = supervisor.descendants(os.getpid())
        # What a supervisor that is killed leaves behind becomes this process's child; `_read` kills it.
        supervisor.become_subreaper()
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # One datagram holds a worker's whole environment.
        for end in (own, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, supervisor.MESSAGE_BYTES)
        # -P: the user's folder may hold a json.py.
        argv = [sys.executable, "-P", "-S", "-E", "-c", _BOOT, str(theirs.fileno()), str(_PACKAGES)]
        self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        restore_descriptor_limit(self._process.pid)  # it starts nothing before it is asked to
        theirs.close()  # else this process itself would keep the socket open, and never read of the supervisor's end
        own.setblocking(False)
        self._control = own
        asyncio.get_running_loop().add_reader(own, self._read)
        if self._lock is not None:
            self._send({"op": "lock"}, self._lock)

    @property
    def supervisor_pid(self) -> int:
        """The process that all workers descend from."""
        assert self._process is not None
        return self._process.pid

    def spawn(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        out: int,
        err: int,
        warm: str | None = None,
    ) -> None:
        """Start one worker, its output on two descriptors, which are closed here. `Spawned` or `Exited` follows.
        `warm`: fork it from the warm process of this role, where that can be done."""
        order = {"op": "spawn", "id": rank, "argv": list(argv), "env": dict(env), "cwd": cwd, "warm": warm}
        too_large = Exited(rank, error="its command and environment are too large")
        self._send_if_it_fits(order, too_large, out, err)

    def warm(
        self, role: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, spec: Sequence[str], ahead: int = 0
    ) -> None:
        """Start a warm process for a role, in the place of an earlier one; `WarmSaid` follows. `spec`: what it is to
        do, in the words of `nvrx_warm.py`; `ahead`: how many workers it forks before they are asked for."""
        order = {"op": "warm", "id": role, "argv": list(argv), "env": dict(env), "cwd": cwd, "spec": list(spec)}
        too_large = WarmSaid(role, ("failed", "its environment and list of imports are too large"))
        self._send_if_it_fits({**order, "ahead": ahead}, too_large)

    def cool(self, role: str) -> None:
        """End the warm process of a role, if there is one."""
        self._send({"op": "cool", "id": role})

    def run_command(
        self,
        request: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        beside: int,
        out: int,
        err: int,
        without: Collection[str] = (),
    ) -> None:
        """Start a command where the worker with the process id `beside` is: its folder, its container; its output on
        two descriptors, which are closed here. `CommandExited` follows. `env` stands above the worker's environment,
        and of that the names `without` are left out."""
        order = {"op": "run", "id": request, "argv": list(argv), "env": dict(env), "beside": beside}
        order["without"] = sorted(without)
        too_large = CommandExited(request, CommandEnd(error="it is too large"))
        self._send_if_it_fits(order, too_large, out, err)

    def signal_command(self, request: str, number: int) -> None:
        """Signal a command and all that it has started; one that has ended is no error."""
        self._send({"op": "signal", "id": request, "signal": int(number)})

    def stop(
        self,
        grace_s: float,
        number: int = signal.SIGTERM,
        checkpoint: tuple[int, float] | None = None,
    ) -> None:
        """Ask every worker to end, and kill those that are left after `grace_s`. `Stopped` follows, always.

        `checkpoint`: a signal that is sent before, and how long workers have to save what they can. A second stop
        with no grace skips to the kill.
        """
        self._send({"op": "stop", "signal": int(number), "grace_s": grace_s, "checkpoint": checkpoint})

    def phase_done(self, phase: Phase) -> None:
        """What a phase waits for (the dump, the checkpoint) is done: go on."""
        self._send({"op": "done", "phase": phase})

    def lease(self, seconds: float, grant: int | None = None) -> None:
        """Workers may run for so long from now, and are killed then unless this is renewed. `grant`: the suspension
        in which they outlive the ordinary lease; `Released` follows once an ordinary one is in force again."""
        until = asyncio.get_running_loop().time() + seconds  # CLOCK_MONOTONIC, which the supervisor reads too
        self._send({"op": "lease", "until": until, "grant": grant})

    def fence(self, fence_socket: FenceSocketPort) -> None:
        """Arm the fence socket, and leave it to the supervisor alone: it closes when that dies."""
        self._send({"op": "fence"}, *fence_socket.filenos())
        fence_socket.close()

    def hold(self, connection: Holdable) -> None:
        """Let the supervisor hold the liveness connection too: it closes only when the last worker is dead."""
        self._send({"op": "hold"}, connection.fileno())

    def close(self) -> None:
        """End the supervisor, and with it all that still runs."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            # It reads the socket's end, kills all below it, and exits. Only then are the rings without a user.
            self._process.wait()
            sweep_rings()

    def _send_if_it_fits(self, order: dict[str, Any], too_large: WorkerEvent, *fds: int) -> None:
        """Pass on descriptors, and close them here. `too_large`: posted where no datagram can be so long."""
        try:
            self._send(order, *fds)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            self._post(too_large)
        finally:
            for descriptor in fds:
                os.close(descriptor)

    def _send(self, order: dict[str, Any], *fds: int) -> None:
        if self._control is None:
            return
        # No order may be lost, so this waits where the buffer is full; reads never do.
        self._control.setblocking(True)
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], fds)
        except ConnectionError:
            pass  # it died: `_read` finds that
        finally:
            # Also after an order that is too large: `_read` reads until recv would block, and that would never end.
            self._control.setblocking(False)

    def _read(self) -> None:
        assert self._control is not None
        while True:
            try:
                data = self._control.recv(supervisor.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                break
            try:
                event = decode(_said.decode, data, "what the supervisor has sent")
            except MalformedRecord as error:
                log.error("%s; it is ignored", error)
                continue
            self._post(event)
            if isinstance(event, Stopped):
                in_thread(sweep_rings, "sweep")
        # The supervisor died. The agent is now the parent of its children: kill them as the supervisor would have.
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        # A short wait: nothing but its death closes its end of the socket.
        if self._process is not None:
            self._process.wait()
        deadline = time.monotonic() + KILL_S
        while left := self._left_behind():
            supervisor.send_all(left, signal.SIGKILL)
            if not _wait_for_one(left, deadline - time.monotonic()):
                break
        self._post(SupervisorDied(survivors=tuple(left)))
        in_thread(sweep_rings, "sweep")

    def _left_behind(self) -> list[int]:
        """What a supervisor that was killed had started: every descendant, but for what ran here before it."""
        spared = {pid for other in self._others for pid in (other, *supervisor.descendants(other))}
        return [pid for pid in supervisor.descendants(os.getpid()) if pid not in spared]


def _wait_for_one(pids: Sequence[int], seconds: float) -> bool:
    """Wait until one of these processes has ended, and reap every child that has. Returns whether there is still
    time."""
    with contextlib.ExitStack() as opened:
        poller, wait_s = select.poll(), max(0.0, seconds)
        for pid in pids[:MOST_WATCHED]:
            try:
                ended = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except OSError:  # no descriptor is left for it: look again soon
                wait_s = min(wait_s, LOOK_AGAIN_S)
                break
            opened.callback(os.close, ended)
            poller.register(ended, select.POLLIN)
        any_ended = bool(poller.poll(wait_s * 1000)) or wait_s < seconds
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    return any_ended


RINGS = "nvrx-ring-*"


def sweep_rings(memory: Path = Path("/dev/shm")) -> None:
    """Remove the payload rings whose creators are dead. Run it in a thread: to give back gigabytes takes a while."""
    # A ring's own tracker may have been killed with its worker.
    if any(memory.glob(RINGS)):  # most jobs have none, and the module below takes 2 MB of an agent
        from nvrx_slurm.transport.ring import sweep

        for name in sweep():
            log.info("removed the payload ring %s: its worker is dead", name)
