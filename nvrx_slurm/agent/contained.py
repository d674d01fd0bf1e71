"""The process between the supervisor and a worker that podman or apptainer runs. Standard library only.

podman leaves its container to conmon, a daemon; apptainer stays as the worker's parent, and the worker outlives it.
For the supervisor this process is the worker:

    supervisor ── this process ─┬─ podman start              supervisor ── this process ── apptainer ── worker
                                └─ conmon ── worker

- It is a child subreaper, so that conmon, which detaches itself, becomes its child; the supervisor's kill finds the
  worker among its descendants.
- It passes signals on: to apptainer, which does the same, and to podman's worker itself.
- It ends as the worker has ended. podman gives a death by SIGKILL as exit code 137: this process dies by SIGKILL.
- Where this process is killed, the kernel kills the worker: that owns the read end of a pipe (F_SETOWN, F_SETSIG),
  and the write end closes with this process. So it dies with the supervisor, as any worker does.
"""

# ruff: noqa: PTH108, PTH120, PTH123  a process for each worker: no import of pathlib
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from nvrx_slurm.agent.container import Launch

F_SETSIG = 10
PR_SET_CHILD_SUBREAPER = 36
# How often the file with the worker's process id is looked for while podman starts the worker: conmon renames
# a finished file to that name, and inotify is no part of the standard library.
LOOK_EVERY_S = 0.01

# How often the name of conmon's exit file is looked for; a conmon of other options names none.
EXIT_FILE_LOOKS = 1000

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")

REMOVE_S = 15.0

# How podman says that it could not remove the container whose name `--replace` takes.
CANNOT_REPLACE = b"cannot remove container"

# With systemd's a container of a user leaves the cgroup of its Slurm job, and with it the job's limits.
IN_OUR_CGROUP = ("--cgroup-manager=cgroupfs",)


def podman_options(launch: Launch, *, rootfs_path: str | None, name: str, pid_file: str) -> list[str]:
    """The options of `podman create`. Values of variables stay in the environment; the host's others come below the
    image's own, `own` above them."""
    rootless = os.geteuid() != 0
    devices = [path for path in ("/dev/infiniband", "/dev/kfd", "/dev/dri") if os.path.exists(path)]
    if os.path.exists("/dev/nvidiactl") and any(os.path.isdir(path) for path in ("/etc/cdi", "/var/run/cdi")):
        devices.append("nvidia.com/gpu=all")
    return [
        *("--rm", "--replace", f"--name={name}", f"--pidfile={pid_file}"),
        # Process ids as the host's: the agent asks workers for stacks by them, and rings prove owners by them.
        *("--network=host", "--pid=host", "--ipc=host", "--uts=host"),
        *(["--userns=keep-id"] if rootless else []),
        *("--security-opt=label=disable", "--log-driver=passthrough", "--entrypoint="),
        *(f"--device={device}" for device in devices),
        *(f"--volume={':'.join(mount)}" for mount in launch.mounts),
        "--env-host",
        *(f"--env={each}" for each in launch.own),
        *([] if "PATH" in launch.own or rootfs_path is None else [f"--env=PATH={rootfs_path}"]),
        f"--workdir={launch.inside}",
    ]


class Contained:
    """A container from its start to its end. `pipe`: where the supervisor learns which process runs, or why none
    does; `pid_file`: where podman writes the worker's process id."""

    def __init__(self, pipe: int, pid_file: str | None = None) -> None:
        self._pipe, self._pid_file = pipe, pid_file
        self._pid: int | None = None
        self._worker: int | None = None  # a descriptor that is readable once podman's worker has ended
        self._exit_file: str | None = None
        self._looks_left = 0  # for the exit file's name
        self._early: list[int] = []  # signals that came before there was a worker
        self._guard, self._tied = os.pipe2(os.O_CLOEXEC)  # read and write end
        self._wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        # Handlers, though empty: CPython writes only signals that have one into the wakeup descriptor.
        for number in (signal.SIGCHLD, *(signal.Signals[each] for each in PASSED_ON)):
            signal.signal(number, lambda *_: None)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, program: str, argv: list[str], env: Mapping[str, str]) -> NoReturn:
        """Start the runtime's command, serve it, and end as it ends. `program`: of the worker."""
        os.set_inheritable(self._guard, True)  # the client must hold it a moment longer than this process lives
        client = os.posix_spawn(argv[0], argv, dict(env))
        os.set_inheritable(self._guard, False)
        if self._pid_file is None:
            self._tie(client, -os.getpgrp())  # the group that the supervisor has made for this process
        code = None
        while code is None:
            watched = [self._wakeup] if self._worker is None else [self._wakeup, self._worker]
            # No timeout while the worker runs.
            is_waited_for = self._pid is None or self._looks_left > 0
            is_waited_for |= self._exit_file is not None and self._worker is None
            ready, _, _ = select.select(watched, [], [], LOOK_EVERY_S if is_waited_for else None)
            if self._worker in ready:
                self._worker = None  # it has ended
            self._signals()
            self._find()  # it may have ended at once: look again, also when podman has ended
            self._find_exit_file()
            status = self._ended(client)
            code = self._written() if status is None else os.waitstatus_to_exitcode(status)
        if self._pid is None:
            why = f"podman start: {program} did not start (exit code {code}); podman's reason is in this rank's log"
            os.write(self._pipe, why.encode())
            os._exit(127)
        if code < 0 and self._pid != client:
            self._send(signal.SIGKILL)  # podman was killed, and with it what ties the worker to this process
        fcntl.fcntl(self._guard, fcntl.F_SETOWN, 0)  # what the worker has left lives on until the teardown
        code = 128 - code if code < 0 else code
        if code > 128 and code - 128 in signal.valid_signals():
            # No core file of this process, which dies as the worker did: it could replace the worker's own.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with contextlib.suppress(OSError):  # of SIGKILL none can be set
                signal.signal(code - 128, signal.SIG_DFL)
            os.kill(os.getpid(), code - 128)
        os._exit(code)

    def _find(self) -> None:
        if self._pid is None and self._pid_file is not None:
            with contextlib.suppress(FileNotFoundError, ValueError), open(self._pid_file, "rb") as file:
                pid = int(file.read())
                with contextlib.suppress(OSError):  # it has ended by now
                    self._worker = os.pidfd_open(pid)
                    self._looks_left = EXIT_FILE_LOOKS
                self._tie(pid, pid)

    def _find_exit_file(self) -> None:
        """Its name is in the arguments of conmon, which is the worker's parent only once crun has set it up."""
        if self._looks_left > 0 and self._pid is not None:
            self._looks_left -= 1
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._exit_file = exit_file(self._pid)
                self._looks_left = 0

    def _written(self) -> int | None:
        """The exit code that conmon has written."""
        # Not podman's own end, which comes 0.3 s later: by then the worker's peers have failed too, and the first to
        # fail would be taken for one of them.
        if self._worker is None and self._exit_file is not None:
            with contextlib.suppress(FileNotFoundError, ValueError), open(self._exit_file, "rb") as file:
                return int(file.read())
        return None

    def _tie(self, pid: int, owner: int) -> None:
        """The worker runs, as process `pid`: `owner` dies with this process from now on."""
        self._pid = pid
        with contextlib.suppress(ProcessLookupError):  # it has ended
            fcntl.fcntl(self._guard, fcntl.F_SETOWN, owner)
        fcntl.fcntl(self._guard, F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(self._guard, fcntl.F_SETFL, os.O_ASYNC)
        os.write(self._pipe, f"pid {pid}".encode())
        os.close(self._pipe)
        for number in self._early:
            self._send(number)

    def _signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wakeup, 4096):
                if number != signal.SIGCHLD:
                    self._send(number) if self._pid is not None else self._early.append(number)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid or 0, number)

    @staticmethod
    def _ended(client: int) -> int | None:
        """The status of podman's client once it has ended. conmon and what the worker left are reaped too."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                found = status if pid == client else found
        return found


def exit_file(pid: int) -> str:
    """Where conmon, the worker's parent, writes its exit code. Raises OSError, ValueError, IndexError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        parent = int(file.read().rpartition(b")")[2].split()[1])
    with open(f"/proc/{parent}/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
    return f"{words[words.index('--exit-dir') + 1]}/{words[words.index('-c') + 1]}"


def create(podman: str, options: Sequence[str], image: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Have podman make the container. Returns why it cannot: it has no such image, say."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    argv = [podman, *IN_OUR_CGROUP, "create", *options, *image]
    for is_last in (False, True):
        read, write = os.pipe2(os.O_CLOEXEC)
        streams = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, write, 2)]
        child = os.posix_spawn(podman, argv, dict(env), file_actions=streams)
        os.close(write)
        said = b""
        while chunk := os.read(read, 65536):
            said = (said + chunk)[-65536:]
        os.close(read)
        _, status = os.waitpid(child, 0)
        # The container of the cycle before, where its conmon was killed a moment ago: podman waits 5 s in vain for
        # conmon's exit file and gives up. From then on it takes that container for stopped, and can replace it.
        if status == 0 or is_last or CANNOT_REPLACE not in said:
            break
    if status == 0:
        return None
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return f"podman create: {lines[-1].removeprefix('Error: ')}" if lines else f"podman create failed ({status})"


def serve_podman(launch: Launch, *, label: str, path: str, pipe: int) -> NoReturn:
    """Run the worker to its end. `path`: its PATH, unless the image sets one."""
    podman, image, command, env = launch.program, launch.image, launch.command, launch.env
    pid_file = f"{os.path.dirname(env['NVRX_BEAT_SOCKET'])}/{label}.pid"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pid_file)  # of the cycle before
    if not os.path.isdir(env.get("XDG_RUNTIME_DIR", "/")):
        del env["XDG_RUNTIME_DIR"]  # the login node's, which sbatch has passed on; podman then takes one in /tmp
    is_folder = image.startswith("/")
    options = podman_options(launch, rootfs_path=path if is_folder else None, name=label, pid_file=pid_file)
    what = [*(["--rootfs", f"{image}:O"] if is_folder else [image]), *command]
    # podman's own helpers are on this PATH too.
    problem = create(podman, options, what, {**env, "PATH": f"{path}:{env.get('PATH', '')}"})
    if problem is not None:
        os.write(pipe, problem.encode()[:4096])
        os._exit(127)
    start = [podman, *IN_OUR_CGROUP, "start", "--attach", "--sig-proxy=false", label]
    Contained(pipe, pid_file).run(command[0], start, env)


def remove_left(podman: str, prefix: str) -> None:
    """Remove containers that were killed together with their conmon: podman still takes them for running."""
    import subprocess  # only the agent calls this

    base = [podman, *IN_OUR_CGROUP]
    # The first removal may fail where conmon was killed a moment ago, as in `create`.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for _ in range(2):
            listing = [*base, "ps", "--all", "--quiet", f"--filter=name=^{prefix}"]
            found = subprocess.run(
                listing, capture_output=True, text=True, timeout=REMOVE_S, check=False
            ).stdout.split()
            if not found:
                break
            remove = [*base, "rm", "--force", "--ignore", *found]
            subprocess.run(remove, capture_output=True, timeout=REMOVE_S, check=False)
