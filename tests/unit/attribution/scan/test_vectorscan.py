"""Compiled rules are kept for the next process, and compiled again if they cannot be used."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan.prefilter import Prefilter, Searcher
from nvrx_slurm.attribution.scan.vectorscan import digest_of, literals, selective
from nvrx_slurm.journal.sealed import SealedFolder
from tests.unit.attribution.scan.logs import CATALOGUE, rule

OOM = b"torch.OutOfMemoryError: CUDA out of memory"


@pytest.fixture
def kept(tmp_path: Path) -> SealedFolder:
    return SealedFolder(tmp_path / "cache" / "rules", 3)


def files(kept: SealedFolder) -> list[Path]:
    return sorted(kept.path.iterdir())


def finds(kept: SealedFolder, catalogue: Catalogue = CATALOGUE) -> list[int]:
    return Searcher(Prefilter(catalogue, kept)).present(OOM)


def test_kept(kept: SealedFolder) -> None:
    """Rules that were compiled once are loaded from then on, and find the same."""
    first = finds(kept)
    written = files(kept)[0].stat()
    assert finds(kept) == first == [0]
    assert files(kept)[0].stat().st_ino == written.st_ino
    assert written.st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "torn",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b"x", b"y"),
        lambda data: b"\0" * 99,
    ],
    ids=["empty", "cut off", "changed", "a hole"],
)
def test_torn(kept: SealedFolder, torn: Callable[[bytes], bytes]) -> None:
    """If the kept file was changed, the rules are compiled again."""
    first = finds(kept)
    file = files(kept)[0]
    whole = file.read_bytes()
    file.write_bytes(torn(whole))
    assert finds(kept) == first
    assert file.read_bytes() == whole


def test_of_another_library(kept: SealedFolder) -> None:
    """If this library refuses the whole kept file, the rules are compiled again."""
    first = finds(kept)
    name = files(kept)[0].name
    kept.put(name, b"what another version kept")
    assert finds(kept) == first
    assert kept.get(name) != b"what another version kept"


def test_other_rules(kept: SealedFolder) -> None:
    """Other rules have their own files, of which the last used are kept."""
    for number in range(5):
        assert finds(kept, Catalogue((rule("oom", f"memory|{number}xxx", "memory", f"{number}xxx"),))) == [0]
    assert len(files(kept)) == 3


@pytest.mark.parametrize("place", ["/proc/nvrx", "/dev/null/nvrx", "relative"])
def test_nowhere_to_keep(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing can be kept, the rules are compiled each time."""
    monkeypatch.chdir(tmp_path)
    assert finds(SealedFolder(Path(place), 3)) == [0]
    assert not list(tmp_path.iterdir())


def test_on_a_read_only_file_system(kept: SealedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept file is loaded even if its time of use cannot be written."""
    kept.put("name", b"kept")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert kept.get("name") == b"kept"


def test_a_folder_of_others(kept: SealedFolder) -> None:
    """A file that other users could have written is not read."""
    finds(kept)
    kept.path.chmod(0o770)
    assert kept.get(files(kept)[0].name) is None
    assert finds(kept) == [0]


def test_named_by_the_rules() -> None:
    """Everything that a search depends on is part of the file's name."""
    one = rule("oom", "memory", "memory")
    others = [
        rule("oom", "memory?", "memory"),
        rule("oom", "memory", "mem"),
        rule("oom", "memory", "memory", ignore_case=True),
    ]
    assert len({digest_of([each], selective) for each in (one, *others)}) == 4
    assert digest_of([one], selective) == digest_of([rule("renamed", "memory", "memory")], selective)
    assert digest_of([one], selective) != digest_of([one], literals)
