"""Who owns a slot: attempts of processes, and whether one still lives.

An attempt lives as long as the object that stands for it (`OwnedAttempt`, held by a claim or a writing): what a
thread has lost by an exception is known to its own process at once, and to all others when the process has died.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.slots import NO_OWNER, SlotOwner
from nvrx_slurm.util.processes import started_ticks, stat_fields

SURE_S = 0.1
"""A process that was alive so long ago is taken to be alive: /proc is not read again."""

_STATE, _THREADS, _STARTED = 0, 17, 19  # places in `stat_fields`
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
    """Those of one ring of this process."""
    numbers = list(_open)  # of items, it would make tuples: a garbage collection meanwhile may end an attempt
    return {SlotOwner(*this_process(), number) for number in numbers if _open.get(number) == of}


def this_process() -> tuple[int, int]:
    """Its id, and when it began in ticks. After a fork it is another one."""
    global _this_process
    if _this_process is None:
        pid = os.getpid()
        ticks = started_ticks(pid)
        if ticks is None:
            raise RingError("/proc does not show this process: rings need it to tell who is alive")
        _this_process = (pid, ticks)
    return _this_process


def _after_fork() -> None:
    global _this_process
    _this_process = None


os.register_at_fork(after_in_child=_after_fork)


def namespace() -> int:
    """Of process ids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError as error:
        raise RingError(f"rings need /proc to tell who is alive: {error}") from None


def is_dead(owner: SlotOwner) -> bool:
    """Whether this owner has ended: its process, or its attempt in this process."""
    process = (owner.pid, owner.started_ticks)
    if process == this_process():
        return owner.attempt not in _open
    now = time.monotonic()
    if now - _alive_at.get(process, -SURE_S) < SURE_S:
        return False
    if not is_running(*process):
        return True
    if len(_alive_at) >= _MOST_REMEMBERED:
        _alive_at.clear()
    _alive_at[process] = now
    return False


def is_running(pid: int, ticks: int) -> bool:
    """Whether a thread of that process can still run. A zombie's cannot, unless only its first thread has ended."""
    fields = stat_fields(pid)
    if fields is None or int(fields[_STARTED]) != ticks:
        return False
    return fields[_STATE] not in "ZX" or int(fields[_THREADS]) > 1
