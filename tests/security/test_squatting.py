"""Bob takes names in /dev/shm that he can predict, before alice's ranks do: the ranks still get their store."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.inprocess import store_keeper
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store_file import FileStore
from nvrx_slurm.inprocess.store_keeper import MOST_FOLDERS, VALKEY, hosted
from nvrx_slurm.inprocess.store_redis import RedisStore

KINDS = ("folder", "open folder", "file", "fifo", "socket", "link")


# ---- what bob does


def take(path: str, kind: str) -> None:
    it = Path(path)
    if kind in ("folder", "open folder"):
        it.mkdir()
        it.chmod(0o777 if kind == "open folder" else 0o700)
    elif kind == "file":
        it.write_bytes(b"bob's")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as taken:
            taken.bind(path)
    else:
        it.symlink_to("..")


def take_all(paths: list[str]) -> None:
    for path in paths:
        take(path, "file")


def give_up(folder: str) -> None:
    """Remove all that bob owns there."""
    for path in Path(folder).iterdir():
        if path.lstat().st_uid == os.geteuid():
            if not path.is_symlink() and path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def make_group(path: str, mode: int) -> None:
    """Create the folder of a group and call that alice is going to use."""
    call = Path(path, "group", "0")
    call.mkdir(parents=True)
    for folder in (call.parent, call):
        folder.chmod(mode)


def swap(path: str) -> None:
    """In a folder that he can write to, replace alice's group with one of his own."""
    Path(path, "group").rename(Path(path, "alice's"))
    make_group(path, 0o777)
    log = Path(path, "group", "0", "log")
    log.write_bytes(struct.pack("<I", 5) + b"bob's")
    log.chmod(0o666)


def link_to(path: str, target: str) -> None:
    Path(path).symlink_to(target)


def remove_group(path: str) -> None:
    shutil.rmtree(Path(path, "group"))


# ---- alice


@pytest.fixture
def root(bob: Any, common: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of /dev/shm: sticky, and every user can create files there. This process is rank 0 of 1."""
    root = common / "shm"
    root.mkdir()
    root.chmod(0o1777)
    monkeypatch.setattr(store_keeper, "RUNTIME_ROOTS", (root,))
    for name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "NVRX_STORE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    yield root
    bob.run(give_up, str(root))
    for folder in root.glob("nvrx-inprocess-*/*"):
        if (place := store_keeper._read(folder)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.keeper, signal.SIGKILL)


@pytest.fixture
def name(root: Path) -> Path:
    """The name that alice's ranks try first."""
    return root / f"nvrx-inprocess-{os.geteuid()}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_starts_if_its_name_is_taken(bob: Any, name: Path, kind: str) -> None:
    """All ranks find the same store, in a folder that only alice can enter. Bob's file is not changed."""
    bob.run(take, str(name), kind)
    before = name.lstat()
    connections = [RedisStore().connect("group", 0) for _ in range(2)]
    assert connections[0].append(b"one", 0)
    assert connections[1].read(0, 0.0) == [b"one"]
    for connection in connections:
        connection.close()
    folder = name.with_name(f"{name.name}.1")
    status = folder.lstat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o700)
    assert os.path.samestat(before, name.lstat())
    assert name.lstat().st_mtime_ns == before.st_mtime_ns


def test_a_name_that_becomes_free_splits_no_group(bob: Any, name: Path) -> None:
    """Later ranks use the folder of the earlier ones, even after bob has removed his."""
    bob.run(take, str(name), "folder")
    with contextlib.closing(RedisStore().connect("group", 0)):  # the keeper ends soon after its last rank has gone
        first = hosted(VALKEY, "group", patience_s=10.0)
        bob.run(give_up, str(name.parent))
        assert hosted(VALKEY, "group", patience_s=10.0) == first


def test_where_he_has_taken_all_names_the_error_names_him(bob: Any, name: Path) -> None:
    """One line says who owns the names, and what to do."""
    names = [str(name), *(f"{name}.{number}" for number in range(1, MOST_FOLDERS))]
    bob.run(take_all, names)
    with pytest.raises(StoreError, match=f"they belong to {bob.uid}. Remove them or have them removed") as raised:
        hosted(VALKEY, "group", patience_s=10.0)
    assert "\n" not in str(raised.value)


# ---- a folder that alice names (FileStore)


def shared(common: Path, mode: int) -> Path:
    path = common / "groups"
    path.mkdir()
    path.chmod(mode)
    return path


@pytest.mark.parametrize(("mode", "fix"), [(0o777, "chmod go-w"), (0o757, "chmod o-w")])
def test_a_folder_that_bob_can_write_to_is_refused(common: Path, mode: int, fix: str) -> None:
    """The error is one line: the folder, the reason, and the command that corrects it."""
    path = shared(common, mode)
    with pytest.raises(OptionError, match=rf"FileStore: {path}: .* can write to it .*`{fix} {path}`") as raised:
        FileStore(path=path).connect("group", 0)
    assert "\n" not in str(raised.value)


def test_a_folder_below_one_that_bob_can_write_to_is_refused(common: Path) -> None:
    """Bob could replace it."""
    shared(common, 0o777)
    with pytest.raises(OptionError, match="FileStore's path names a folder elsewhere"):
        FileStore(path=common / "groups" / "mine").connect("group", 0)


def test_in_a_sticky_folder_a_group_of_bobs_is_not_joined(bob: Any, common: Path) -> None:
    """Bob has predicted the name of the group and created its folder first."""
    path = shared(common, 0o1777)
    bob.run(make_group, str(path), 0o777)
    with pytest.raises(OptionError, match=f"group must be a folder of user .* belongs to user {bob.uid}"):
        FileStore(path=path).connect("group", 0)
    bob.run(remove_group, str(path))
    connection = FileStore(path=path).connect("group", 0)
    assert connection.append(b"one", 0)
    assert connection.read(0, 0.0) == [b"one"]


def test_a_group_that_he_replaces_later_is_not_read(bob: Any, common: Path) -> None:
    """The path was safe when the ranks began, and became writable to bob later."""
    path = shared(common, 0o700)
    connection = FileStore(path=path).connect("group", 0)
    path.chmod(0o777)
    bob.run(swap, str(path))
    with pytest.raises(StoreError, match=f"log is no file of user {os.geteuid()} alone .owner {bob.uid}"):
        connection.read(0, 0.0)
    bob.run(remove_group, str(path))


def test_the_sweep_follows_no_link_of_his(bob: Any, common: Path, tmp_path: Path) -> None:
    """Behind his link are files of alice's that look like an abandoned call: they are not removed."""
    path = shared(common, 0o1777)
    treasure = tmp_path / "run" / "beats"
    treasure.parent.mkdir()
    treasure.write_bytes(b"")
    os.utime(treasure, (0, 0))
    tmp_path.chmod(0o755)
    bob.run(link_to, str(path / "old"), str(tmp_path))
    FileStore(path=path).connect("group", 0)
    assert treasure.exists()
    bob.run(give_up, str(path))
