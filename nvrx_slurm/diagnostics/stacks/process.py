"""What /proc says of one process, with the names of the system calls on the two architectures that nodes have.

Nothing here touches the process; what cannot be read is None or empty.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

LONGEST_CMDLINE = 400
MOST_FILES = 64
MOST_THREADS = 512


class ThreadStatus(msgspec.Struct, frozen=True):
    """One thread: its state letter (R, S, D, T, t, Z), and its signal masks, where bit n-1 stands for signal n.

    `pending` counts what waits for this thread and what waits for the whole process.
    """

    tid: int
    state: str
    pending: int
    blocked: int
    caught: int

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie; for the main thread: whether the process is."""
        return self.state in "ZX"


class ProcessState(msgspec.Struct, frozen=True):
    """A moment of a process. `threads` counts all; `waiting`: where they wait, most of them first."""

    pid: int
    name: str
    state: str
    cmdline: str | None
    wchan: str | None
    syscall: str | None
    threads: int
    waiting: tuple[tuple[str, int], ...]
    caught: int
    open_files: tuple[str, ...]
    kernel_stack: str | None

    def catches(self, signum: int) -> bool:
        """Whether the process has a handler of its own for the signal."""
        return has_signal(self.caught, signum)

    def text(self) -> str:
        """All of it as lines for a person, each ending with a newline."""
        lines = [
            f"command  {self.cmdline or _UNREADABLE}",
            f"state    {self.state}, {self.threads} threads",
            f"wchan    {self.wchan or _UNREADABLE}",
            f"syscall  {self.syscall or _UNREADABLE}",
        ]
        lines += [f"threads  {count} x {where}" for where, count in self.waiting]
        lines += [f"file     {target}" for target in self.open_files]
        lines += [f"kernel   {line}" for line in (self.kernel_stack or _UNREADABLE).splitlines()]
        return "".join(f"  {line}\n" for line in lines)


_UNREADABLE = "(not readable)"


def has_signal(mask: int, signum: int) -> bool:
    """Whether a signal mask of /proc holds the signal."""
    return bool(mask >> (signum - 1) & 1)


def describe(pid: int) -> ProcessState | None:
    """The process as it is now, or None if it has ended (a zombie has).

    May block for as long as the process holds its memory map locked in the kernel: call it beside the event loop.
    """
    main = read_task(pid, pid)
    if main is None or main.has_ended:
        return None
    folder = f"/proc/{pid}"
    tids = thread_ids(pid)
    syscall = _read(f"{folder}/syscall")
    return ProcessState(
        pid=pid,
        name=process_name(pid),
        state=main.state,
        wchan=_wchan(folder),
        syscall=describe_syscall(syscall, os.uname().machine) if syscall else None,
        threads=len(tids),
        waiting=tuple(Counter(_waits(pid, tid) for tid in tids[:MOST_THREADS]).most_common()),
        caught=main.caught,
        open_files=tuple(_open_files(pid)),
        kernel_stack=_read(f"{folder}/stack"),
        # Last: it is the one that waits for the lock of the memory map.
        cmdline=_cmdline(folder),
    )


def process_name(pid: int) -> str:
    """The kernel's short name of it, at most 15 characters; empty once it is gone."""
    return _read(f"/proc/{pid}/comm") or ""


def thread_ids(pid: int) -> list[int]:
    """Its threads, the main one first; none once it is gone."""
    try:
        return sorted((int(name) for name in os.listdir(f"/proc/{pid}/task")), key=lambda tid: (tid != pid, tid))  # noqa: PTH208  names only
    except OSError:
        return []


def read_task(pid: int, tid: int) -> ThreadStatus | None:
    """One thread's state and signal masks; None once it is gone."""
    text = _read(f"/proc/{pid}/task/{tid}/status")
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line) if text else {}
    if "SigCgt" not in fields:
        return None
    masks = {key: int(fields[key], 16) for key in ("SigPnd", "ShdPnd", "SigBlk", "SigCgt")}
    return ThreadStatus(
        tid=tid,
        state=fields["State"][0],
        pending=masks["SigPnd"] | masks["ShdPnd"],
        blocked=masks["SigBlk"],
        caught=masks["SigCgt"],
    )


def open_descriptors(pid: int) -> list[int]:
    """The numbers of its open files, ascending; none where they may not be seen."""
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  names only
    except OSError:
        return []


def descriptor_target(pid: int, descriptor: int) -> str | None:
    """What a descriptor leads to. Only the name is read: the file may lie on a file system that does not answer."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115  a name, such as pipe:[7], not a path
    return None


def _open_files(pid: int) -> Iterator[str]:
    descriptors = open_descriptors(pid)
    for descriptor in descriptors[:MOST_FILES]:
        if target := descriptor_target(pid, descriptor):
            yield f"{descriptor} -> {target}"
    if len(descriptors) > MOST_FILES:
        yield f"... and {len(descriptors) - MOST_FILES} more"


def _waits(pid: int, tid: int) -> str:
    folder = f"/proc/{pid}/task/{tid}"
    stat = _read(f"{folder}/stat") or ""
    state = stat.rpartition(")")[2].split()[:1] or ["?"]
    return " ".join([*state, _wchan(folder) or ""]).strip()


def _wchan(folder: str) -> str | None:
    name = _read(f"{folder}/wchan")
    return "none" if name == "0" else name


def _cmdline(folder: str) -> str | None:
    text = _read(f"{folder}/cmdline")
    if text is None:
        return None
    words = text.rstrip("\0").replace("\0", " ").replace("\n", " ")
    return words if len(words) <= LONGEST_CMDLINE else words[:LONGEST_CMDLINE] + " ..."


def _read(path: str) -> str | None:
    """The file's text without its last newline; None if it cannot be read, or is gone."""
    try:
        return Path(path).read_bytes().decode(errors="replace").rstrip("\n")
    except OSError:
        return None


_X86_64 = {
    0: "read",
    1: "write",
    2: "open",
    4: "stat",
    7: "poll",
    9: "mmap",
    11: "munmap",
    16: "ioctl",
    17: "pread64",
    18: "pwrite64",
    19: "readv",
    20: "writev",
    23: "select",
    24: "sched_yield",
    34: "pause",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    44: "sendto",
    45: "recvfrom",
    46: "sendmsg",
    47: "recvmsg",
    56: "clone",
    57: "fork",
    58: "vfork",
    59: "execve",
    61: "wait4",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    82: "rename",
    87: "unlink",
    128: "rt_sigtimedwait",
    130: "rt_sigsuspend",
    202: "futex",
    208: "io_getevents",
    217: "getdents64",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    257: "openat",
    262: "newfstatat",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
    288: "accept4",
    332: "statx",
    426: "io_uring_enter",
    435: "clone3",
}
_AARCH64 = {
    4: "io_getevents",
    22: "epoll_pwait",
    25: "fcntl",
    29: "ioctl",
    32: "flock",
    35: "unlinkat",
    38: "renameat",
    56: "openat",
    61: "getdents64",
    63: "read",
    64: "write",
    65: "readv",
    66: "writev",
    67: "pread64",
    68: "pwrite64",
    72: "pselect6",
    73: "ppoll",
    79: "newfstatat",
    82: "fsync",
    83: "fdatasync",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    124: "sched_yield",
    133: "rt_sigsuspend",
    137: "rt_sigtimedwait",
    202: "accept",
    203: "connect",
    206: "sendto",
    207: "recvfrom",
    211: "sendmsg",
    212: "recvmsg",
    215: "munmap",
    220: "clone",
    221: "execve",
    222: "mmap",
    242: "accept4",
    260: "wait4",
    291: "statx",
    426: "io_uring_enter",
    435: "clone3",
}
_TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def describe_syscall(line: str, machine: str) -> str:
    """What a line of /proc/PID/syscall says, on a `machine` as os.uname names it; an unknown call stays as it is."""
    first, _, rest = line.strip().partition(" ")
    if first == "-1":
        return "none (blocked in the kernel)"
    name = _TABLES.get(machine, {}).get(int(first)) if first.isdigit() else None
    if name is None:
        return line.strip()
    arguments = rest.split()[:-2]  # the last two are the stack pointer and the program counter
    return f"{name}({', '.join(arguments)})"
