"""A small disk, so that one can be full. It needs no root."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from pathlib import Path

from nvrx_slurm.errors import NvrxError

_HOLD = 'mount -t tmpfs -o "$1" tmpfs /mnt && echo mounted && read -r _'
_BLOCK = b"\0" * 4096

MOUNTED_WITHIN_S = 20.0


class SmallDisk:
    """A tmpfs with these mount options (`size=1m`), in a mount namespace of its own: it goes with its holder, and the
    holder with this process. Root or not, it is reached at `path`, through the holder's entry in /proc.

    Raises NvrxError where the kernel lets us have no such namespace.
    """

    def __init__(self, options: str) -> None:
        self._holder = subprocess.Popen(
            # Only in a user namespace of its own may an ordinary user mount anything.
            ["unshare", "--map-root-user", "--mount", "sh", "-c", _HOLD, "sh", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        answers, _, _ = select.select([self._holder.stdout], [], [], MOUNTED_WITHIN_S)
        if not answers or self._holder.stdout.readline() != b"mounted\n":
            self.close()
            raise NvrxError("no small disk: this kernel lets us have no mount namespace of our own")

    @property
    def pid(self) -> int:
        """The holder's."""
        return self._holder.pid

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self._holder.pid}/root/mnt")

    @property
    def free_bytes(self) -> int:
        """What is left, as statvfs(3) says."""
        free = os.statvfs(self.path)
        return free.f_bavail * free.f_frsize

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self) -> Path:
        """Take all the space that is left; returns the file that has it."""
        with contextlib.suppress(OSError), self.ballast.open("ab", buffering=0) as file:
            while True:
                file.write(_BLOCK)
        return self.ballast

    def free(self) -> None:
        """Give back what `fill` took."""
        self.ballast.unlink(missing_ok=True)

    def close(self) -> None:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        # The mount ends with the holder. Where this process is killed, the holder's `read` ends with the pipe.
        self._holder.kill()
        self._holder.wait()
        self._holder.stdin.close()
        self._holder.stdout.close()
