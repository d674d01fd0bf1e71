"""Properties of a group's store in a folder: a lock has a holder, and no server removes what is abandoned."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.inprocess import store_file
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection
from nvrx_slurm.inprocess.store_file import KEEP_S, FileStore
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import make_folders
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.threads import in_thread
from tests.contract.inprocess_stores import DEADLINE_S
from tests.waiting import until

LONG_S = 600.0
APPEND_FOREVER = """
import itertools, sys
from nvrx_slurm.inprocess.store_file import FileStore
connection, after = FileStore(path=sys.argv[1]).connect("group", 0), 0
for number in itertools.count():
    entry = f"{sys.argv[2]} {number} {'x' * 20_000}".encode()
    while not connection.append(entry, after):
        after += len(connection.read(after, 0.0))
    after += 1
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "groups"


@pytest.fixture
def connection(path: Path) -> Iterator[Connection]:
    connection = FileStore(path=path).connect("group", 0)
    yield connection
    connection.close()


def test_folders_that_are_removed_while_they_are_made(
    path: Path, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank of another call may remove the folders while they are being created: they are created again."""
    made = list[Path]()

    def make_and_lose(folder: Path) -> None:
        made.append(folder)
        make_folders(folder)
        if len(made) % 2:
            folder.rmdir()
            folder.parent.rmdir()

    monkeypatch.setattr(store_file, "make_folders", make_and_lose)
    connection.clear()
    assert connection.append(b"one", 0)
    with pytest.raises(StoreError, match="lost"):
        connection.read(2, 0.0)
    FileStore(path=path).connect("other", 1).close()
    assert len(made) == 4


def test_writers_that_are_killed_tear_nothing_and_lose_nothing(path: Path, connection: Connection) -> None:
    """A killed writer loses no entry that was acknowledged and leaves none torn, and other writers can go on."""
    told = {name: _killed_after(20, path, name) for name in ("a", "b", "c")}
    assert connection.append(b"last", len(connection.read(0, 0.0)))
    *entries, last = connection.read(0, 0.0)
    assert last == b"last"
    assert {entry.count(b"x") for entry in entries} == {20_000}
    for name, numbers in told.items():
        own = [int(entry.split()[1]) for entry in entries if entry.startswith(name.encode())]
        assert own == list(range(len(own)))
        assert len(own) >= numbers


def _killed_after(count: int, path: Path, name: str) -> int:
    """Kill a writer while it appends. Returns how many appends it has reported."""
    writer = subprocess.Popen(
        [sys.executable, "-c", APPEND_FOREVER, str(path), name], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(count):
        writer.stdout.readline()
    writer.kill()
    return count + len(writer.communicate()[0].splitlines())


def test_an_entry_that_was_written_in_part_is_overwritten(path: Path, connection: Connection) -> None:
    """Readers ignore a half-written entry, and the next append replaces it."""
    assert connection.append(b"one", 0)
    with (path / "group" / "0" / "log").open("ab") as log:
        log.write(b"\x50\0\0\0half of")
    assert connection.read(0, 0.0) == [b"one"]
    assert connection.append(b"two", 1)
    assert connection.read(0, 0.0) == [b"one", b"two"]


def test_the_wait_for_a_lock_of_another_process_is_bounded(path: Path, connection: Connection) -> None:
    """While another process holds the lock, an append fails after its patience, and the error names the lock file.
    Reads succeed, and a waiting operation can be cancelled."""
    impatient = FileStore(path=path, patience=datetime.timedelta(seconds=0.05)).connect("group", 0)
    connection.append(b"one", 0)
    with locked(path / "group" / "0" / "lock", timeout_s=DEADLINE_S, clock=SystemClock()):
        with pytest.raises(StoreError, match=r"group/0/lock has been locked by another process for 0\.05 s"):
            impatient.append(b"two", 1)
        assert impatient.read(0, 0.0) == [b"one"]
        waiting = in_thread(lambda: connection.arrive("ready:0", 0), "rank")
        connection.cancel()
        with pytest.raises(Cancelled):
            waiting.result(DEADLINE_S)
    assert impatient.append(b"two", 1)


def test_a_process_without_a_descriptor_left(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process cannot open a descriptor, a read that would wait raises StoreError."""

    def fail(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched, pytest.raises(StoreError):
        patched.setattr(os, "eventfd", fail)
        connection.read(0, LONG_S)
    assert connection.append(b"one", 0)


def test_an_entry_without_an_inotify_event_is_found_by_polling(path: Path, connection: Connection) -> None:
    """A write on another host causes no inotify event. Here the writer uses a log that is not the watched one."""
    waiting = in_thread(lambda: connection.read(0, LONG_S), "reader")
    until(_somebody_watches, "the reader to watch")
    (path / "group" / "0").rename(path / "aside")
    assert FileStore(path=path).connect("group", 0).append(b"elsewhere", 0)
    assert waiting.result(DEADLINE_S) == [b"elsewhere"]


def _somebody_watches() -> bool:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "inotify" in str(descriptor.readlink()):
                return True
    return False


def test_nothing_stays_open(connection: Connection) -> None:
    """No descriptor stays open between operations, nor after the close."""
    before = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    connection.append(b"one", 0)
    connection.arrive("ready:0", 0)
    connection.beat(0, 0)
    assert {entry.name for entry in Path("/proc/self/fd").iterdir()} == before
    connection.read(1, 0.01)
    connection.close()
    assert {entry.name for entry in Path("/proc/self/fd").iterdir()} == before


def test_what_a_group_has_left_goes_when_another_comes_an_hour_later(path: Path, connection: Connection) -> None:
    """A new group removes calls that had no sign of life for an hour, by the file system's clock. A call with signs
    of life stays."""
    store = FileStore(path=path)
    for group in ("long ago", "alive"):
        other = store.connect(group, 0)
        other.append(b"one", 0)
        hour_ago = (path / group.replace(" ", "%20") / "0" / "beats").stat().st_mtime - KEEP_S - 1
        os.utime(path / group.replace(" ", "%20") / "0" / "beats", (hour_ago, hour_ago))
    other.beat(0, None)
    store.connect("group", 1)
    assert {folder.name for folder in path.iterdir()} == {"alive", "group"}
    assert connection.append(b"one", 0)


def test_a_cleared_group_leaves_no_folder(path: Path, connection: Connection) -> None:
    """Only the owner can read a group's files, and clearing the group removes them and their folders."""
    connection.append(b"one", 0)
    folder = path / "group" / "0"
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    connection.clear()
    assert list(path.iterdir()) == []


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """A relative path is refused, since it may be another folder for each rank; so is a file in place of the
    folder."""
    with pytest.raises(OptionError, match="groups must be absolute") as caught:
        FileStore(path="groups")
    assert caught.value.options == ("path",)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/group/0 cannot be used: .*Not a directory"):
        FileStore(path=tmp_path / "file").connect("group", 0)


def test_a_forked_child_keeps_no_lock(path: Path, connection: Connection) -> None:
    """A child that another thread forks while the lock is held does not keep the lock."""
    connection.append(b"one", 0)
    with locked(path / "group" / "0" / "lock", timeout_s=DEADLINE_S, clock=SystemClock()):
        if (child := os.fork()) == 0:
            signal.pause()
    try:
        assert FileStore(path=path, patience=datetime.timedelta(seconds=1)).connect("group", 0).append(b"two", 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
