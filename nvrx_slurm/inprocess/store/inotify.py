"""Waiting for a change of a file, or in a folder, by inotify(7)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select

IN_MODIFY, IN_MOVED_TO = 0x002, 0x080
EVENTS_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """One file or folder. Where the kernel has no watch left (fs.inotify.max_user_instances), a wait just passes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._inotify = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify >= 0:
            _libc.inotify_add_watch(self._inotify, os.fsencode(path), IN_MODIFY | IN_MOVED_TO)
            self._poll.register(self._inotify, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until there was a write or a rename since the last wait, or `wake`; at most so long."""
        self._poll.poll(max(timeout_s, 0.0) * 1000)
        with contextlib.suppress(OSError):
            # The wait has timed out, and there is nothing to read.
            os.read(self._inotify, EVENTS_BYTES)

    def wake(self) -> None:
        """From any thread: waits end at once from now on."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        os.close(self._wake)
        if self._inotify >= 0:
            os.close(self._inotify)
