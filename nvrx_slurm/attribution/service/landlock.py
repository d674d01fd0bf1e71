"""The kernel's own fence around what a process may open (Linux 5.13 and newer; landlock(7)).

Checked at the moment of the opening, on the file that is opened: no symlink and no rename gets around it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_OF_VERSION_1 = (1 << 13) - 1  # all that the first version knows: reading, writing, making and removing
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE

_libc = ctypes.CDLL(None, use_errno=True)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def is_available() -> bool:
    """Whether this machine's kernel has it, and has it turned on."""
    return int(_libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)) > 0


def restrict(*, readable: Iterable[Path], runnable: Iterable[Path] = (), writable: Iterable[Path] = ()) -> None:
    """From here on this thread, and all that it starts, opens nothing but what lies below these. Raises OSError.

    A path that is not there allows nothing. It cannot be undone.
    """
    handled = ctypes.c_uint64(_OF_VERSION_1)
    rules = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0))
    try:
        for access, paths in (
            (_READ_FILE | _READ_DIR, readable),
            (_READ_FILE | _READ_DIR | _EXECUTE, runnable),
            (_READ_FILE | _WRITE_FILE, writable),
        ):
            for path in paths:
                _allow(rules, path, access)
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathBeneath(access if path.is_dir() else access & _OF_A_FILE, opened)
        _checked(_libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(opened)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return int(result)
