"""Which folders and files another user could have changed: what OpenSSH calls StrictModes. Standard library only.

A path is trusted when its owner is this user or root, and neither its group nor others can write to it. A folder with
the sticky bit may be writable: there only the owner of an entry can rename or remove it. A POSIX ACL that lets
a user write shows in the group's bits, as its mask. An NFSv4 ACL does not show in the mode, and is not seen here.

Why the folders above the base folder are judged less strictly: docs/decisions/0027-strict-modes.md
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from nvrx_slurm.errors import UnsafePath

MOST_SYMLINKS = 40  # as Linux has it (path_resolution(7))
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_base(folder: Path, option: str = "--folder") -> list[Path]:
    """Refuse a base folder in which another user could change a job, and one below a folder that everybody can write
    to. Returns those above it that a group can write to: from there it can be replaced, but not unseen. `option`: by
    which its user names it.

    Raises UnsafePath, OSError.
    """
    shared = []
    for path, status in _folders_on_the_way(folder, option):
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise _writable(path, status, f"{option} names a folder elsewhere")
        if _group_writes(status):
            shared.append(path)
    status = folder.stat()
    _check(folder, status, f"{option} names a folder of your own")
    return shared


def open_private_folder(path: Path, *, dir_fd: int | None = None) -> int:
    """A descriptor of a folder that only its owner can write to; `dir_fd`: the folder that holds it.

    Raises UnsafePath, OSError.
    """
    try:
        descriptor = os.open(path if dir_fd is None else path.name, _FOLDER_FLAGS, dir_fd=dir_fd)
    except NotADirectoryError:  # O_DIRECTORY wins over O_NOFOLLOW: a symbolic link is no directory
        raise UnsafePath(
            f"{path}: is a symbolic link or a file, and not a folder of yours; remove it", path=path
        ) from None
    try:
        _check(path, os.fstat(descriptor), "use it as the user whose job it is, or remove it")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """The same, for as long as it is used."""
    descriptor = open_private_folder(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_owned(path: Path, *, dir_fd: int | None = None) -> bytes:
    """The content of a plain file that only its owner can write to; `dir_fd`: the folder that holds it.

    Raises UnsafePath, OSError.
    """
    descriptor = open_owned(path, dir_fd=dir_fd)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def open_owned(path: Path, *, dir_fd: int | None = None) -> int:
    """The same, as a descriptor to read from."""
    # O_NONBLOCK: a named pipe to which nothing writes is opened too, and then refused
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path if dir_fd is None else path.name, flags, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket
            raise _no_plain_file(path) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _no_plain_file(path)
        _check(path, status, "remove it")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_own(status: os.stat_result, *, closed: int) -> bool:
    """Whether this user owns it, and its mode has none of the bits `closed`: 0o022 where others must not write, 0o077
    where they must not read either. Root's does not count."""
    return status.st_uid == os.geteuid() and not status.st_mode & closed


def is_ours(path: Path) -> bool:
    """Whether this user owns the file or folder at this path; False where there is none."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _no_plain_file(path: Path) -> UnsafePath:
    return UnsafePath(f"{path}: is no plain file, so this job has not written it; remove it", path=path)


def _check(path: Path, status: os.stat_result, remedy: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafePath(
            f"{path}: belongs to {user_name(status.st_uid)}, who could change what a job of yours reads there;"
            f" {remedy}",
            path=path,
        )
    others_write = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if others_write or _group_writes(status):
        raise _writable(path, status, remedy)


def _writable(path: Path, status: os.stat_result, remedy: str) -> UnsafePath:
    by_others = bool(status.st_mode & stat.S_IWOTH)
    group = str(status.st_gid)
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(status.st_gid).gr_name
    who = "every user" if by_others else f"every user of group {group}"
    bits = "o-w" if by_others and not status.st_mode & stat.S_IWGRP else "go-w" if by_others else "g-w"
    return UnsafePath(
        f"{path}: {who} can write to it (mode {stat.S_IMODE(status.st_mode):04o}), and so change what jobs run;"
        f" `chmod {bits} {path}`, or {remedy}",
        path=path,
    )


def _group_writes(status: os.stat_result) -> bool:
    """Whether others can write by way of the group. A sticky folder does not let them; nor does a group that is the
    owner's alone."""
    if not status.st_mode & stat.S_IWGRP or status.st_mode & stat.S_ISVTX:
        return False
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    # Debian and Red Hat give each user a group of the same name, and umask 002 with it.
    private = owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name and set(group.gr_mem) <= {owner.pw_name}
    return not private or status.st_uid not in (0, os.geteuid())


def _folders_on_the_way(path: Path, option: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder that the kernel looks into on its way to `path`, those of symbolic links included; not itself."""
    ahead, links = list(reversed(path.absolute().parts)), 0
    here = Path(ahead.pop())
    of_processes = None
    with contextlib.suppress(OSError):  # /proc/<pid>/root leads where its text does not: the kernel must follow it
        of_processes = Path("/proc").stat().st_dev
    while ahead:
        yield here, here.stat()
        name = ahead.pop()
        if name == "..":
            here = here.parent
            continue
        here /= name
        link = here.lstat()
        if stat.S_ISLNK(link.st_mode) and link.st_dev != of_processes:
            if link.st_uid not in (0, os.geteuid()) and here.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UnsafePath(
                    f"{here}: is a symbolic link of {user_name(link.st_uid)} in a folder that others can write to;"
                    f" {option} names a folder of your own",
                    path=here,
                )
            links += 1
            if links > MOST_SYMLINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = here.readlink()
            ahead += reversed(target.parts)
            here = here.parent
            if target.is_absolute():
                here = Path(ahead.pop())


def login_name(uid: int) -> str | None:
    """The user's name; None where this machine, or container, knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def user_name(uid: int) -> str:
    """The user's name and number, for a message."""
    name = login_name(uid)
    return f"uid {uid}" if name is None else f"{name} (uid {uid})"
