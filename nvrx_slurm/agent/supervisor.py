"""The node's init process: the parent of every worker. Workers never outlive the agent.

The agent runs it with `python -S`; standard library only, single-threaded, a few MiB. It is a child subreaper:
all that a worker leaves behind (double forks, sessions of their own) becomes its child. It kills everything below it

- when the agent's end of the socket closes, by any signal that the agent died of. Since it also holds the agent's
  liveness connection open, the controller sees that close only after the last descendant has ended;
- when the lease lapses, which the agent renews while it is in touch with store or controller: a node that has
  lost both, or an agent that hangs, loses its workers, and another node may have their ranks;
- when the agent orders it, phase by phase (`teardown.py`).

If the supervisor is frozen when the lease lapses, the kernel kills it, and so its workers, a moment later
(`self_fence.py`).

If this process itself is killed (by the fence, say), the kernel kills the workers with it (PR_SET_PDEATHSIG). What
the workers had started becomes the agent's, which is a subreaper too and kills it (`workers.py`).

Messages are JSON, one per SOCK_SEQPACKET datagram:

    agent → supervisor   {"op": "spawn", "id", "argv", "env", "cwd", "warm": role | null} + [stdout fd, stderr fd]
                         {"op": "warm", "id": role, "argv", "env", "cwd", "spec", "ahead"}   see `warm.py`
                         {"op": "cool", "id": role}           end it
                         {"op": "run", "id", "argv", "env", "without": [name, …], "beside"} + [stdout fd, stderr fd]
                                                              a user's command
                         {"op": "signal", "id", "signal"}     a user's command
                         {"op": "stop", "signal", "grace_s", "checkpoint": [signal, seconds] | null}
                         {"op": "done", "phase"}              the work of a phase (dump, checkpoint) is done
                         {"op": "lease", "until", "grant": suspension | null}
                                                              workers may run until then, on the monotonic clock
                         {"op": "hold"} + [liveness connection fd]
                         {"op": "fence"} + [fence socket fds]   the first one is armed
                         {"op": "lock"} + [fd]                the lock of the node's one agent
    supervisor → agent   {"op": "spawned", "id", "pid", "warm", "cold": why it is not warm | null}
                         {"op": "warm", "id": role, "said": [word, …]}    what a warm process says, or how it ended
                         {"op": "exited", "id", "exit_code" | "signal" | "error", "at", "sent": [signal, …]}
                         {"op": "command", "id", "end": {"exit_code" | "signal" | "error"}}
                                                              a user's command has ended
                         {"op": "phase", "phase", "left": [pid, …], "ends_in_s"}    as it begins, and each second
                         {"op": "stopped", "survivors": [pid, …], "lapsed": bool}
                                                              no worker is left; the lease had lapsed, or not
                         {"op": "released", "grant"}          an ordinary lease is in force again
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from nvrx_slurm.agent.child import HANDLED, become, become_command, fork_child
from nvrx_slurm.agent.teardown import KILL_S, Phase, Teardown
from nvrx_slurm.agent.warm import WarmProcesses
from nvrx_slurm.liveness.self_fence import SelfFenceTimer
from nvrx_slurm.util.signals import signal_name

F_SETSIG = 10
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4  # <linux/sched.h>, among the flags of /proc/PID/stat
MESSAGE_BYTES = 4 << 20
MOST_DESCRIPTORS = 4
SAY_EVERY_S = 1.0
MOST_NAMED = 64
# How often the kill is repeated: a process may have forked during the walk over /proc.
AGAIN_S = 0.05

# How long after the lease the kernel kills a supervisor that has not looked at it; `FENCE_MARGIN_S` covers it.
SELF_FENCE_S = 0.5

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Let orphaned descendants of this process become its children (Linux ≥ 3.4, prctl(2))."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _read_stat(folder: str) -> list[bytes]:
    """The fields of a process's or a thread's stat from the third on, the state (proc(5)). Raises OSError."""
    with open(f"{folder}/stat", "rb") as file:  # noqa: PTH123  without an import of pathlib
        return file.read().rpartition(b")")[2].split()


def living_children() -> dict[int, list[int]]:
    """The children of each process, zombies left out. From one walk over /proc: a snapshot, so repeat it."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  names only, and no import of pathlib
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _read_stat(f"/proc/{name}")
                # A process whose main thread has ended is shown as a zombie while its other threads run.
                if fields[0] != b"Z" or int(fields[17]) > 1:
                    parents.setdefault(int(fields[1]), []).append(int(name))
    return parents


def descendants(root: int, children_of: dict[int, list[int]] | None = None) -> list[int]:
    """Every living process below `root`, as `living_children` finds them now, or has found them."""
    children_of = living_children() if children_of is None else children_of
    found, queue = [], [root]
    while queue:
        children = children_of.get(queue.pop(), [])
        found += children
        queue += children
    return found


def is_exiting(pid: int) -> bool:
    """Whether all threads of a process run no code any more, and the kernel gives back what it held."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread, has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  as above
            if not int(_read_stat(f"/proc/{pid}/task/{thread}")[6]) & PF_EXITING:
                return False
    return True


def send_all(pids: list[int], number: int) -> None:
    """Signal processes; one that is gone is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def arm(fence_socket: int) -> None:
    """Have the kernel kill this process, and so its workers, when the fence key arrives (`liveness/fence.py`)."""
    fcntl.fcntl(fence_socket, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fence_socket, F_SETSIG, int(signal.SIGKILL))
    # Last: for a key that arrives before F_SETSIG the kernel would send SIGIO, and no SIGKILL.
    fcntl.fcntl(fence_socket, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


class Supervisor:
    """Owns the workers. One loop: the socket, SIGCHLD (through the wakeup descriptor), and the nearest deadline."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.poller = select.poll()
        self.workers: dict[int, int] = {}  # pid → id
        self.commands: dict[int, str] = {}  # pid → id, of users' commands beside the workers
        self.cold: dict[int, str | None] = {}  # pid → why a starting worker is not forked from its warm process
        self.starting: dict[int, int] = {}  # pid → the pipe on which it reports that it cannot run its program
        self.held: dict[str, list[int]] = {}  # held for the agent: liveness connection, fence socket
        self.teardown: Teardown | None = None
        self.signals: dict[Phase, int] = {}
        self.sent: set[int] = set()  # to the workers, by this teardown
        self.say_at = self.kill_at = 0.0
        self.lease_until: float | None = None
        self.grant: int | None = None  # the suspension in which the workers outlive the ordinary lease
        self.self_fence = SelfFenceTimer()
        self.lapsed = False
        self.may_spawn = True  # until a lease has lapsed, and from the next one on
        self.warm = WarmProcesses(self.poller, say=self._say, forked=self._forked, start_cold=self._spawn_cold)
        self.wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for number in HANDLED:
            # Handlers, not SIG_IGN: workers must not inherit it. Slurm signals every process of a step; only the
            # agent decides what follows.
            signal.signal(number, lambda *_: None)

    def run(self) -> None:
        """Serve until the agent is gone; then leave no process behind."""
        self.poller.register(self.control, select.POLLIN)
        self.poller.register(self.wakeup, select.POLLIN)
        while True:
            deadlines = self.warm.deadlines()
            deadlines += [] if self.lease_until is None else [self.lease_until]
            if self.teardown is not None:
                deadlines += [self.teardown.deadline(), self.say_at]
                deadlines += [self.kill_at] if self.teardown.phase == "kill" else []
            wait_s = min(deadlines) - time.monotonic() if deadlines else None
            # Rounded up: poll(2) takes whole milliseconds, and one that returns ahead of the deadline would be called
            # again and again until then.
            wait_ms = None if wait_s is None else max(0, int(wait_s * 1000) + 1)
            ready = {descriptor for descriptor, _ in self.poller.poll(wait_ms)}
            self._check_lease()  # first: after a freeze nothing may be served that a lapsed lease forbids
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            for pid in [pid for pid, pipe in self.starting.items() if pipe in ready]:
                self._has_started(pid)
            self.warm.look(ready)
            # One order a turn: the lease is checked before each of them.
            if self.control.fileno() in ready and not self._serve_one():
                break
            self._reap()
            self._advance()
        # The agent is gone. Kill again and again: a process may fork during the walk over /proc.
        deadline = time.monotonic() + KILL_S
        self.warm.close()
        while self._has_children() and time.monotonic() < deadline:
            send_all(descendants(os.getpid()), signal.SIGKILL)
            select.select([self.wakeup], [], [], 0.01)
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup, 4096)
            self._reap()

    # ---- orders of the agent

    def _serve_one(self) -> bool:
        """Read and carry out one order. False: the agent is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        for descriptor in fds:  # recv_fds takes a flag for it, and ignores it (CPython 3.11 to 3.13)
            os.set_inheritable(descriptor, False)
        if not data:
            return False
        order = json.loads(data)
        _SERVE[order["op"]](self, order, fds)
        return True

    def _spawn(self, order: dict[str, Any], fds: list[int]) -> None:
        """Fork a worker: from its warm process, or here."""
        # Without a lease nothing is started: an agent that was frozen sends the orders of before, and by now another
        # node may have the ranks.
        if not self.may_spawn:
            for descriptor in fds:
                os.close(descriptor)
            self._say(op="stopped", survivors=[], lapsed=True)
            return
        why_cold = None
        if order["warm"] is not None:
            why_cold = self.warm.fork(order["warm"], order, fds)
            if why_cold is None:
                return
        self._spawn_cold(order, fds, why_cold)

    def _forked(self, order: dict[str, Any], pid: int) -> None:
        self.workers[pid] = order["id"]
        self._say(op="spawned", id=order["id"], pid=pid, warm=True, cold=None)

    def _spawn_cold(self, order: dict[str, Any], fds: list[int], why: str | None) -> None:
        """Fork a worker here. `why`: it was to be forked from a warm process, and was not."""
        argv, env = order["argv"], {**os.environ, **order["env"]}
        try:
            pid = self._fork(fds, lambda parent, pipe: become(parent, pipe, argv, env, order["cwd"], *fds))
        except OSError as error:
            self._say(op="exited", id=order["id"], error=f"{error.strerror}: {argv[0]}")
        else:
            self.workers[pid] = order["id"]
            self.cold[pid] = why

    def _fork(self, fds: list[int], run: Callable[[int, int], None]) -> int:
        """Fork a child that runs a program by `run`, and reports through a pipe if it cannot; meanwhile the next one
        is forked. Closes its output, `fds`, here. Raises OSError."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            pid = fork_child()  # not posix_spawn, which cannot set PR_SET_PDEATHSIG
            if pid == 0:
                run(parent, write_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            for descriptor in (write_end, *fds):
                os.close(descriptor)
        self.starting[pid] = read_end
        self.poller.register(read_end, select.POLLIN)
        return pid

    def _warm(self, order: dict[str, Any], fds: list[int]) -> None:
        self.warm.start(order, {**os.environ, **order["env"]})

    def _cool(self, order: dict[str, Any], fds: list[int]) -> None:
        self.warm.end(order["id"])

    def _run(self, order: dict[str, Any], fds: list[int]) -> None:
        """Fork a user's command, where a worker is."""
        # While workers are stopped it would only be one more to stop. A worker that is no child has ended.
        if not self.may_spawn or self.teardown is not None or order["beside"] not in descendants(os.getpid()):
            for descriptor in fds:
                os.close(descriptor)
            end = {"error": "the worker that it was to run beside has ended"}
            self._say(op="command", id=order["id"], end=end)
            return
        try:
            pid = self._fork(fds, lambda parent, pipe: become_command(parent, pipe, order, *fds))
        except OSError as error:
            self._say(op="command", id=order["id"], end={"error": str(error.strerror)})
        else:
            self.commands[pid] = order["id"]

    def _signal(self, order: dict[str, Any], fds: list[int]) -> None:
        for pid, identity in self.commands.items():
            if identity == order["id"]:
                send_all([pid, *descendants(pid)], order["signal"])

    def _has_started(self, pid: int) -> None:
        """The pipe has closed: by execve, when the program began to run, or after a message why it does not, or as
        which process it runs (`contained.py`)."""
        pipe = self.starting.pop(pid)
        said = os.read(pipe, 4096).decode(errors="replace")
        self.poller.unregister(pipe)
        os.close(pipe)
        why_cold = self.cold.pop(pid, None)
        if pid in self.commands:
            if said:
                self._say(op="command", id=self.commands.pop(pid), end={"error": said})
        elif said and not said.startswith("pid "):
            self._say(op="exited", id=self.workers.pop(pid), error=said)
        else:
            runs_as = int(said.removeprefix("pid ")) if said else pid
            self._say(op="spawned", id=self.workers[pid], pid=runs_as, warm=False, cold=why_cold)

    def _hold(self, order: dict[str, Any], fds: list[int]) -> None:
        """Keep the liveness connection, the fence socket, or the node's lock open; one of each."""
        # The new fence is armed before the old one closes: at no moment is the node without one.
        if order["op"] == "fence":
            arm(fds[0])
        for older in self.held.pop(order["op"], ()):
            os.close(older)
        self.held[order["op"]] = fds

    def _renew(self, order: dict[str, Any], fds: list[int]) -> None:
        # The order names a moment, not a duration: a duration sent to a frozen supervisor would begin when it thaws.
        left_s = max(0.0, order["until"] - time.monotonic())
        self.may_spawn = left_s > 0.0
        self.lease_until = order["until"]
        self.self_fence.arm(left_s + SELF_FENCE_S)
        # Only now, with the timer set: from this word on the controller takes the clock for proof again.
        released, self.grant = self.grant, order["grant"]
        if released is not None and self.grant is None:
            self._say(op="released", grant=released)

    def _stop(self, order: dict[str, Any], fds: list[int]) -> None:
        now = time.monotonic()
        if self.teardown is not None:
            if order["grace_s"] == 0.0:
                self.teardown.hurry(now)
            return
        number, checkpoint_s = order["checkpoint"] or (0, 0.0)
        self.signals = {"checkpoint": number, "ask": order["signal"], "terminate": signal.SIGTERM}
        self.teardown = Teardown.plan(now, order["grace_s"], checkpoint_s)
        for given_up in self.warm.give_up():
            self._say(op="exited", id=given_up["id"], signal=int(signal.SIGKILL), sent=[int(signal.SIGKILL)])
        # At once: a shell ignores SIGTERM, and a recovery must not wait for it.
        for pid in self.commands:
            send_all([pid, *descendants(pid)], signal.SIGKILL)

    def _work_done(self, order: dict[str, Any], fds: list[int]) -> None:
        if self.teardown is not None:
            self._enter(
                self.teardown.advance(time.monotonic(), workers_left=bool(self.workers), work_done=order["phase"])
            )

    # ---- ends

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self.starting:  # it has ended before its pipe was read: report the start first
                self._has_started(ended.si_pid)
            if ended.si_pid not in self.workers:
                self.warm.look_at_forks()
            if ended.si_code == os.CLD_EXITED:
                how, words = {"exit_code": ended.si_status}, f"it exited with code {ended.si_status}"
            else:
                how, words = {"signal": ended.si_status}, f"it was killed by {signal_name(ended.si_status)}"
            self.warm.reaped(ended.si_pid, words)
            command = self.commands.pop(ended.si_pid, None)
            if command is not None:
                self._say(op="command", id=command, end=how)
            worker = self.workers.pop(ended.si_pid, None)
            if worker is not None and not self.lapsed:  # else the lease killed it: one `lapsed` reports all of them
                self._say(op="exited", id=worker, **how, at=time.monotonic(), sent=list(self.sent))

    def _has_children(self) -> bool:
        """Whether anything is left below this process, but for its warm processes."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        # One that has ended and is not reaped yet has not been reported, and `descendants` leaves it out.
        return not self.warm.pids or bool(self.workers or self.commands or self._below())

    def _below(self) -> list[int]:
        """All that the workers are and have started; of a warm process what it forks, and not itself."""
        spared = self.warm.pids
        return [pid for pid in descendants(os.getpid()) if pid not in spared]

    def _check_lease(self) -> None:
        if self.lease_until is None or time.monotonic() < self.lease_until:
            return
        self.lease_until, self.may_spawn = None, False
        # The first kill is here, and not in the next turn of the loop; `_advance` repeats it.
        self.warm.give_up()
        if self._has_children() or self.teardown is not None:
            send_all(self._below(), signal.SIGKILL)
            self.lapsed = True
            self.teardown = self.teardown or Teardown.plan(time.monotonic(), 0.0)
            self.teardown.hurry(time.monotonic())
        self.self_fence.disarm()  # the workers are killed, or there are none

    def _advance(self) -> None:
        """Go on with a teardown, if there is one."""
        if self.teardown is None:
            return
        if not self._has_children():
            self._stopped([])
            return
        now = time.monotonic()
        self._enter(self.teardown.advance(now, workers_left=bool(self.workers)))
        if self.teardown.phase == "kill" and now >= self.kill_at:
            left = self._below()
            self.sent.add(signal.SIGKILL)
            send_all(left, signal.SIGKILL)
            self.kill_at = now + AGAIN_S
            # None left: a worker has ended just now, and the next turn reports it before the stop.
            if self.teardown.over(now) and not (all(map(is_exiting, left)) and self.teardown.extend()):
                self._stopped(left)
        if self.teardown is not None and now >= self.say_at:
            self.say_at = now + SAY_EVERY_S
            if left := self._below()[:MOST_NAMED]:
                ends_in_s = round(max(0.0, self.teardown.deadline() - now), 3)
                self._say(op="phase", phase=self.teardown.phase, left=left, ends_in_s=ends_in_s)

    def _enter(self, phase: Phase | None) -> None:
        """A phase begins: do what it is for."""
        if phase is None:
            return
        self.say_at = self.kill_at = 0.0
        if phase in self.signals:
            self.sent.add(self.signals[phase])  # before it is sent: what ends from now on may have ended by it
        if phase == "terminate":
            self.warm.drop_unknown()
            _ask(self._below(), self.signals[phase])
        elif phase in ("checkpoint", "ask"):
            _ask(list(self.workers), self.signals[phase])

    def _stopped(self, survivors: list[int]) -> None:
        self.teardown = None
        self.sent.clear()
        self._say(op="stopped", survivors=survivors, lapsed=self.lapsed)
        self.lapsed = False

    def _say(self, **message: Any) -> None:
        # This waits where a frozen agent has left the buffer full. A lease that lapses then is ended by the kernel
        # (`self_fence.py`), in the place of this loop.
        with contextlib.suppress(OSError):  # the agent is gone: the next read of the socket ends this process
            self.control.send(json.dumps(message).encode())


_SERVE: dict[str, Callable[[Supervisor, dict[str, Any], list[int]], None]] = {
    "spawn": Supervisor._spawn,
    "warm": Supervisor._warm,
    "cool": Supervisor._cool,
    "run": Supervisor._run,
    "signal": Supervisor._signal,
    "stop": Supervisor._stop,
    "done": Supervisor._work_done,
    "lease": Supervisor._renew,
    "hold": Supervisor._hold,
    "fence": Supervisor._hold,
    "lock": Supervisor._hold,
}


def _ask(pids: list[int], number: int) -> None:
    send_all(pids, number)
    send_all(pids, signal.SIGCONT)  # a stopped one cannot obey


def main() -> None:
    """Serve on the socket whose number the agent passes."""
    become_subreaper()
    control = int(sys.argv[1])
    os.set_inheritable(control, False)  # a worker that held it would hide the end of this process from the agent
    Supervisor(socket.socket(fileno=control)).run()
