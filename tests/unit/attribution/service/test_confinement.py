"""No path leads to a file outside of the roots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvrx_slurm.attribution.service.confinement import OutsideRoots, Roots, existing, has_landlock
from nvrx_slurm.errors import UsageError

PARTS = ("a", "b", "f", "..", ".", "", "out", "in", "up", "loop", "roots", "root", "rootless", "secret", "none", "\0")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root with folders and symlinks in, out and around, a neighbour whose name begins alike, and a secret."""
    room = tmp_path_factory.mktemp("tree").resolve()
    for folder in ("root/a/b", "rootless/a"):
        (room / folder).mkdir(parents=True)
    for file in ("root/f", "root/a/f", "root/a/b/f", "rootless/f", "secret"):
        (room / file).write_text(file)
    for link, target in (
        ("root/out", "../secret"),
        ("root/a/out", str(room / "rootless")),
        ("root/in", "a/b"),
        ("root/a/in", str(room / "root/f")),
        ("root/up", ".."),
        ("root/a/up", "../.."),
        ("root/loop", "loop"),
        ("rootless/a/in", str(room / "root")),
        ("roots", "root"),
    ):
        (room / link).symlink_to(target)
    yield room


def _opened(path: str) -> str | None:
    """The path that the kernel opens; None: it opens none."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except (OSError, ValueError):
        return None
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    finally:
        os.close(descriptor)


@settings(max_examples=500)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8), start=st.sampled_from(("root/", "rootless/", "roots/", ""))
)
def test_no_way_out(tree: Path, parts: list[str], start: str) -> None:
    """A path is allowed if, and for paths that exist only if, the kernel follows it to a place below the root."""
    path = f"{tree}/{start}{'/'.join(parts)}"
    try:
        Roots([tree / "root"]).check(path)
        allowed = True
    except OutsideRoots:
        allowed = False
    got = _opened(path)
    if got is not None:
        assert allowed == (got == f"{tree}/root" or got.startswith(f"{tree}/root/")), (path, got)


@settings(max_examples=200)
@given(text=st.text(max_size=40), is_below=st.booleans())
@example(text="a", is_below=True)
def test_any_text(tree: Path, text: str, is_below: bool) -> None:
    """Any text is either refused or leads below the root; no other error is raised."""
    path = f"{tree}/root/{text}" if is_below else text
    try:
        Roots([tree / "root"]).check(path)
    except OutsideRoots:
        return
    assert f"{os.path.realpath(path)}/".startswith(f"{tree}/root/"), path


TRY = """\
import sys
from pathlib import Path
from nvrx_slurm.attribution.scan.files import Unreadable, opened
from nvrx_slurm.attribution.service import confinement
if sys.argv[1] == "reader":
    confinement.has_landlock = lambda: False
confinement.confine(confinement.Roots([Path(sys.argv[2])]))
for path in map(Path, sys.argv[3:]):
    try:
        if path.is_dir():
            print(len(list(path.iterdir())))
        else:
            with opened(path) as file:
                print(file.read().decode())
    except (PermissionError, Unreadable):
        print("refused")
import wave, zoneinfo  # what a worker imports later is still found
zoneinfo.ZoneInfo("Europe/Berlin") if zoneinfo.available_timezones() else None
"""


def _tries(how: str, root: Path, *paths: Path) -> list[str]:
    argv = [sys.executable, "-P", "-c", TRY, how, str(root), *map(str, paths)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.split()


@pytest.mark.parametrize("how", ["kernel", "reader"])
def test_confined_process(tree: Path, how: str) -> None:
    """A confined process reads logs below the root, and no symlink leads it out."""
    if how == "kernel" and not has_landlock():
        pytest.skip("this kernel has no Landlock")
    root = tree / "root"
    logs = (root / "f", root / "in" / "f", root / "a" / "b", root / "out", root / "a/out/f", tree / "secret")
    assert _tries(how, root, *logs) == ["root/f", "root/a/b/f", "1", *["refused"] * 3]
    if how == "kernel":
        assert _tries(how, root, tree) == ["refused"]


@pytest.mark.parametrize("how", ["kernel", "reader"])
def test_swapped_while_looking(tree: Path, how: str) -> None:
    """A worker refuses a file that was replaced by a symlink after it was checked."""
    if how == "kernel" and not has_landlock():
        pytest.skip("this kernel has no Landlock")
    log = tree / "root" / "swapped"
    log.write_text("fine")
    Roots([tree / "root"]).check(str(log))
    log.unlink()
    log.symlink_to(tree / "secret")
    try:
        assert _tries(how, tree / "root", log) == ["refused"]
    finally:
        log.unlink()


@pytest.mark.parametrize("root", ["/", "nowhere", "file"])
def test_bad_root(tmp_path: Path, root: str) -> None:
    """A root that does not exist, is no folder, or is `/` is refused at the start."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--root .*name"):
        existing([tmp_path / root])
