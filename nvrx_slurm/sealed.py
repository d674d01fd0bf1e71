"""A folder of files that can be made again, under names that tell what they were made of, as `.pyc` files are.

The first line is a SHA-256 over the name and the rest, so that none is ever torn or another's. Whatever is wrong with
the folder, nothing here raises: what it holds is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.files import write_private


@dataclass(frozen=True, slots=True)
class SealedFolder:
    """`path` is its user's alone (0700) and made when first needed; the `most` files that were used last are kept.

    It must be absolute: one below the current folder is nobody's cache (no HOME is set).
    """

    path: Path
    most: int

    def get(self, name: str) -> bytes | None:
        """What was put under this name, or None."""
        try:
            if not self._is_private():
                return None
            data = (self.path / name).read_bytes()
            os.utime(self.path / name)
        except OSError:
            return None
        seal, _, body = data.partition(b"\n")
        return body if seal == _seal(name, body) else None

    def put(self, name: str, body: bytes) -> None:
        """Keep it (0600), unless the folder will not have it."""
        with contextlib.suppress(OSError):
            if self.path.is_absolute():
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_private():
                write_private(self.path / name, _seal(name, body) + b"\n" + body)
                self._trim()

    def _is_private(self) -> bool:
        """Whether nobody else can have put anything there. Raises OSError."""
        status = self.path.stat()
        return self.path.is_absolute() and status.st_uid == os.geteuid() and not status.st_mode & 0o077

    def _trim(self) -> None:
        by_age = sorted(os.scandir(self.path), key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
        for entry in by_age[self.most :]:
            Path(entry.path).unlink()


def _seal(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + body).hexdigest().encode()
