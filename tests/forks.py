"""Programs in processes that are forked from one that has imported them, for tests that start a program many times.

Each is a process of its own, with its own arguments, environment, folder and descriptors. Forking saves the imports,
which take most of the processor time of a short program. A test of how a program starts must start an interpreter
instead.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BYTES = 1 << 20


class Forked:
    """A process that was forked for a test. It has those methods of `subprocess.Popen` that the tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid, self.returncode = pid, None  # type: tuple[int, int | None]
        self._forks, self._pidfd = forks, os.pidfd_open(pid)  # until the process is reaped, its pid is not reused

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._wait_ms(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait_ms(None if timeout is None else timeout * 1000)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _wait_ms(self, timeout_ms: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if poller.poll(timeout_ms):
                self.returncode = self._forks.reap(self.pid)
                os.close(self._pidfd)
        return self.returncode


class Forks:
    """A process that has imported a program, and forks on request. `program`: a module, run as by `python -m`;
    `packages`: packages of which all modules are imported; `modules`: further modules to import."""

    def __init__(self, program: str, *, packages: Sequence[str] = (), modules: Sequence[str] = ()) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        imported = json.dumps([program, list(packages), list(modules)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno()), imported],
                cwd=Path(__file__).parents[1],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def start(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], descriptors: tuple[int, int, int]
    ) -> Forked:
        """Start the program with these arguments and standard descriptors."""
        order = json.dumps([list(arguments), str(cwd), dict(env)]).encode()
        with self._turn:
            socket.send_fds(self._link, [order], descriptors)
            return Forked(self, self._answer())

    def reap(self, pid: int) -> int:
        """The exit code of a process that has ended."""
        with self._turn:
            self._link.send(str(pid).encode())
            return self._answer()

    def _answer(self) -> int:
        answer = self._link.recv(_BYTES)
        assert answer, "the process that forks has ended"
        return int(answer)

    def close(self) -> None:
        """End the process that forks. The processes that it has forked go on. May be called any number of times."""
        self._link.close()
        self._process.wait()
        atexit.unregister(self.close)


@functools.cache
def command_line() -> Forks:
    """The process that forks `nvrx-slurm`, shared by all tests of this process."""
    return Forks(
        "nvrx_slurm",
        packages=("nvrx_slurm.api", "nvrx_slurm.cli", "nvrx_slurm.report"),
        modules=(
            "rich.live",
            "rich.table",
            "nvrx_slurm.attribution.analyze.analysis",
            "nvrx_slurm.cluster.slurm",
            "nvrx_slurm.jobspec.load",
            "nvrx_slurm.lab.flow.load",
        ),  # the commands import these when they are called
    )


def run_command(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = 0,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run `nvrx-slurm` to its end, as `subprocess.run` does with its output captured as text."""
    with ThreadPoolExecutor(2) as threads:
        ends, texts = [], []
        for _ in ("stdout", "stderr"):
            reading, writing = os.pipe()
            ends.append(writing)
            texts.append(threads.submit(_read, reading))
        environment = os.environ if env is None else env
        try:
            process = command_line().start(
                arguments, cwd=cwd or Path.cwd(), env=environment, descriptors=(stdin, ends[0], ends[1])
            )
        finally:
            for end in ends:
                os.close(end)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(list(arguments), code, *(text.result(timeout) for text in texts))


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


def _serve(link: socket.socket, program: str) -> None:
    """Fork and reap as ordered, until the other end of the socket is closed."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(link, _BYTES, 3)
        if not order:
            return
        if not descriptors:
            _, status = os.waitpid(int(order), 0)
            link.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        child = os.fork()
        if child == 0:
            link.close()
            _become(program, *json.loads(order), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        link.send(str(child).encode())


def _become(program: str, arguments: list[str], folder: str, env: dict[str, str], descriptors: list[int]) -> None:
    """Run the program as a new interpreter with this command line would."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        sys.argv, sys.orig_argv = [program, *arguments], [sys.executable, "-m", program, *arguments]
        # Both names: a program that replaces one of these streams goes on using its buffer.
        sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        try:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except KeyboardInterrupt:
            traceback.print_exc()
            code = 130
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C it is the test process that ends this one
    program, packages, modules = json.loads(sys.argv[2])
    for package in packages:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    for name in modules:
        importlib.import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])), program)


if __name__ == "__main__":
    main()
