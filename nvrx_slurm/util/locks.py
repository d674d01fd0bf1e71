"""A lock that processes share through a file; standard library only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvrx_slurm.util.clock import Clock

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1
_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float, clock: Clock) -> Iterator[bool]:
    """Hold the file's lock, against other processes and other threads; it goes with its holder's life.

    Yields False where the file system knows no locks (Lustre mounted without `flock`): then the lock keeps no
    process out. `flock` locks on NFS too, since Linux 2.6.12, where a server grants them. Raises TimeoutError after
    `timeout_s` seconds, and OSError. A file system that hangs keeps its caller for longer than that: see
    `threads.in_thread`.
    """
    # O_NOFOLLOW: by a link in a folder that others can write to, it would make a file wherever this user may.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    is_held = False
    deadline, pause_s = clock.monotonic() + timeout_s, FIRST_PAUSE_S
    try:
        while not is_held:
            # Asked repeatedly: only a signal ends a flock(2) that waits, and only the main thread handles signals.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except OSError as error:
                if error.errno in _NO_LOCKS_HERE:
                    break
                if error.errno not in _HELD:
                    raise
                if clock.monotonic() + pause_s > deadline:
                    raise TimeoutError(f"{path} has been locked by another process for {timeout_s:g} s") from None
                clock.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        yield is_held
    finally:
        with contextlib.suppress(OSError):  # where there are no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(descriptor)
