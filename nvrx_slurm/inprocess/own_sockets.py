"""This process's sockets, also those that native code has opened."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path


def sockets() -> dict[str, int]:
    """The file descriptor of each socket, by the kernel's name for it."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # An OSError: it was closed meanwhile, as the descriptor of this folder itself is.
        with contextlib.suppress(OSError):
            if (name := str(entry.readlink())).startswith("socket:"):
                found[name] = int(entry.name)
    return found


def duplicate(number: int) -> socket.socket | None:
    """A duplicate of the socket with this file descriptor; None if it is no socket. Whether its operations block
    stays as it is: `socket.setdefaulttimeout` would change that for all duplicates."""
    try:
        kept = os.dup(number)
    except OSError:
        return None
    if not stat.S_ISSOCK(os.fstat(kept).st_mode):
        os.close(kept)
        return None
    blocks = os.get_blocking(kept)
    made = socket.socket(fileno=kept)
    if socket.getdefaulttimeout() is not None:
        os.set_blocking(kept, blocks)
    return made
