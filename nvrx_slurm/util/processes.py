"""Facts about processes that several parts need: who dies with whom, whether one still lives, how many descriptors
one may hold."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process

PR_SET_PDEATHSIG = 1
# The kernel gives the moment of its boot in whole seconds, and moves it when the wall clock is set (btime).
_CLOCKS_DIFFER_S = 2.0
_STATE, _PARENT, _THREADS, _STARTED = 0, 1, 17, 19  # places in `stat_fields`

# From the batch host to agents: kill your workers now. srun passes on this one and SIGUSR1 alone: at SIGTERM and at
# SIGHUP it kills the agents themselves. Users have both sent once, for workers to save. So to an agent that does not
# leave yet it is an order only where it comes again within `HURRY_WITHIN_S`; the batch host sends it twice.
HURRY, HURRY_AGAIN_S, HURRY_WITHIN_S = signal.SIGUSR2, 0.1, 5.0

# From an agent's starter to the batch host, as an exit code: no agent can run on this node, however often it is
# tried.
CANNOT_RUN = 78

# A signal that comes within so long of the first is the same one: Slurm sends two at the time limit.
AGAIN_S = 1.0

# Where the hard limit is higher still, or there is none, this is enough.
MOST_DESCRIPTORS = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_inherited_descriptors: int | None = None  # the soft limit before this process raised it


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of open descriptors to its hard one: a controller of 10,000 nodes holds 10,000
    connections, and 1,024 is the usual soft limit."""
    global _inherited_descriptors
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        _inherited_descriptors = soft


def restore_descriptor_limit(pid: int = 0) -> None:
    """Give a child (0: this process, itself such a child) the soft limit that this process was started with.

    User programs expect theirs: select(2) fails above 1,024, and some close every possible descriptor.
    """
    if _inherited_descriptors is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_inherited_descriptors, hard))


def dies_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For `preexec_fn`: the kernel sends `number` to the child when this process dies, by any signal."""
    return partial(die_with, os.getpid(), number)


def die_with(parent: int, number: signal.Signals) -> None:
    """The same, said by the child itself: the kernel sends it `number` when `parent`, its parent, dies."""
    _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    # A parent that died before the call above sends nothing any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def is_alive(pid: int, *, started_before: float | None = None) -> bool:
    """Whether a process of this machine runs; a zombie does not.

    `started_before` (seconds since the epoch) excludes a later process that got the same number.
    """
    fields = stat_fields(pid)
    if fields is None or fields[_STATE] in "ZX":
        return False
    with Path("/proc/stat").open() as file:
        booted_at = next(float(line.split()[1]) for line in file if line.startswith("btime "))
    started_at = booted_at + int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return started_before is None or started_at <= started_before + _CLOCKS_DIFFER_S


def started_ticks(pid: int) -> int | None:
    """When a process of this machine began, in the kernel's ticks since boot; None if there is none, or no longer.

    With its id it names one process: another that gets the same id has begun later.
    """
    fields = stat_fields(pid)
    return None if fields is None else int(fields[_STARTED])


def runs(pid: int, began: int) -> bool:
    """Whether a thread of the process of this number that began then (`started_ticks`) can still run. A zombie's
    cannot, unless only its first thread has ended."""
    fields = stat_fields(pid)
    if fields is None or int(fields[_STARTED]) != began:
        return False
    return fields[_STATE] not in "ZX" or int(fields[_THREADS]) > 1


def parent_of(pid: int) -> int | None:
    """The number of a process's parent; 0 where that is outside of this PID namespace."""
    fields = stat_fields(pid)
    return None if fields is None else int(fields[_PARENT])


def process_space() -> str:
    """Where a process id has one meaning: this boot of this machine, and this PID namespace. Empty if unknown."""
    try:
        return f"{boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def boot_id() -> str:
    """Names this boot of this machine: a process id and its ticks mean nothing after the next one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it may not be read, or has none any more."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def hold(pid: int) -> int | None:
    """A pidfd, which goes on to mean this process after its number has passed to another. None before Linux 5.3.

    Raises ProcessLookupError where no process has the number.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        # ENOENT (EINVAL in older kernels): the number is that of a thread of another process.
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ESRCH):
            raise ProcessLookupError(error.errno, error.strerror) from None
        raise


def send_signal(child: Process, number: signal.Signals) -> None:
    """Signal a child that still runs."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            # Not by `Process.send_signal`, which polls first, and may take the exit status from the task that waits.
            os.kill(child.pid, number)


def send(held: int | None, pid: int, number: signal.Signals) -> None:
    """Signal the process that `hold` holds. Raises ProcessLookupError."""
    if held is None:
        os.kill(pid, number)
    else:
        signal.pidfd_send_signal(held, number)


def stat_fields(pid: int) -> list[str] | None:
    """What the kernel reports of a process of this machine; None if it does not exist.

    The fields of /proc/PID/stat from the third on, the state (proc(5)): the name before it may hold anything.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()
