"""A store for ranks on one host that have none: a process of its own keeps it while they use it.

The first rank to ask starts the keeper, which then is nobody's child, and in a session of its own: what ends ranks,
or signals a step, does not reach it. It ends, and its store with it, once no rank has been connected for some
seconds. Each group has its own.

/dev/shm/nvrx-inprocess-<uid>/<kind>-<digest of the group>/    0700
  lock             held by the keeper, from before it starts until it is gone
  place.json 0600  port and password, while the store can be used
  keeper.log       what it has to say
  store/           Valkey's append-only file: a server that is killed is started again with all that it had
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from nvrx_slurm.files import RUNTIME_ROOTS
from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store.inotify import Watch

VALKEY, TORCH = "valkey", "torch"

START_S = 30.0
"""How long a keeper may take to start: on a busy machine, and with torch to import."""

LOOK_S = 0.1
"""How often it is looked whether a keeper that starts has given up; that it is there comes as a push."""

SAID_BYTES = 2000


class Place(msgspec.Struct, frozen=True):
    """Where on this host a store listens."""

    port: int
    password: str | None = None


def hosted(kind: str, group: str, *, patience_s: float) -> Place:
    """The store of a group on this host; it is started if there is none.

    Raises OptionError where not all ranks are known to be on this host, and StoreError where it does not start within
    `START_S`, or the patience if that is longer.
    """
    folder = _folder(kind, group)
    deadline, said = time.monotonic() + max(START_S, patience_s), ""
    while time.monotonic() < deadline:
        if (lock := _take(folder)) is not None:
            said = _said(folder) or said  # by one that was started before, and ended
            _start(kind, folder, lock)
        if (place := _wait_for_place(folder)) is not None:
            return place
    raise StoreError(f"no store could be started for this group on this host; {folder}: {said or 'it says nothing'}")


def _start(kind: str, folder: Path, lock: int) -> None:
    """Start a keeper, which holds the lock from now on."""
    try:
        if not environment.all_on_this_host(environment.launch()):
            raise OptionError(
                "no store is named, and one that is started here serves ranks of this host only: name a server with"
                " store_kwargs={'url': 'redis://host:6379/0'}, or use store_factory=FileStore with a folder that all"
                " hosts share, or start the ranks with nvrx-slurm, whose jobs have a store"
            )
        (folder / "place.json").unlink(missing_ok=True)
        with (folder / "keeper.log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "nvrx_slurm.inprocess.store.keeping", kind, str(folder), str(lock)],
                pass_fds=(lock,),
                env=environment.of_python_child(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            ).wait()  # it forks at once
    finally:
        os.close(lock)


def _wait_for_place(folder: Path) -> Place | None:
    """Where the store is, if somebody keeps it; None after a while without a change."""
    watch = Watch(folder)
    try:
        if (place := read_place(folder)) is None:
            watch.wait(LOOK_S)
            place = read_place(folder)
        return place
    finally:
        watch.close()


def read_place(folder: Path) -> Place | None:
    try:
        return msgspec.json.decode((folder / "place.json").read_bytes(), type=Place)
    except FileNotFoundError:
        return None


def _take(folder: Path) -> int | None:
    """The lock of whoever keeps the store: a descriptor, or None while somebody has it."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a keeper that ends has just removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if _is_there(folder / "lock", lock):
            return lock
        os.close(lock)


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether the file has not been removed since it was opened."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _folder(kind: str, group: str) -> Path:
    """Where the store of a group is kept. Raises StoreError where somebody else could have put something there."""
    root = next(root for root in RUNTIME_ROOTS if root.is_dir())
    ours = root / f"nvrx-inprocess-{os.getuid()}"
    try:
        ours.mkdir(mode=0o700, exist_ok=True)
        status = ours.lstat()
    except OSError as error:
        raise StoreError(f"no store can be started on this host: {error}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not ours.is_dir():
        raise StoreError(f"{ours} must be a folder of yours, with mode 0700: remove it")
    return ours / f"{kind}-{hashlib.sha256(group.encode()).hexdigest()[:16]}"


def _said(folder: Path) -> str:
    """The last words of a keeper that has ended."""
    with contextlib.suppress(OSError):
        return (folder / "keeper.log").read_bytes()[-SAID_BYTES:].decode(errors="replace").strip()
    return ""
