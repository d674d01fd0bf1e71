"""Names that bob can foresee in /dev/shm: he takes them first, and alice's ranks have their store all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store import keeper
from nvrx_slurm.inprocess.store.keeper import MOST_FOLDERS, VALKEY, hosted
from nvrx_slurm.inprocess.store.redis import RedisStore

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
    """All that is his there."""
    for path in Path(folder).iterdir():
        if path.lstat().st_uid == os.geteuid():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


# ---- alice


@pytest.fixture
def root(bob: Any, common: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What /dev/shm is to this test: sticky, and any user can make files there. This process is rank 0 of 1."""
    root = common / "shm"
    root.mkdir()
    root.chmod(0o1777)
    monkeypatch.setattr(keeper, "RUNTIME_ROOTS", (root,))
    for name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "NVRX_STORE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    yield root
    bob.run(give_up, str(root))
    for folder in root.glob("nvrx-inprocess-*/*"):
        if (place := keeper._read(folder)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.keeper, signal.SIGKILL)


@pytest.fixture
def name(root: Path) -> Path:
    """What alice's ranks would take first."""
    return root / f"nvrx-inprocess-{os.geteuid()}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_starts_whatever_has_its_name(bob: Any, name: Path, kind: str) -> None:
    """All ranks find the same one, in a folder that only alice can enter. What is bob's stays as it is."""
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


def test_a_name_that_he_gives_up_splits_no_group(bob: Any, name: Path) -> None:
    """Ranks that come later use the folder of those that came first."""
    bob.run(take, str(name), "folder")
    first = hosted(VALKEY, "group", patience_s=10.0)
    bob.run(give_up, str(name.parent))
    assert hosted(VALKEY, "group", patience_s=10.0) == first


def test_where_he_has_taken_all_names_alice_hears_his(bob: Any, name: Path) -> None:
    """One line: whose they are, and what to do."""
    names = [str(name), *(f"{name}.{number}" for number in range(1, MOST_FOLDERS))]
    bob.run(take_all, names)
    with pytest.raises(StoreError, match=f"they belong to {bob.uid}. Remove them or have them removed") as raised:
        hosted(VALKEY, "group", patience_s=10.0)
    assert "\n" not in str(raised.value)
