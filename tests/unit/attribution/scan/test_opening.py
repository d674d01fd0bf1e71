"""Files that change while they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_slurm.attribution.scan.files import Unreadable, opened, pieces


def test_growing(tmp_path: Path) -> None:
    """A file that grows faster than it is read is read up to the size that it had when reading began."""
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 1000)
    read = 0
    with opened(path) as file, path.open("ab") as writer:
        for piece in pieces(file, 100):
            read += len(piece)
            writer.write(b"y" * 200)
            writer.flush()
    assert read == 1000


def test_cut(tmp_path: Path) -> None:
    """A file that is truncated while it is read gives what was read before, and an error that says how much is
    missing."""
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 1000)
    with opened(path) as file:
        stream = pieces(file, 100)
        assert len(next(stream)) == 100
        os.truncate(path, 0)
        with pytest.raises(Unreadable, match="900 bytes are missing"):
            next(stream)


def test_removed(tmp_path: Path) -> None:
    """A file that is removed while it is read is read to its end."""
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 1000)
    with opened(path) as file:
        path.unlink()
        assert len(b"".join(pieces(file, 100))) == 1000
