"""A store for ranks on one host that have none: a process of its own keeps it while they use it.

The first rank that needs it starts the keeper, which becomes a child of init in a session of its own: signals that
end ranks, or go to a step, do not reach it. The keeper ends, and its store with it, once no rank has been connected
for some seconds. Each group has its own keeper.

/dev/shm/nvrx-inprocess-<uid>/<kind>-<digest of the group>/    0700
  lock             held by the keeper, from before it starts until it is gone
  place.json 0600  where it listens, and its password, while the store can be used
  keeper.log       its standard error
  store/           Valkey's append-only file: a server that is killed is started again with all that it had
    s<random>      its socket: another one, with another password, after each of its starts
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store_file import FileWatch
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import RUNTIME_ROOTS
from nvrx_slurm.util.ownership import is_own
from nvrx_slurm.util.processes import started_ticks

PROGRAM = "nvrx_slurm.inprocess.store_keeper_process"
VALKEY, TORCH = "valkey", "torch"

START_S = 60.0  # how long a keeper may take to start: on a busy machine, and with torch to import
LOOK_S = 0.1  # how often a rank checks whether a keeper that starts has given up; its success is reported by inotify
MOST_LOG_BYTES = 2000

MOST_STARTS = 3  # how many keepers in a row may end before they have a store
MOST_FOLDERS = 16  # how many names are tried for this user's folder, where other users have taken the first ones


class HostedStore(msgspec.Struct, frozen=True, kw_only=True):
    """Where on this host a store listens, and the process that keeps it: its id, and when it began, in ticks. `port`:
    of torch's; `url`, `password` and `mark`: of a Valkey, other ones after each start (`store/link.py`)."""

    port: int = 0
    url: str = ""
    password: str | None = None
    mark: str | None = None
    certificate: None = None  # no TLS: all is on one host
    keeper: int
    began: int


def hosted(kind: str, group: str, *, patience_s: float) -> HostedStore:
    """The store of a group on this host; it is started if there is none.

    Raises OptionError where not all ranks are known to be on this host, and StoreError where it does not start within
    `START_S`, or the patience if that is longer.
    """
    try:
        folder = _folder(kind, group)
        deadline, starts = time.monotonic() + max(START_S, patience_s), 0
        while time.monotonic() < deadline and starts <= MOST_STARTS:
            # With the lock: no keeper runs, and no other rank starts one.
            if (lock := take(folder)) is not None:
                starts += 1
                _start(kind, folder, lock)
            if (place := _find(folder)) is not None:
                return place
    except OSError as error:
        raise StoreError(f"no store can be started for this group on this host: {error}") from None
    lines = ""
    # An OSError: the keeper has removed the log with its folder, or had none.
    with contextlib.suppress(OSError):
        lines = (folder / "keeper.log").read_bytes()[-MOST_LOG_BYTES:].decode(errors="replace").strip()
    why = lines or "the keeper has logged nothing"
    raise StoreError(f"no store could be started for this group on this host; {folder}: {why}")


def place_now(kind: str, group: str) -> HostedStore:
    """Where the store is that `hosted` has found before. Raises OSError where none is kept at this moment."""
    folder = _folder(kind, group)
    if (place := _read(folder)) is None:
        raise FileNotFoundError(f"no store is kept in {folder} now")
    return place


def _start(kind: str, folder: Path, lock: int) -> None:
    """Start a keeper, which holds the lock from now on."""
    try:
        if not environment.all_on_this_host(environment.launch()):
            raise OptionError(
                "no store is named, and one that is started here serves ranks of this host only: name a server with"
                " store_kwargs={'url': 'redis://host:6379/0'}, or use store_factory=FileStore with a folder that all"
                " hosts share, or start the ranks with nvrx-slurm, whose jobs have a store"
            )
        with (folder / "keeper.log").open("wb") as log:
            subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, kind, str(folder), str(lock)],
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


def _find(folder: Path) -> HostedStore | None:
    """Where the store is, if a keeper runs; None after a while without a change."""
    if (place := _read(folder)) is not None:
        return place
    with contextlib.closing(FileWatch(folder)) as watch:
        if (place := _read(folder)) is None:
            # It may have come before the watch.
            watch.wait(LOOK_S)
        return place or _read(folder)


def _read(folder: Path) -> HostedStore | None:
    """Where the present keeper's store is; None where the file is of a keeper that was killed."""
    with contextlib.suppress(FileNotFoundError, MalformedRecord):
        place = decode_json(HostedStore, (folder / "place.json").read_bytes(), "place.json")
        return place if started_ticks(place.keeper) == place.began else None
    return None


def take(folder: Path) -> int | None:
    """Take the lock that a keeper holds: its descriptor, or None while a keeper holds it. Raises OSError."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            # A keeper that ends has just removed the folder.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        # A keeper that has just ended may have removed the file after it was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat((folder / "lock").stat(), os.fstat(lock)):
                return lock
        os.close(lock)


def _folder(kind: str, group: str) -> Path:
    """Where the store of a group is kept."""
    return _own_folder() / f"{kind}-{hashlib.sha256(group.encode()).hexdigest()[:16]}"


def _own_folder() -> Path:
    """The folder in the host's memory that only this user can enter. Raises StoreError where none can be made.

    Other users may take its name first. So there are several names, and every rank takes the first folder that is
    this user's. A folder is made only where no name has one: so it does not matter when another user gives up a name.
    """
    root = next(root for root in RUNTIME_ROOTS if root.is_dir())
    names = ("", *(f".{number}" for number in range(1, MOST_FOLDERS)))
    paths = [root / f"nvrx-inprocess-{os.geteuid()}{name}" for name in names]
    for path in paths:
        if _is_private(path):
            return path
    for path in paths:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if _is_private(path):
            # Not `path`: another rank may have made a folder under an earlier name.
            return next(filter(_is_private, paths))
    owners = sorted({path.lstat().st_uid for path in paths if os.path.lexists(path)})
    raise StoreError(
        f"{paths[0]} must be a folder of user {os.geteuid()} with mode 0700. It is not, nor is any of the"
        f" {MOST_FOLDERS - 1} others up to {paths[-1].name}; they belong to {', '.join(map(str, owners))}. Remove"
        " them or have them removed, or name a store with store_kwargs={'url': …}"
    )


def _is_private(path: Path) -> bool:
    """Whether it is a folder, and only this user can have put anything there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_own(status, closed=0o077)
