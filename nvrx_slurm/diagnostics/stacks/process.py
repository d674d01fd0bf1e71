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
    open_files: tuple[str, ...]
    kernel_stack: str | None

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


# System call → its number on x86_64 and on aarch64; None: that one does not have it.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "stat": (4, None),
    "poll": (7, None),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "ioctl": (16, 29),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "select": (23, None),
    "sched_yield": (24, 124),
    "pause": (34, None),
    "nanosleep": (35, 101),
    "connect": (42, 203),
    "accept": (43, 202),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "wait4": (61, 260),
    "fcntl": (72, 25),
    "flock": (73, 32),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "rename": (82, None),
    "unlink": (87, None),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "futex": (202, 98),
    "io_getevents": (208, 4),
    "getdents64": (217, 61),
    "clock_nanosleep": (230, 115),
    "epoll_wait": (232, None),
    "waitid": (247, 95),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "epoll_pwait": (281, 22),
    "accept4": (288, 242),
    "statx": (332, 291),
    "io_uring_enter": (426, 426),
    "clone3": (435, 435),
    "unlinkat": (None, 35),
    "renameat": (None, 38),
}
_NAMES = {
    (machine, number): name
    for name, numbers in _NUMBERS.items()
    for machine, number in zip(("x86_64", "aarch64"), numbers, strict=True)
}


def describe_syscall(line: str, machine: str) -> str:
    """What a line of /proc/PID/syscall says, on a `machine` as os.uname names it; an unknown call stays as it is."""
    first, _, rest = line.strip().partition(" ")
    if first == "-1":
        return "none (blocked in the kernel)"
    name = _NAMES.get((machine, int(first))) if first.isdigit() else None
    if name is None:
        return line.strip()
    arguments = rest.split()[:-2]  # the last two are the stack pointer and the program counter
    return f"{name}({', '.join(arguments)})"
