"""The lock of a slot, and waiting for a change of a ring.

The lock is a robust, error-checking pthread mutex in the ring itself. The kernel frees it when its holder dies
(EOWNERDEAD): a step that was not yet visible was never done, so the next holder continues without repair. A stopped
holder keeps it; every other process waits no longer than its own bound.

Waiting uses futex(2); no thread polls.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.slots import NO_OWNER, SlotOwner
from nvrx_slurm.util.processes import runs, started_ticks

T = TypeVar("T")

LOCK_SLICE_S = 0.1  # a wait for a mutex is cut into such pieces: in between, Python's signal handlers run
_PROCESS_SHARED, _ROBUST, _ERRORCHECK = 1, 1, 2  # of pthread.h
_ATTRIBUTE_BYTES = 64

_quick = ctypes.PyDLL(None)  # keeps the interpreter's lock: these calls do not wait
_waiting = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_try_lock, _unlock, _make_consistent = (
    getattr(_quick, name) for name in ("pthread_mutex_trylock", "pthread_mutex_unlock", "pthread_mutex_consistent")
)
_try_lock.argtypes = _unlock.argtypes = _make_consistent.argtypes = (ctypes.c_void_p,)
# glibc has the one with a clock since 2.30; the other takes the wall clock, which may be set back during a wait.
_monotonic = hasattr(_waiting, "pthread_mutex_clocklock")
_lock_until = _waiting.pthread_mutex_clocklock if _monotonic else _waiting.pthread_mutex_timedlock
_lock_until.argtypes = (ctypes.c_void_p, *[ctypes.c_int] * _monotonic, ctypes.POINTER(_Timespec))
_initialize = _quick.pthread_mutex_init
_initialize.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


class Lock(NamedTuple):
    """One mutex. `key` names it: a process may have attached a ring twice, at two addresses."""

    address: int
    key: tuple[str, int]


class Contended(Exception):
    """Another thread or process has kept the lock for longer than the caller waits."""


def initialize(address: int) -> None:
    """Make a mutex there, once, before the ring has a name."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    for name, *value in (
        ("init",),
        ("setpshared", _PROCESS_SHARED),
        ("setrobust", _ROBUST),
        ("settype", _ERRORCHECK),
    ):
        if getattr(_quick, f"pthread_mutexattr_{name}")(attributes, *value):
            raise RingError(f"this system has no robust mutexes for processes (pthread_mutexattr_{name})")
    if _initialize(address, ctypes.addressof(attributes)):
        raise RingError("this system has no robust mutexes for processes (pthread_mutex_init)")


def holding(lock: Lock, act: Callable[[], T], patience_s: float) -> T:
    """What `act` returns, called while this thread has the lock. Raises Contended."""
    address = lock.address
    # A signal handler may raise between any two bytecodes. So the lock is taken inside of `try`, and after any
    # exception it is given back if this thread holds it, which an error-checking mutex can tell.
    try:
        if code := _try_lock(address):
            _take(lock, code, patience_s)
        outcome = act()
        _unlock(address)
        return outcome
    except BaseException:
        _give_back(lock)
        raise


def _take(lock: Lock, code: int, patience_s: float) -> None:
    """The slow path of `holding`: `code` is the error of the first attempt."""
    if code == errno.EBUSY and patience_s > 0:
        code = _wait(lock.address, time.monotonic() + patience_s)
    if code == 0:
        return
    if code == errno.EOWNERDEAD:
        # The holder died in the middle of a step. Nothing needs repair: what it had not made visible by the store of
        # the slot's word was never done.
        _make_consistent(lock.address)
    elif code in (errno.EBUSY, errno.ETIMEDOUT) or (code == errno.EDEADLK and _is_nested(lock)):
        raise Contended
    elif code != errno.EDEADLK:
        # After EDEADLK, this thread holds it already, by a step that was interrupted twice.
        raise RingError(f"the mutex of slot {lock.key[1]} of {lock.key[0]} is broken (error {code}): make a new ring")


def _wait(address: int, deadline: float) -> int:
    while True:
        clock = (time.CLOCK_MONOTONIC,) if _monotonic else ()
        slice_ns = int(min(LOCK_SLICE_S, deadline - time.monotonic()) * 1e9)
        now_ns = time.monotonic_ns() if _monotonic else time.time_ns()
        code = int(_lock_until(address, *clock, _Timespec(*divmod(now_ns + slice_ns, 10**9))))
        if code != errno.ETIMEDOUT or time.monotonic() >= deadline:
            return code


def _give_back(lock: Lock) -> None:
    """Release the lock after an exception, which may have come before it was taken, or after it was released."""
    # A signal handler may use the ring on top of a step that it has interrupted. Then this thread holds the lock for
    # the outer step, and the inner one must not release it.
    if _is_nested(lock):
        return
    code = _try_lock(lock.address)
    if code in (errno.EOWNERDEAD, errno.EDEADLK):
        _make_consistent(lock.address)
    if code in (0, errno.EOWNERDEAD, errno.EDEADLK):
        _unlock(lock.address)


def _is_nested(lock: Lock) -> bool:
    """Whether an interrupted step of this thread, further out on the stack, holds the lock, or is about to."""
    steps, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        steps += frame.f_code is holding.__code__ and frame.f_locals["lock"].key == lock.key
    return steps > 1


# A wait is no longer than this: a process that is killed just after a change wakes no one, and neither does a lease
# that lapses.
SLICE_S = 1.0
_SYSCALL = {"x86_64": 202, "aarch64": 98}
# Without FUTEX_PRIVATE_FLAG: each process has the ring at another address, so the kernel must compare the pages.
_WAIT, _WAKE_OP = 0, 5
_ALL = (1 << 31) - 1
_ADD_ONE = 1 << 28 | 1 << 12  # FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0): atomically, by the kernel

_number = _SYSCALL.get(platform.machine())


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


def wake_all(address: int) -> None:
    """Add one to the 4 bytes there, and wake all processes that wait on them: one system call for both."""
    _wake_syscall(_number, address, _WAKE_OP, _ALL, 0, address, _ADD_ONE)


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Wait until the 4 bytes there differ from `seen`. May return early: after `SLICE_S`, on a signal, or without
    a reason; the caller looks again."""
    # The kernel compares with `seen` and sleeps in one step, so a change between the caller's look and this call is
    # not missed.
    whole = min(max(timeout_s, 0.0), SLICE_S)
    seconds = int(whole)
    limit = _Timespec(seconds, int((whole - seconds) * 1e9))
    _wait_syscall(_number, address, _WAIT, seen, ctypes.byref(limit), None, 0)


SURE_S = 0.1  # a process that was alive so long ago is taken to be alive: /proc is not read again
_MOST_REMEMBERED = 1024

_numbers = itertools.count(1)
_open: dict[int, int] = {}  # by number: which ring, as `of`
_this_process: tuple[int, int] | None = None
_alive_at: dict[tuple[int, int], float] = {}


class OwnedAttempt:
    """One attempt of this process to read or to write. `of`: identifies one ring of this process."""

    owner = NO_OWNER  # until the constructor is over: a handler may cut it

    def __init__(self, of: int) -> None:
        self.owner = SlotOwner(*this_process(), next(_numbers))
        _open[self.owner.attempt] = of

    def __del__(self) -> None:
        _open.pop(self.owner.attempt, None)


def open_attempts(of: int) -> set[SlotOwner]:
    """The attempts of this process at one ring that are still open."""
    # Not of items: that makes tuples, and a garbage collection meanwhile may end an attempt.
    numbers = list(_open)
    return {SlotOwner(*this_process(), number) for number in numbers if _open.get(number) == of}


def this_process() -> tuple[int, int]:
    """This process's id, and when it began, in ticks. A forked child has its own."""
    global _this_process
    if _this_process is None:
        pid = os.getpid()
        try:
            ticks = started_ticks(pid)
        except OSError as error:
            raise RingError(f"/proc cannot be read: {error}") from None
        if ticks is None:
            raise RingError("/proc does not show this process: rings need it to find out which processes are alive")
        _this_process = (pid, ticks)
    return _this_process


def _after_fork() -> None:
    global _this_process
    _this_process = None


os.register_at_fork(after_in_child=_after_fork)


def namespace() -> int:
    """The inode of this process's namespace of process ids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError as error:
        raise RingError(f"rings need /proc to find out which processes are alive: {error}") from None


def is_dead(owner: SlotOwner) -> bool:
    """Whether this owner has ended: its process, or its attempt in this process."""
    process = (owner.pid, owner.started_ticks)
    # This process lives, but an exception may have ended the read or the write, and left the slot behind.
    if process == this_process():
        return owner.attempt not in _open
    now = time.monotonic()
    if now - _alive_at.get(process, -SURE_S) < SURE_S:
        return False
    try:
        if not runs(*process):
            return True
    except OSError:  # /proc cannot be read now, as with too many open files: that says nothing of the owner
        return False
    if len(_alive_at) >= _MOST_REMEMBERED:
        _alive_at.clear()
    _alive_at[process] = now
    return False
