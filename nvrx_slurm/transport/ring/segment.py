"""The file of a ring in shared memory: made whole or not at all, mapped, and removed.

It is made without a name, gets all its memory and its header, and only then its name: no process ever sees half a
ring, and a creator that is killed before leaves nothing. Where its creator is killed, the next `sweep` removes it,
or multiprocessing's resource tracker, once all of its family have ended.

Any user of the host may put files into /dev/shm. A file is a ring of this user only if the kernel says so of the
open descriptor: a regular file, owned by this user, with no rights for others. Only then are its bytes read (decision
0026).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

from nvrx_slurm.transport import arguments
from nvrx_slurm.transport.errors import ForeignRing, RingError
from nvrx_slurm.transport.ref import is_ring_name
from nvrx_slurm.transport.ring.memory import HEADER_BYTES, Header, checked, made_by
from nvrx_slurm.transport.ring.owners import is_running, namespace

SHM = Path("/dev/shm")
_KIND = "shared_memory"
_tracked: set[str] = set()
"""What the resource tracker has been told of by this process, or by the one that it was forked from."""

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


def make(folder: Path, name: str, size: int, fill: Callable[[mmap.mmap], None]) -> mmap.mmap:
    """A new file of that name, 0600, with all its memory, and what `fill` writes. Raises RingError."""
    with _told(f"a ring of {size} bytes cannot be made in {folder}"):
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # a umask such as 0277 leaves less, and then no process can attach
            # All memory now: a page that tmpfs cannot give later would be a SIGBUS in the middle of a write.
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                room = os.statvfs(folder)
                free = room.f_bavail * room.f_frsize
                raise RingError(
                    f"a ring of {size} bytes does not fit in {folder}, which has {free} free: make fewer or smaller "
                    f"slots, or give the node more (mount -o remount,size=... {folder})"
                ) from None
            memory = mmap.mmap(descriptor, size)
            fill(memory)
            _name(descriptor, folder, name)
        finally:
            os.close(descriptor)
    return memory


def open_(folder: Path, name: str) -> tuple[mmap.mmap, Header]:
    """A ring that another process of this user has made. Raises RingError.

    Before the owner is checked, nothing is read from the file, mapped, or locked. O_NONBLOCK: to open a FIFO waits.
    """
    if not is_ring_name(name):
        raise RingError(f"{name!r} is no name of a ring")
    with _told(f"ring {name} cannot be attached"):
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if (why := foreign(status)) is not None:
                raise ForeignRing(f"{folder / name} is not used: {why}; a ring is a file of this user, mode 0600")
            header = Header.unpack(os.pread(descriptor, HEADER_BYTES, 0), name)
            if header.creator.namespace != namespace():
                raise RingError(
                    f"ring {name} was made in another namespace of process ids (another container): its locks and "
                    "owners mean nothing here; read it through its server, or share the namespace"
                )
            expected = checked(header.shape.slots, header.shape.slot_bytes).total_bytes
            if status.st_size != expected:
                raise RingError(
                    f"ring {name} has {status.st_size} bytes where its header says {expected}: it was changed"
                )
            return mmap.mmap(descriptor, status.st_size), header
        finally:
            os.close(descriptor)


def foreign(status: os.stat_result) -> str | None:
    """Why a file may hold what another user has written; None where it cannot."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o077:  # with POSIX ACLs the group's bits are what the ACL grants at most
        return f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users read or write it"
    if status.st_nlink > 1:
        return f"it has {status.st_nlink} names"
    return None


def remove(folder: Path, name: str, *, forget: bool) -> None:
    """Take its name away; who has it mapped keeps its memory. `forget`: this process has made it."""
    (folder / name).unlink(missing_ok=True)
    if forget and name in _tracked:  # once: the tracker prints a traceback over a name that it does not know
        _tracked.discard(name)
        resource_tracker.unregister(f"/{name}", _KIND)


def is_gone(name: str, folder: Path = SHM) -> bool:
    """Whether the ring has no name any more, or its creator is dead."""
    return not (folder / name).exists() or _is_orphan(folder / name)


def sweep(folder: str | Path = SHM) -> list[str]:
    """Remove the rings of this user whose creator is dead. Returns their names."""
    folder = arguments.folder(folder)
    return [path.name for path in sorted(_mine(folder)) if _is_orphan(path) and _is_removed(path)]


def _name(descriptor: int, folder: Path, name: str) -> None:
    # The resource tracker learns of the name first: at each moment the tracker or this process removes it.
    if folder == SHM:
        resource_tracker.register(f"/{name}", _KIND)
        _tracked.add(name)
    try:
        # Python passes AT_SYMLINK_FOLLOW only where it is given a descriptor for the source; the path is absolute.
        os.link(f"/proc/self/fd/{descriptor}", folder / name, follow_symlinks=True, src_dir_fd=descriptor)
    except OSError:
        if folder == SHM:
            _tracked.discard(name)
            resource_tracker.unregister(f"/{name}", _KIND)
        raise


def _mine(folder: Path) -> Iterator[Path]:
    """Files of this user, by their names' look: others' are not even opened."""
    for path in folder.glob("nvrx-ring-*"):
        with contextlib.suppress(OSError):
            if foreign(path.lstat()) is None:
                yield path


def _is_orphan(path: Path) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if foreign(os.fstat(descriptor)) is not None:
                return False
            creator, _ = made_by(os.pread(descriptor, HEADER_BYTES, 0))
        finally:
            os.close(descriptor)
        if creator is not None and creator.namespace == namespace():
            return not is_running(creator.pid, creator.started_ticks)
    return False


def _is_removed(path: Path) -> bool:
    with contextlib.suppress(OSError):  # another one sweeps too
        path.unlink()
        return True
    return False


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        why = "; was it unlinked, or did its creator die?" if is_ring_name(Path(error.filename).name) else ""
        raise RingError(f"{what}: there is no {error.filename}{why}") from None
    except OSError as error:
        raise RingError(f"{what}: {error}") from None
