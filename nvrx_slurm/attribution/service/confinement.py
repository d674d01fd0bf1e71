"""What may be read: only what lies below the allowed roots, wherever a path leads.

Looked at three times: the paths of an inquiry, when it comes in; each file and folder when a worker opens it, with
its symlinks resolved; and by the kernel while it opens them, where it has Landlock. The second alone leaves a moment
between look and opening in which somebody who may write below a root could put a symlink there; the third does not.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.service import landlock
from nvrx_slurm.errors import UsageError

_READS = frozenset({"open", "os.scandir", "os.listdir"})
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime")
_DEVICES = (Path("/dev/null"), Path("/dev/urandom"), Path("/proc"))


class Outside(Exception):
    """A path leads out of the allowed roots."""


class Roots:
    """Folders below which everything may be read. They are resolved once, when the service starts."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self.paths = tuple(Path(os.path.realpath(root)) for root in roots)

    def check(self, path: str) -> None:
        """Follow a path to its end, as far as it is there. Raises Outside."""
        if not path.startswith("/"):
            raise Outside(f"{path!r} is no absolute path")
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError) as error:  # a loop of symlinks is none; a NUL is one
            raise Outside(f"{path!r} is no path: {error}") from None
        if not self.hold(real):
            raise Outside(f"{path!r} does not lie below an allowed root ({', '.join(map(str, self.paths))})")

    def hold(self, real: str) -> bool:
        """Whether a path without symlinks and `..` lies below a root, or is one."""
        return any(_is_below(real, os.fspath(root)) for root in self.paths)


def existing(roots: Sequence[Path]) -> Roots:
    """Raises UsageError for a root that is no folder, or is everything."""
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"--root {root}: no such folder; name one that holds the logs of jobs")
        if os.path.realpath(root) == "/":
            raise UsageError(f"--root {root}: that is the whole machine; name the folders that hold the logs of jobs")
    return Roots(roots)


def confine_by_kernel(roots: Roots, files: Iterable[Path] = ()) -> bool:
    """From here on this process opens nothing but what lies below the roots, these files, and Python itself.

    Call it before the first thread starts. Returns False where the kernel cannot.
    """
    if not landlock.is_available():
        return False
    readable = (*roots.paths, *files, *_DEVICES)
    landlock.restrict(readable=readable, runnable=_program(), writable=[Path("/dev/null")])
    return True


def confine_by_hook(roots: Roots, files: Iterable[Path] = ()) -> None:
    """The same as far as Python can see to it: whatever else is opened raises PermissionError that says why."""
    everything = Roots((*roots.paths, *files, *_DEVICES, *_program()))

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _READS and isinstance(arguments[0], (str, bytes, os.PathLike)):
            real = os.path.realpath(os.fsdecode(arguments[0]))
            if not everything.hold(real):
                raise PermissionError(f"{real} does not lie below an allowed root")

    sys.addaudithook(on_event)


def _program() -> tuple[Path, ...]:
    """What Python, its packages and this one are made of."""
    places = sysconfig.get_paths()
    named = [places[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = Path(__file__).parents[2]
    paths = (*named, sys.prefix, sys.base_prefix, str(own), *_SYSTEM)
    return tuple(Path(os.path.realpath(path)) for path in paths)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")
