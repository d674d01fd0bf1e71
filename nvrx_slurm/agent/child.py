"""What the supervisor's children do before they are the programs that they are for. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from typing import Any

PR_SET_PDEATHSIG = 1

# The supervisor has handlers for these, in Python.
HANDLED = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)

_libc = ctypes.CDLL(None, use_errno=True)


def fork_child() -> int:
    """As os.fork; but a signal for the child does what it does to its program, from the first moment on.

    With the supervisor's handlers it would be lost: until execve(2) they only note it, for Python code that the child
    never runs. A worker that is stopped while it starts would live until the kill.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            # CPython ignores SIGPIPE, and a signal that is ignored stays so across execve (signal(7)).
            for number in (*HANDLED, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def find_program(program: str, path: str) -> str:
    """The program as execvp(3) would find it. Raises FileNotFoundError."""
    if "/" in program:
        return program
    for folder in path.split(os.pathsep):
        candidate = f"{folder}/{program}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "No such program (looked on PATH)", program)


def become(parent: int, pipe: int, argv: list[str], env: dict[str, str], cwd: str, *out: int) -> None:
    """In the child: run the worker's program, or write into `pipe` why not. Does not return."""
    what = cwd
    try:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the supervisor died before the line above: no signal will come
            os._exit(1)
        # Only now: a folder on a dead file system, this one or one on PATH, may hold this process up for ever.
        os.chdir(cwd)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in zip((null, *out), (0, 1, 2), strict=True):
            os.dup2(source, target)
        what = argv[0]
        what = program = find_program(argv[0], env.get("PATH", os.defpath))
        if "NVRX_START_FD" in env:  # a worker in a container: `container.py` reports, and closes the pipe, itself
            os.set_inheritable(pipe, True)
            env["NVRX_START_FD"] = str(pipe)
        os.execve(program, argv, env)
    except OSError as error:
        os.write(pipe, f"{error.strerror}: {what}".encode())
    finally:
        # Whatever was raised: a return would run the supervisor's loop a second time, on the same sockets.
        os._exit(127)


class Place:
    """Where a worker is: its folder, and, if it is in a container, its namespaces, root and environment.

    Opened before any of them is entered, since /proc is another one inside. Raises OSError; a worker's file system
    that is dead holds the caller up.
    """

    def __init__(self, pid: int) -> None:
        self.env: dict[str, str] | None = None
        self.namespaces: list[int] = []
        self.folders = [os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("root", "cwd")]
        if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):  # noqa: PTH115  as above
            return
        for name in ("user", "mnt"):  # in this order: the first gives the right to enter the second
            path = f"/proc/{pid}/ns/{name}"
            if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}"):  # noqa: PTH115  as above
                self.namespaces.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123  as above
            pairs = (each.partition(b"=") for each in file.read().split(b"\0") if each)
            self.env = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}

    def enter(self) -> None:
        root, cwd = self.folders
        for namespace in self.namespaces:
            if _libc.setns(namespace, 0) != 0:
                raise OSError(ctypes.get_errno(), "the worker's container cannot be entered")
        if self.namespaces:
            os.fchdir(root)
            os.chroot(".")
        os.fchdir(cwd)


def become_command(parent: int, pipe: int, order: dict[str, Any], *out: int) -> None:
    """In the child: run a user's command where the worker is, or write into `pipe` why not. Does not return."""
    argv = order["argv"]
    what = "the worker that it was to run beside"
    try:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        place = Place(order["beside"])
        # In a container the worker has its image's environment, with what this node has set.
        outer = os.environ if place.env is None else place.env
        env = {name: value for name, value in outer.items() if name not in order["without"]} | order["env"]
        null = os.open(os.devnull, os.O_RDONLY)
        place.enter()
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # once more: new credentials clear it
        if os.getppid() not in (parent, 0):  # the supervisor died before the line above: no signal will come
            os._exit(1)
        for source, target in zip((null, *out), (0, 1, 2), strict=True):
            os.dup2(source, target)
        what = argv[0]
        what = program = find_program(argv[0], env.get("PATH", os.defpath))
        os.execve(program, argv, env)
    except OSError as error:
        os.write(pipe, f"{error.strerror}: {what}".encode())
    finally:
        os._exit(127)
