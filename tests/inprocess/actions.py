"""What a rank of a scenario can do, by name: the faults, and other behaviour around a restart.

An action runs in the rank's own process, at the point of the call that the scenario names. An action that waits does
so until it is interrupted or killed. An action of WHEN_RESTARTED reports by itself when it is ready for the restart.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nvrx_slurm.inprocess.exception import RankDiscarded, RankShouldRestart, RestartAbort

POLL_S = 0.02
"""The longest time that the main thread spends outside Python while it waits: it makes progress."""

AFTER_LONG_S = 10.0
"""Longer than the timeouts of any scenario that uses it."""


class ScenarioError(Exception):
    """The exception that a scenario raises."""


class PartsError(Exception):
    """Its constructor needs three arguments: neither its text nor its class is enough to build it again."""

    def __init__(self, where: str, code: int, *, why: str) -> None:
        super().__init__(f"{where}: {why} ({code})")


class OwnExit(BaseException):
    """A BaseException of the user's own."""


def raise_fault() -> NoReturn:
    raise ScenarioError("a fault of the scenario")


def raise_parts() -> NoReturn:
    raise PartsError("layer 3", 7, why="overflow")


def raise_base() -> NoReturn:
    raise OwnExit("a BaseException of the scenario")


def raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt


def raise_abort() -> NoReturn:
    raise RestartAbort("no further attempt")


def raise_discarded() -> NoReturn:
    raise RankDiscarded("no place for this rank")


def raise_undecodable() -> NoReturn:
    """As an error about a file whose name is not UTF-8."""
    raise ScenarioError("no such file: caf\udce9.bin")


def raise_long() -> NoReturn:
    """As an error that quotes a tensor, in a function whose source line is just as long."""
    raise ScenarioError("0123456789abcdef" * (1 << 18))


def raise_nested() -> NoReturn:
    """Errors that are each other's cause, one of which cannot be formatted."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ScenarioError

    first, second = Unspeakable(), ScenarioError("the other")
    first.__cause__, second.__cause__ = second, first
    raise ExceptionGroup("several", [first, second])


def raise_restart() -> NoReturn:
    """An exception that only the group raises, as if a thread had kept one since the last restart."""
    raise RankShouldRestart


def fork_and_exit() -> None:
    """Fork a child that ends as a program does, through all the handlers that it has inherited."""
    child = os.fork()
    if child == 0:
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 7:
        raise ScenarioError(f"the child has ended with {status}")


_aborting = threading.Event()


def abort_at_length() -> None:
    """An abort that is still running when the function has ended."""
    _aborting.set()
    threading.Event().wait(1.0)


def raise_base_in_abort() -> NoReturn:
    _aborting.wait()
    raise_base()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    """Crash, as by a programming error in a C library."""
    ctypes.string_at(0)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_monitor() -> None:
    """Kill the monitor and go on: the kernel then kills this rank."""
    os.kill(monitor_pid(), signal.SIGKILL)
    threading.Event().wait()


def stop_with_monitor() -> None:
    """Stop rank and monitor at the same moment, as when a host freezes."""
    os.kill(monitor_pid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_monitor() -> None:
    """Stop the monitor alone."""
    os.kill(monitor_pid(), signal.SIGSTOP)
    threading.Event().wait()


def slow_monitor() -> None:
    """Stop the monitor for long as soon as it exists, so that it starts slowly."""
    threading.Thread(target=_stop_child_for_long, daemon=True).start()


def _stop_child_for_long() -> None:
    waiting = threading.Event()
    while not (pids := children(os.getpid())):
        waiting.wait(0.001)
    os.kill(pids[0], signal.SIGSTOP)
    waiting.wait(AFTER_LONG_S)
    os.kill(pids[0], signal.SIGCONT)


def block() -> None:
    """The main thread makes no progress; other threads can run."""
    threading.Event().wait()


def block_in_read() -> None:
    reader, writer = os.pipe()
    try:
        os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


def hold_gil() -> None:
    """A C library deadlocks and never releases the GIL: no thread of Python runs again."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def hold_gil_deaf() -> None:
    """The same in a process with a handler for SIGTERM, which can never run."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    hold_gil()


def hold_gil_until_terminated() -> None:
    """A C library that holds the GIL until SIGTERM interrupts it, and then returns as if nothing had happened."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    ctypes.PyDLL(None).pause()


def exit_when_restarted(ready: Callable[[], None]) -> NoReturn:
    """End by SystemExit at the moment when the group restarts anyway."""
    try:
        ready()
        threading.Event().wait()
    finally:
        sys.exit(3)


def abort_when_restarted(ready: Callable[[], None]) -> NoReturn:
    """Raise RestartAbort at the moment when the group restarts anyway."""
    try:
        ready()
        threading.Event().wait()
    finally:
        raise_abort()


def swallow(ready: Callable[[], None]) -> None:
    """Catch every exception, several times, and carry on."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            ready()
            threading.Event().wait()
    threading.Event().wait()


def swallow_for_ever(ready: Callable[[], None]) -> None:
    """Catch every exception, without end, while the main thread makes progress all the time."""
    with contextlib.suppress(BaseException):
        ready()
    while True:
        with contextlib.suppress(BaseException):  # an exception between two iterations of the inner loop
            while True:
                with contextlib.suppress(BaseException):
                    threading.Event().wait(POLL_S)


def swallow_in_del(ready: Callable[[], None]) -> None:
    """Be interrupted in finalizers, where Python drops the exception."""

    class Slow:
        def __del__(self) -> None:
            ready()
            threading.Event().wait()

    for _ in range(3):
        slow = Slow()
        del slow
    threading.Event().wait()


def wait_in_finalizers(ready: Callable[[], None]) -> None:
    """Create and drop objects whose finalizers wait: the main thread is almost always in one of them."""

    class Waits:
        def __del__(self) -> None:
            threading.Event().wait(0.5)

    ready()
    while True:
        Waits()


def replace_by_own(ready: Callable[[], None]) -> None:
    """Replace the exception of the restart by the user's own."""
    try:
        ready()
        threading.Event().wait()
    except BaseException as error:
        raise ScenarioError("while cleaning up") from error


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": raise_fault,
    "raise parts": raise_parts,
    "raise base": raise_base,
    "raise interrupt": raise_interrupt,
    "raise abort": raise_abort,
    "raise discarded": raise_discarded,
    "exit": lambda: sys.exit(3),
    "quit": lambda: os._exit(5),
    "raise undecodable": raise_undecodable,
    "raise long": raise_long,
    "raise nested": raise_nested,
    "raise restart": raise_restart,
    "fork and exit": fork_and_exit,
    "abort at length": abort_at_length,
    "raise base in abort": raise_base_in_abort,
    "kill": kill_self,
    "crash": crash,
    "stop": stop_self,
    "kill monitor": kill_monitor,
    "stop monitor": stop_monitor,
    "stop with monitor": stop_with_monitor,
    "slow monitor": slow_monitor,
    "block": block,
    "block in read": block_in_read,
    "hold gil": hold_gil,
    "hold gil deaf": hold_gil_deaf,
    "hold gil until terminated": hold_gil_until_terminated,
}

WHEN_RESTARTED: dict[str, Callable[[Callable[[], None]], None]] = {
    "abort when restarted": abort_when_restarted,
    "exit when restarted": exit_when_restarted,
    "swallow": swallow,
    "swallow for ever": swallow_for_ever,
    "swallow in del": swallow_in_del,
    "replace": replace_by_own,
    "wait in finalizers": wait_in_finalizers,
}
"""How a rank reacts to a restart that another rank has caused."""


def monitor_pid() -> int:
    """The pid of this process's only child: its monitor."""
    (pid,) = children(os.getpid())
    return pid


def children(pid: int) -> list[int]:
    """The live children of all threads of a process."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children_of(task)]
    return [child for child in found if _state(child) not in "ZX"]


def _children_of(task: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
        return (task / "children").read_text().split()
    return []


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return re.sub(r".*\) ", "", Path(f"/proc/{pid}/stat").read_text(), flags=re.DOTALL)[0]
    return "X"
