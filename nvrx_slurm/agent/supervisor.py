"""The node's little init: parent of every worker, so that none outlives the agent.

Run by the agent as `python -S supervisor.py <socket fd>`; standard library only, single-threaded, a few MiB. It is a
child subreaper: whatever a worker leaves behind (double forks, sessions of their own) becomes its child. It ends when
the agent's end of the socket closes, by whatever signal the agent died, and not before its last descendant is dead.
Since it also holds the agent's tether open, the controller sees the tether break only then. If this process itself is
killed, its children fall to the agent, which is a subreaper too and kills them (`workers.py`).

Messages are JSON, one per SOCK_SEQPACKET datagram:

    agent → supervisor   {"op": "spawn", "id", "argv", "env", "cwd"} + [stdout fd, stderr fd]
                         {"op": "stop", "signal", "grace_s"}     ask, then kill, all descendants
                         {"op": "hold"} + [tether fd]
    supervisor → agent   {"op": "spawned", "id", "pid"}
                         {"op": "exited", "id", "code" | "signal" | "error"}
                         {"op": "stopped", "survivors": [pid, …]}    no worker is left
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 4 << 20
SURVIVOR_S = 5.0
"""How long after SIGKILL a process may linger before it is reported: it is in uninterruptible sleep (D)."""


def become_subreaper() -> None:
    """Let orphaned descendants of this process become its children (Linux ≥ 3.4, prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Every living process below `root`, zombies left out. From one walk over /proc: a snapshot, so repeat it."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  names only, and no import of pathlib
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123  as above
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents.setdefault(int(parent), []).append(int(name))
    found, queue = [], [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def send_all(pids: list[int], number: int) -> None:
    """Signal processes; one that is gone is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Supervisor:
    """Owns the workers. One loop: the socket, SIGCHLD (through the wakeup descriptor), and one deadline."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.workers: dict[int, int] = {}  # pid → id
        self.held: int | None = None
        self.stop_deadline: float | None = None  # asked to end; at the deadline: SIGKILL
        self.kill_deadline: float | None = None  # killed; at the deadline: report survivors
        self.wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            # Handlers, not SIG_IGN: workers must not inherit it. Slurm signals every process of a step; only the
            # agent decides what follows.
            signal.signal(number, lambda *_: None)

    def run(self) -> None:
        """Serve until the agent is gone; then leave nobody behind."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.wakeup, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll(self._timeout_ms()):
                if descriptor == self.wakeup:
                    os.read(self.wakeup, 4096)
                elif not self._serve_one():
                    return self._end_everything()
            self._reap()
            self._advance()

    def _timeout_ms(self) -> int | None:
        deadline = self.kill_deadline or self.stop_deadline
        return None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)

    # ---- orders of the agent

    def _serve_one(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return False
        if not data:
            return False
        order = json.loads(data)
        if order["op"] == "spawn":
            self._spawn(order, fds)
        elif order["op"] == "hold":
            self._hold(fds[0])
        elif order["op"] == "stop":
            self._ask(order["signal"], order["grace_s"])
        return True

    def _spawn(self, order: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = self._start(order["argv"], {**os.environ, **order["env"]}, order["cwd"], *fds)
        except OSError as error:
            self._say(
                op="exited", id=order["id"], error=f"{error.strerror or error}: {error.filename or order['argv'][0]}"
            )
        else:
            self.workers[pid] = order["id"]
            self._say(op="spawned", id=order["id"], pid=pid)
        finally:
            for descriptor in fds:
                os.close(descriptor)

    @staticmethod
    def _start(argv: list[str], env: dict[str, str], cwd: str, stdout: int, stderr: int) -> int:
        os.chdir(cwd)  # posix_spawn has no cwd; all workers share one, and this process needs none
        program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
        if program is None:
            raise FileNotFoundError(2, "No such program (looked on PATH)", argv[0])
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, stdout, 1),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
        ]
        return os.posix_spawn(program, argv, env, file_actions=actions, setsid=True, setsigdef=[signal.SIGPIPE])

    def _hold(self, descriptor: int) -> None:
        if self.held is not None:
            os.close(self.held)
        self.held = descriptor

    # ---- ends

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if ended is None:
                return
            worker = self.workers.pop(ended.si_pid, None)
            if worker is not None:
                how = "code" if ended.si_code == os.CLD_EXITED else "signal"
                self._say(op="exited", id=worker, **{how: ended.si_status})

    def _has_children(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _ask(self, number: int, grace_s: float) -> None:
        if self._has_children():
            everybody = descendants(os.getpid())
            send_all(everybody, number)
            send_all(everybody, signal.SIGCONT)  # a stopped one cannot obey
        self.stop_deadline = time.monotonic() + grace_s

    def _advance(self) -> None:
        """Go on with a stop that was asked for."""
        if self.stop_deadline is None:
            return
        now = time.monotonic()
        if not self._has_children():
            self._stopped([])
        elif self.kill_deadline is None and now >= self.stop_deadline:
            send_all(descendants(os.getpid()), signal.SIGKILL)
            self.kill_deadline = now + SURVIVOR_S
        elif self.kill_deadline is not None:
            left = descendants(os.getpid())
            send_all(left, signal.SIGKILL)  # again: a process may have forked while we walked
            if now >= self.kill_deadline:
                self._stopped(left)

    def _stopped(self, survivors: list[int]) -> None:
        self.stop_deadline = self.kill_deadline = None
        self._say(op="stopped", survivors=survivors)

    def _end_everything(self) -> None:
        deadline = time.monotonic() + SURVIVOR_S
        while self._has_children() and time.monotonic() < deadline:
            send_all(descendants(os.getpid()), signal.SIGKILL)
            select.select([self.wakeup], [], [], 0.01)
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup, 4096)
            self._reap()

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: the next read tells, and ends us
            self.control.send(json.dumps(message).encode())


def main() -> None:
    """Take the socket that the agent left open for us, and serve."""
    become_subreaper()
    control = int(sys.argv[1])
    os.set_inheritable(control, False)  # a worker that held it would hide the end of this process from the agent
    Supervisor(socket.socket(fileno=control)).run()


if __name__ == "__main__":
    main()
