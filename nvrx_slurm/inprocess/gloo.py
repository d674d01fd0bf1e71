"""How a thread that is stuck in a Gloo collective is freed: by cutting this process's own connections.

Gloo has no way to abort. What ends a collective is its timeout (half an hour), or the end of a connection: it takes
that for a peer that is gone, and raises. So each connection is shut down, as its peer's death would do; the file
descriptor stays Gloo's, which closes it. Its listening sockets are left alone: an error on one ends the process.

Which sockets are Gloo's: those that its loops wait for. Each loop is a thread named `gloo_tcp_loop`, and nearly all
the time in epoll_wait, whose first argument is the file descriptor of the loop's set. Seen in torch 2.13; source:
gloo/transport/tcp/{loop,pair,listener}.cc, proc_pid_syscall(5), proc_pid_fdinfo(5).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_LOOP = "gloo_tcp_loop"
_LOOKS = 1000
"""A loop that handles an event is back in epoll_wait after some microseconds: so often it is looked at."""


def cut() -> int | None:
    """Shut down all Gloo connections of this process, from any thread. Returns how many; None if Gloo was not found.

    Whoever waits for one of them gets a RuntimeError from Gloo within milliseconds. Takes a few milliseconds itself.
    """
    watched = [found for loop in _loops() if (found := _watched(loop))]
    return sum(itertools.starmap(_shut_down, itertools.chain(*watched))) if watched else None


def _loops() -> Iterator[Path]:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().strip() == _LOOP:
                yield thread


def _watched(loop: Path) -> list[tuple[int, int]]:
    """The file descriptors that a loop waits for, each with its inode."""
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):  # the thread has ended, or the kernel keeps no record of system calls
            call = (loop / "syscall").read_text().split()
            if len(call) > 1 and (found := _members(int(call[1], 16))):
                return found
    return []


def _members(epoll: int) -> list[tuple[int, int]]:
    """The members of an epoll set; none if the file descriptor is none of a set. The kernel writes a line for each:
    `tfd:       20 events:       19 data:     55dc37a95a60  pos:0 ino:a24d9d sdev:9`."""
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return []
    words = (line.replace(":", ": ").split() for line in lines if line.startswith("tfd:"))
    return [(int(word[1]), int(word[word.index("ino:") + 1], 16)) for word in words]


def _shut_down(number: int, inode: int) -> bool:
    """Whether this was a connection. A number that means another file by now is left alone."""
    try:
        kept = os.dup(number)
    except OSError:
        return False
    status = os.fstat(kept)
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
        os.close(kept)
        return False
    with socket.socket(fileno=kept) as connection:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        with contextlib.suppress(OSError):  # not connected yet, or no more
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
