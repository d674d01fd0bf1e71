"""The file of a ring: it is created whole, refused if it is not this user's or namespace's, and swept when no process
uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.ring import SharedRing, is_gone, sweep
from nvrx_slurm.transport.ring_file import Creator, Header, RingShape, checked, made_by
from nvrx_slurm.transport.ring_locks import namespace, this_process
from nvrx_slurm.util.processes import runs

NAME = "nvrx-ring-1-1-abc"
SHAPE = RingShape(2, 100, overwrite=True, checksum=False, lease_ns=5)


def ring_file(folder: Path, creator: Creator, *, size: int | None = None) -> Path:
    """The file of a ring with this creator."""
    path = folder / NAME
    path.write_bytes(Header(creator, SHAPE).pack().ljust(256, b"\0"))
    path.chmod(0o600)
    os.truncate(path, checked(2, 100).total_bytes if size is None else size)
    return path


def dead() -> Creator:
    """A process of this namespace that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    process.communicate()
    return Creator(process.pid, int(fields[19]), namespace())


def test_a_header_survives_its_file() -> None:
    """Unpacking a packed header gives the same header."""
    header = Header(Creator(1, 2, 3), SHAPE)
    assert Header.unpack(header.pack().ljust(128, b"\0"), NAME) == header


def test_it_is_private_and_has_all_its_memory() -> None:
    """Its mode is 0600, and all its memory is allocated: no write can fail for a missing page."""
    with SharedRing.create(2, 1 << 20) as ring:
        status = Path("/dev/shm", ring.name).stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 >= status.st_size > 2 << 20


def test_a_full_file_system_is_an_error() -> None:
    """A ring larger than /dev/shm is refused: the error has the sizes and says what to do, and no file is left."""
    room = os.statvfs("/dev/shm")
    with pytest.raises(RingError, match=r"does not fit in /dev/shm, which has \d+ free"):
        SharedRing.create(2, room.f_blocks * room.f_frsize)
    assert not list(Path("/dev/shm").glob(f"nvrx-ring-{os.getpid()}-*"))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="cannot be made"):
        SharedRing.create(2, 64, folder=tmp_path / "none")


def test_a_ring_in_another_folder(tmp_path: Path) -> None:
    """The handle has the folder."""
    with SharedRing.create(2, 64, folder=tmp_path) as ring:
        other = SharedRing.attach(ring.handle)
        assert other.read(ring.write_raw(b"x")) == b"x"
        other.close()
        assert [path.name for path in tmp_path.iterdir()] == [ring.name]
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_is_of_the_time_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the working folder the ring can still be attached and removed."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with SharedRing.create(1, 8, folder="sub") as ring:
        monkeypatch.chdir("/")
        SharedRing.attach(ring.handle).close()
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_ring_of_another_namespace_is_refused(tmp_path: Path) -> None:
    """Process ids and robust locks are not valid there."""
    ring_file(tmp_path, Creator(*this_process(), namespace() + 1))
    with pytest.raises(RingError, match="another namespace"):
        SharedRing.attach(NAME, folder=tmp_path)


@pytest.mark.parametrize("content", [b"", b"something else" * 100, b"nvrxring" + b"\xff" * 200])
def test_a_file_that_is_no_ring(tmp_path: Path, content: bytes) -> None:
    """It is neither attached nor swept."""
    (tmp_path / NAME).write_bytes(content)
    (tmp_path / NAME).chmod(0o600)
    with pytest.raises(RingError, match=r"is not a ring|of version"):
        SharedRing.attach(NAME, folder=tmp_path)
    assert sweep(tmp_path) == []


def test_a_ring_that_was_cut(tmp_path: Path) -> None:
    """Reading its mapping would raise SIGBUS."""
    ring_file(tmp_path, Creator(*this_process(), namespace()), size=4096)
    with pytest.raises(RingError, match="has 4096 bytes where its header says"):
        SharedRing.attach(NAME, folder=tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = ring_file(tmp_path, Creator(*this_process(), namespace()))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RingError, match="cannot be attached"):
        SharedRing.attach(NAME, folder=tmp_path)


def test_sweeping(tmp_path: Path) -> None:
    """The ring of a dead creator is removed; one of a living creator, or of any in another namespace, stays."""
    gone = dead()
    for creator, stays in (
        (gone, False),
        (gone._replace(namespace=gone.namespace + 1), True),
        (Creator(*this_process(), namespace()), True),
        (Creator(os.getpid(), this_process()[1] - 1, namespace()), False),  # an earlier process had this pid
    ):
        path = ring_file(tmp_path, creator)
        assert is_gone(NAME, tmp_path) is not stays
        assert sweep(tmp_path) == ([] if stays else [NAME])
        assert path.exists() is stays
        path.unlink(missing_ok=True)


def test_making_a_ring_sweeps(tmp_path: Path) -> None:
    path = ring_file(tmp_path, dead())
    with SharedRing.create(1, 64, folder=tmp_path):
        assert not path.exists()


def test_a_later_version_is_swept_and_not_attached(tmp_path: Path) -> None:
    """The fields that identify the creator are the same in all versions."""
    path = ring_file(tmp_path, dead())
    data = bytearray(path.read_bytes())
    data[8:12] = (99).to_bytes(4, sys.byteorder)
    path.write_bytes(data)
    assert made_by(bytes(data))[1] == 99
    with pytest.raises(RingError, match="version 99"):
        SharedRing.attach(NAME, folder=tmp_path)
    assert sweep(tmp_path) == [NAME]


def test_a_zombie_does_not_run() -> None:
    """A process that has ended and was not waited for can do nothing more."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    assert runs(process.pid, int(fields[19]))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not runs(process.pid, int(fields[19]))
    process.communicate()
