"""What may be read: only what lies below the allowed roots, wherever a path leads.

Checked three times: the paths of an inquiry, when it arrives; each log file when a worker has opened it; and every
file by the kernel while a worker opens it, if the kernel has Landlock (Linux 5.13; landlock(7)). The kernel checks
the file that is opened: no symlink and no rename gets around it, and no code in the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from nvrx_slurm.attribution.scan import files
from nvrx_slurm.errors import UsageError

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime")
_DEVICES = (Path("/dev/null"), Path("/dev/urandom"), Path("/proc"))

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_OF_VERSION_1 = (1 << 13) - 1  # all that the first version knows: reading, writing, making and removing
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE

_libc = ctypes.CDLL(None, use_errno=True)


class OutsideRoots(Exception):
    """A path leads out of the allowed roots."""


class Roots:
    """Folders below which everything may be read. They are resolved once, when the service starts."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self.paths = tuple(Path(os.path.realpath(root)) for root in roots)

    def check(self, path: str) -> None:
        """Follow a path to its end, as far as it exists. Raises OutsideRoots."""
        if not path.startswith("/"):
            raise OutsideRoots(f"{path!r} is no absolute path")
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError) as error:  # a loop of symlinks is none; a NUL is one
            raise OutsideRoots(f"{path!r} is no path: {error}") from None
        if not self.hold(real):
            raise OutsideRoots(f"{path!r} does not lie below an allowed root ({', '.join(map(str, self.paths))})")

    def hold(self, real: str) -> bool:
        """Whether a path without symlinks and `..` lies below a root, or is one."""
        return any(real == root or real.startswith(root + "/") for root in map(os.fspath, self.paths))


def existing(roots: Sequence[Path]) -> Roots:
    """Raises UsageError for a root that is no folder, or is everything."""
    for root in roots:
        if not root.is_dir():
            raise UsageError(f"--root {root}: no such folder; name one that holds the logs of jobs")
        if os.path.realpath(root) == "/":
            raise UsageError(f"--root {root}: that is the whole machine; name the folders that hold the logs of jobs")
    return Roots(roots)


def has_landlock() -> bool:
    """Whether this machine's kernel has Landlock, and has it enabled."""
    return int(_libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)) > 0


def confine(roots: Roots, rules: Iterable[Path] = ()) -> bool:
    """From here on this process opens nothing but what lies below the roots, these rule files, and Python itself.

    It cannot be undone. Call it before the first thread starts. Returns False where the kernel has no Landlock: then
    only the log files are checked, after they are opened.
    """
    files.readable = roots.hold
    if not has_landlock():
        return False
    # What Python, its packages and this one are made of.
    places = sysconfig.get_paths()
    python = [places[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = str(Path(__file__).parents[2])
    program = [Path(os.path.realpath(path)) for path in (*python, sys.prefix, sys.base_prefix, own, *_SYSTEM)]
    # No right of a later version: an older kernel refuses those that it does not know (EINVAL).
    handled = ctypes.c_uint64(_OF_VERSION_1)
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0))
    try:
        for access, paths in (
            (_READ_FILE | _READ_DIR, (*roots.paths, *rules, *_DEVICES)),
            (_READ_FILE | _READ_DIR | _EXECUTE, program),
            (_READ_FILE | _WRITE_FILE, (Path("/dev/null"),)),
        ):
            for path in paths:
                try:
                    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
                except OSError:  # a path that does not exist allows nothing
                    continue
                try:
                    rule = _PathBeneath(access if path.is_dir() else access & _OF_A_FILE, opened)
                    _checked(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
                finally:
                    os.close(opened)
        # landlock_restrict_self(2) demands it of a process without CAP_SYS_ADMIN.
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return int(result)
