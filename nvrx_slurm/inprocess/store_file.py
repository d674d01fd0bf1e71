"""`FileStore`: what a group shares, in a folder that all ranks reach. For small groups, a few dozen ranks.

<path>/<group>/<call>/    0700; all of it belongs to the ranks' user, and no other may write there
  lock                    held while the log or a gate grows
  log                     the entries, each behind its length
  gate.<barrier>          arrivals, in the same form: the member, and its payload
  beats                   one number a member

Files are opened for each read: NFS shows what another host has written only to those who open the file after the
writer has closed it. inotify reports writers on this host at once; what other hosts write is polled for.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import os
import re
import select
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from nvrx_slurm.errors import UnsafePath
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection, Store
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import make_folders, write_all
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.ownership import check_base, is_own

LOOK_S = 0.25  # how often a reader polls for what was written on another host
# How long the files of a group stay after its last heartbeat. The next group removes them.
KEEP_S = 3600.0
# How often a folder is made that others remove at that moment: the last rank of each call removes those it can.
MOST_TRIES = 10
LONGEST_NAME = 200
_FILES = re.compile(r"lock|log|beats|gate\..+")  # what a call's folder holds
T = TypeVar("T")

_HEAD = struct.Struct("<I")
_BEAT = struct.Struct("<q")


class FileStore(Store):
    """A folder. `path`: absolute, on a file system of all ranks that has locks (flock; NFS has). `patience`: how long
    to wait for a lock.

    Raises OptionError for a relative path, and for what is no path; to connect, for one that another user could write
    to. Connections raise StoreError where the folder cannot be used.
    """

    def __init__(
        self, *, path: str | os.PathLike[str], patience: datetime.timedelta = datetime.timedelta(seconds=10)
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f"FileStore: path must be the path of a folder, not {path!r}", "path")
        self._path, self._patience_s = Path(path), patience.total_seconds()
        if not self._path.is_absolute():
            raise OptionError(
                f"FileStore: path {self._path} must be absolute: it is one folder for all ranks", "path"
            )

    def connect(self, group: str, call: int) -> FileConnection:
        connection = FileConnection(self._path / _name(group) / str(call), patience_s=self._patience_s)
        connection.check()
        connection.touch()
        return connection


class FileConnection(Connection):
    """Each operation opens what it needs, and keeps nothing open but, while it waits, a watch."""

    def __init__(self, folder: Path, *, patience_s: float) -> None:
        self._folder, self._patience_s = folder, patience_s
        self._cancelled = threading.Event()
        self._watch: FileWatch | None = None
        self._guard = threading.Lock()

    def check(self) -> None:
        """Make the folders. Raises OptionError where another user could write to them, or has made them."""
        with self._usable():
            _again_if_removed(self._check)

    def _check(self) -> None:
        root, group = self._folder.parent.parent, self._folder.parent
        make_folders(self._folder)
        try:
            check_base(root, "FileStore's path")
        except UnsafePath as error:
            raise OptionError(f"FileStore: {error}") from None
        for folder in (group, self._folder):
            if not _is_own(folder):
                owner = folder.lstat().st_uid
                raise OptionError(
                    f"FileStore: {folder} must be a folder of user {os.geteuid()} that no other can write to; it"
                    f" belongs to user {owner}: name a path below a folder of your own"
                )

    def touch(self) -> None:
        """Mark the call as in use, and remove what other groups have left here long ago."""
        with self._usable():
            with self._opened("beats") as beats:
                os.utime(beats)
                # By the file system's own clock: that of this host may differ.
                now = os.fstat(beats).st_mtime
            # Only calls of this user whose last heartbeat is long ago: a folder like /tmp also holds those of other
            # users, and links.
            path = self._folder.parent.parent
            for old in path.glob("*/*/beats"):
                # An OSError: another process removes it too.
                with contextlib.suppress(OSError):
                    is_call = _is_own(old.parent.parent) and _is_own(old.parent) and _is_a_call(old.parent)
                    if is_call and old.stat().st_mtime < now - KEEP_S:
                        _remove_call(old.parent)

    def append(self, entry: bytes, after: int) -> bool:
        with self._growing("log") as (file, entries):
            if after > len(entries):
                raise self._lost(after)
            if after == len(entries):
                write_all(file, _HEAD.pack(len(entry)) + entry)
                return True
            return entries[after] == entry

    def read(self, after: int, wait_s: float) -> list[bytes]:
        deadline = time.monotonic() + wait_s
        while True:
            with self._usable():
                log = self._entries("log")
            if len(log) < after:
                raise self._lost(after)
            entries = log[after:]
            left_s = deadline - time.monotonic()
            if entries or left_s <= 0:
                return entries
            if self._watch is not None:
                self._watch.wait(min(left_s, LOOK_S))
            else:
                # Then read again before the first wait: an entry, or a cancel, may have come before the watch.
                with self._usable(), self._guard:
                    self._watch = FileWatch(self._folder / "log")

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        arrival = _HEAD.pack(member) + payload
        with self._growing(_barrier(barrier)) as (file, entries):
            here = _latest(entries)
            if here.get(member) != payload:
                write_all(file, _HEAD.pack(len(arrival)) + arrival)
            return len(here | {member: payload})

    def claim(self, barrier: str, member: int, payload: bytes) -> bytes:
        arrival = _HEAD.pack(member) + payload
        with self._growing(_barrier(barrier)) as (file, entries):
            if (first := _latest(entries).get(member)) is not None:
                return first
            write_all(file, _HEAD.pack(len(arrival)) + arrival)
            return payload

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        with self._usable():
            return _latest(self._entries(_barrier(barrier)))

    def arrival(self, barrier: str, member: int) -> bytes | None:
        return self.arrivals(barrier).get(member)

    def beat(self, member: int, watched: int | None) -> int:
        with self._usable(), self._opened("beats") as beats:
            # Without a lock: each number has one writer, the member's monitor.
            os.pwrite(beats, _BEAT.pack(_beats_of(beats, member) + 1), member * _BEAT.size)
            return 0 if watched is None else _beats_of(beats, watched)

    def clear(self) -> None:
        # An OSError: it has gone, or the group has other calls.
        with self._usable(), contextlib.suppress(OSError):
            _remove_call(self._folder)

    def cancel(self) -> None:
        self._cancelled.set()
        with self._guard:
            if self._watch is not None:
                self._watch.wake()

    def close(self) -> None:
        with self._guard:
            if self._watch is not None:
                self._watch.close()
            self._watch = None

    # ---- how

    @contextlib.contextmanager
    def _growing(self, name: str) -> Iterator[tuple[int, list[bytes]]]:
        """Yields the file, open at its end, and its entries. Inside the block no other process adds to the call."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._usable())
            with self._opened("lock"):
                pass  # it is checked, and there
            clock = _Patience(self._cancelled)
            lock = locked(self._folder / "lock", timeout_s=self._patience_s, clock=clock)
            if not stack.enter_context(lock):
                raise StoreError(f"the file system of {self._folder} has no locks: name a path on another one")
            # It is closed before the lock is released: then NFS shows the entry to the next holder.
            file = stack.enter_context(self._opened(name))
            data = _whole(file)
            entries, length = _parsed(data)
            if length < len(data):
                # The rest is half an entry, of a process that was killed while it wrote.
                os.ftruncate(file, length)
            os.lseek(file, length, os.SEEK_SET)
            yield file, entries

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        if self._cancelled.is_set():
            raise Cancelled
        try:
            yield
        except OSError as error:  # a TimeoutError too
            raise StoreError(f"the store in {self._folder} cannot be used: {error}") from None

    def _lost(self, after: int) -> StoreError:
        return StoreError(f"{self._folder} has lost its first {after} entries: was it removed?")

    def _entries(self, name: str) -> list[bytes]:
        with self._opened(name) as file:
            return _parsed(_whole(file))[0]

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A file of the call, open."""
        # Always with O_CREAT: NFS may remember for long that a file did not exist.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        path = self._folder / name
        try:
            file = os.open(path, flags, 0o600)
        except FileNotFoundError:

            def make() -> int:
                make_folders(self._folder)
                return os.open(path, flags, 0o600)

            file = _again_if_removed(make)
        try:
            # Checked each time: a user who can write to a folder above can replace everything below it.
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not is_own(status, closed=0o022):
                raise StoreError(
                    f"{self._folder / name} is no file of user {os.geteuid()} alone (owner {status.st_uid}, mode"
                    f" {stat.S_IMODE(status.st_mode):04o}): it is not used"
                )
            yield file
        finally:
            os.close(file)


IN_MODIFY, IN_MOVED_TO = 0x002, 0x080
EVENTS_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """A change of one file, or in one folder, by inotify(7).

    Where the kernel has no watch left (fs.inotify.max_user_instances), a wait just passes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._inotify = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify >= 0:
            _libc.inotify_add_watch(self._inotify, os.fsencode(path), IN_MODIFY | IN_MOVED_TO)
            self._poll.register(self._inotify, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for a write or a rename since the last wait, or for `wake`; at most this time."""
        self._poll.poll(max(timeout_s, 0.0) * 1000)
        # An OSError: the wait has timed out, and there is nothing to read.
        with contextlib.suppress(OSError):
            os.read(self._inotify, EVENTS_BYTES)

    def wake(self) -> None:
        """From any thread: waits end at once from now on."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        os.close(self._wake)
        if self._inotify >= 0:
            os.close(self._inotify)


class _Patience(SystemClock):
    """The clock by which a lock is waited for: a wait that ends when it is cancelled."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled

    def sleep(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise Cancelled


def _name(text: str) -> str:
    """The text as a file name: readable, and different for different texts."""
    quoted = quote(text, safe=":")
    if len(quoted) <= LONGEST_NAME:
        return quoted
    return f"{quoted[:LONGEST_NAME]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _barrier(name: str) -> str:
    return f"gate.{_name(name)}"


def _whole(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _parsed(data: bytes) -> tuple[list[bytes], int]:
    """The complete entries, and where the last of them ends."""
    entries, at = list[bytes](), 0
    while at + _HEAD.size <= len(data):
        end = at + _HEAD.size + _HEAD.unpack_from(data, at)[0]
        if end > len(data):
            break
        entries.append(data[at + _HEAD.size : end])
        at = end
    return entries, at


def _latest(arrivals: list[bytes]) -> dict[int, bytes]:
    return {_HEAD.unpack_from(arrival)[0]: arrival[_HEAD.size :] for arrival in arrivals}


def _beats_of(beats: int, member: int) -> int:
    data = os.pread(beats, _BEAT.size, member * _BEAT.size)
    return int(_BEAT.unpack(data)[0]) if len(data) == _BEAT.size else 0


def _again_if_removed(make: Callable[[], T]) -> T:
    """Make what needs the call's folders, also if another rank removes them at that moment."""
    for _ in range(MOST_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return make()
    return make()


def _is_own(folder: Path) -> bool:
    """Whether it is a folder itself, of this user, and no other can write to it."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and is_own(status, closed=0o022)


def _is_a_call(folder: Path) -> bool:
    """Whether it holds only what a `FileConnection` writes: the store's folder may hold more than groups."""
    if not folder.name.isdecimal():
        return False
    with os.scandir(folder) as entries:
        return all(_FILES.fullmatch(each.name) and each.is_file(follow_symlinks=False) for each in entries)


def _remove_call(folder: Path) -> None:
    """Remove the files of a call by their names, and its folders if nothing else is in them. Raises OSError."""
    for entry in os.scandir(folder):
        if _FILES.fullmatch(entry.name):
            Path(entry.path).unlink(missing_ok=True)
    folder.rmdir()
    folder.parent.rmdir()
