"""A folder of files that can be made again, under names derived from what they were made of, as `.pyc` files are.

The first line is a SHA-256 over the name and the rest: no file is torn, or taken for another. It has no key: what
makes a file trusted is that this user owns it and its folder. Files are read and written relative to a descriptor
of the folder, whose owner and mode are checked first, so that another folder in its place is not used. What is
wrong with the folder, nothing here raises: what it holds is made again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.errors import UnsafePath
from nvrx_slurm.util.files import make_folders, write_private
from nvrx_slurm.util.ownership import private_folder, read_owned


@dataclass(frozen=True, slots=True)
class SealedFolder:
    """`path` is its user's alone (0700) and made when first needed; the `most` files that were used last are kept.

    It must be absolute: a cache below the current folder has no owner (no HOME is set).
    """

    path: Path
    most: int

    def get(self, name: str) -> bytes | None:
        """What was put under this name, or None."""
        try:
            with self._opened() as folder:
                data = read_owned(self.path / name, dir_fd=folder)
                # It was used now: `put` keeps the files that were used last. A read-only file system has no `put`.
                with contextlib.suppress(OSError):
                    os.utime(name, dir_fd=folder)
        except (OSError, UnsafePath):
            return None
        seal, _, body = data.partition(b"\n")
        return body if seal == _seal(name, body) else None

    def put(self, name: str, body: bytes) -> None:
        """Keep it (0600), unless the folder will not have it."""
        with contextlib.suppress(OSError, UnsafePath):
            if self.path.is_absolute():
                make_folders(self.path)
            with self._opened() as folder:
                write_private(self.path / name, _seal(name, body) + b"\n" + body, dir_fd=folder)
                with os.scandir(folder) as entries:
                    by_age = sorted(entries, key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
                # After the write: where that fails, as on a full disk, no file that is still good is lost.
                for entry in by_age[self.most :]:
                    os.unlink(entry.name, dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder. Raises OSError, also where another user can read it; UnsafePath."""
        if not self.path.is_absolute():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        with private_folder(self.path) as folder:
            if os.fstat(folder).st_mode & 0o077:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(self.path))
            yield folder


def _seal(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + body).hexdigest().encode()
