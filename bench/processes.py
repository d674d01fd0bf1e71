"""Processes that a benchmark starts: every one of them, and all their descendants, are gone when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchTimeout, PeerFailed, PeerMissing
from nvrx_slurm.agent.supervisor import become_subreaper, descendants, send_all
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.lab.faults.node import kill_local_node
from nvrx_slurm.util.processes import dies_with_parent, parent_of

ROOT = Path(__file__).parent.parent
LOOK_AGAIN_S = 0.01
ANSWER_S = 240.0
"""How long a child may take for one answer: it may import torch in eight workers first."""

_HAS_ALL = (
    "import sys; from importlib.util import find_spec; sys.exit(not all(find_spec(name) for name in sys.argv[1:]))"
)
ESTABLISHED = "01"
"""The state's number in /proc/net/tcp (linux/include/net/tcp_states.h)."""


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Kill every descendant of this process at the end, also of an interrupted benchmark."""
    # A process that loses its parent becomes a child of this one, so none gets away.
    become_subreaper()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        while left := descendants(os.getpid()):
            send_all(left, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # one orphan's exit, or there is none
                os.waitpid(-1, 0)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for one measurement, removed after it."""
    with tempfile.TemporaryDirectory(prefix="nvrx-bench-") as folder:
        yield Path(folder)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Raises BenchTimeout where `what` has not happened in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchTimeout(f"{what} did not come in {timeout_s:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def interpreter(needs: Sequence[str], peers: Path) -> Path:
    """The peers' Python, else this one: the first that can import all that is needed. Raises PeerMissing."""
    for python in ((peers / "python").absolute(), Path(sys.executable)):
        if python.exists() and subprocess.run([python, "-c", _HAS_ALL, *needs], check=False).returncode == 0:
            return python
    raise PeerMissing(f"no {' and '.join(needs)} in {peers} nor in {sys.prefix} (bench/README.md)")


def start(
    argv: Sequence[str], *, log: Path, extra: Mapping[str, str] | None = None, given: bytes | None = None
) -> subprocess.Popen[bytes]:
    """Start a child with `given` as its standard input and its output appended to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env.child_environment(extra or {}),
            start_new_session=True,
        )
    if given is not None:
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
    return process


def start_job(plan: Plan, job_id: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a local job, as `nvrx-slurm run` does. Returns its batch host."""
    argv = [sys.executable, "-m", "nvrx_slurm.batch", "--cluster", "local"]
    return start(argv, log=log, extra={"NVRX_JOB_ID": job_id}, given=plan_to_json(plan))


class JsonChild:
    """A child that answers each line of JSON with one. Its errors go to `log`, or to this process's own."""

    def __init__(
        self, name: str, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._name, self._log = name, log
        with log.open("ab") if log else contextlib.nullcontext() as errors:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=env.child_environment({"PYTHONPATH": str(ROOT), **(environment or {})}),
                preexec_fn=dies_with_parent(signal.SIGKILL),
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def ask(self, order: Any) -> Any:
        self.order(order)
        return self.answer()

    def order(self, order: Any) -> None:
        self._stdin.write(f"{json.dumps(order)}\n".encode())

    def answer(self) -> Any:
        """Raises BenchTimeout, and PeerFailed where the process has ended."""
        said, deadline = bytearray(), time.monotonic() + ANSWER_S
        while not said.endswith(b"\n"):
            if not select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BenchTimeout(f"{self._name}: no answer in {ANSWER_S:.0f} s; {self._said()}")
            if not (more := self._stdout.read(1 << 16)):
                raise PeerFailed(f"{self._name} has ended; {self._said()}")
            said += more
        return json.loads(said)

    def _said(self) -> str:
        return f"its log ends with:\n{self._log.read_text(errors='replace')[-2000:]}" if self._log else "see above"

    def finish(self) -> Any:
        """End its orders, and take the last line that it then answers with."""
        self._stdin.close()
        return self.answer()

    def end(self) -> None:
        """With the end of its orders it ends by itself, and removes what it has made."""
        self._stdin.close()
        try:
            self._process.wait(ANSWER_S / 10)
        except subprocess.TimeoutExpired:
            kill_local_node(self._process.pid)
            self._process.wait()
        self._stdout.close()


def end(process: subprocess.Popen[bytes], *, polite_s: float = 0.0) -> None:
    """End a child and all below it, and take its exit. With `polite_s` it is asked first, so that it can clear up."""
    if polite_s:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(polite_s)
    if process.poll() is None:
        kill_local_node(process.pid)
        process.wait()


def ancestor_below(pid: int, top: int) -> int:
    """The ancestor of `pid` (or itself) whose parent is `top`. Raises ProcessLookupError when there is none."""
    while (parent := parent_of(pid)) != top:
        if parent is None or parent <= 1:
            raise ProcessLookupError(f"process {top} is no ancestor of {pid}, or it is gone")
        pid = parent
    return pid


def is_connected(pid: int, port: int) -> bool:
    """Whether a process has an established TCP connection (IPv4 or IPv6) to this port."""
    remote = f":{port:04X}"
    inodes = set[str]()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[2].endswith(remote) and row[3] == ESTABLISHED}
        sockets = {f"socket:[{inode}]" for inode in inodes}
        return any(link.readlink().name in sockets for link in Path(f"/proc/{pid}/fd").iterdir())
    return False
