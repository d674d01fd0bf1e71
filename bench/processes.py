"""Processes that a benchmark starts: every one of them, and all their descendants, are gone when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nvrx_slurm.agent.supervisor import become_subreaper, descendants, send_all
from nvrx_slurm.jobspec import env

ESTABLISHED = "01"
"""The state's number in /proc/net/tcp (linux/include/net/tcp_states.h)."""


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Kill every descendant of this process at the end, also of an interrupted benchmark.

    Whoever loses its parent becomes a child of this process, so none gets away.
    """
    become_subreaper()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        while left := descendants(os.getpid()):
            send_all(left, signal.SIGKILL)
            reap()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def reap() -> None:
    """Take one orphan's exit, or find that there is none."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)


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


def end(process: subprocess.Popen[bytes], *, polite_s: float = 0.0) -> None:
    """End a child and all below it, and take its exit. With `polite_s` it is asked first, so that it can clear up."""
    if polite_s:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(polite_s)
    if process.poll() is None:
        kill_tree(process.pid)
        process.wait()


def kill_tree(root: int) -> None:
    """SIGKILL to a process and all its descendants; stopped first, so that none can act on another's death."""
    everybody = [root, *descendants(root)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        send_all(everybody, number)


def parent_of(pid: int) -> int:
    """The process's parent. Raises ProcessLookupError when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None


def ancestor_below(pid: int, top: int) -> int:
    """The ancestor of `pid` (or itself) whose parent is `top`. Raises ProcessLookupError when there is none."""
    while (parent := parent_of(pid)) != top:
        pid = parent
        if pid <= 1:
            raise ProcessLookupError(f"process {top} is no ancestor")
    return pid


def is_connected(pid: int, port: int) -> bool:
    """Whether a process has an established TCP connection (IPv4 or IPv6) to this port."""
    remote = f":{port:04X}"
    inodes = set[str]()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[2].endswith(remote) and row[3] == ESTABLISHED}
        return any(link.readlink().name in {f"socket:[{i}]" for i in inodes} for link in _descriptors(pid))
    return False


def _descriptors(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/fd").iterdir())
