"""Waiting for a change of a ring, and telling of one (futex(2)). No thread waits by looking again and again."""

from __future__ import annotations

import ctypes
import platform

SLICE_S = 1.0
"""A wait is no longer than this: who was killed just after a change has told nobody, and a lease lapses silently."""

_SYSCALL = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE_OP = 0, 5
_ALL = (1 << 31) - 1
_ADD_ONE = 1 << 28 | 1 << 12  # FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0): atomically, by the kernel

_number = _SYSCALL.get(platform.machine())


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _bound(library: ctypes.CDLL, third: type) -> ctypes._FuncPointer:
    function = library.syscall
    number, pointer = ctypes.c_long, ctypes.c_void_p
    function.argtypes = (number, pointer, number, number, third, pointer, number)
    function.restype = ctypes.c_long
    return function


_wait_syscall = _bound(ctypes.CDLL(None), ctypes.POINTER(_Timespec))  # lets other threads run
_wake_syscall = _bound(ctypes.PyDLL(None), ctypes.c_long)


def is_supported() -> bool:
    return _number is not None


def tell(address: int) -> None:
    """The 4 bytes there grow by one, and all who wait on them wake up."""
    _wake_syscall(_number, address, _WAKE_OP, _ALL, 0, address, _ADD_ONE)


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Until the 4 bytes there are not `seen` any more, or the time is over, or a signal comes, or just so."""
    whole = min(max(timeout_s, 0.0), SLICE_S)
    seconds = int(whole)
    limit = _Timespec(seconds, int((whole - seconds) * 1e9))
    _wait_syscall(_number, address, _WAIT, seen, ctypes.byref(limit), None, 0)
