"""The process table, read from /proc: who descends from whom, who belongs to what; and freezing and killing for sure.

A process is named by its pid and its start time together, so that one whose pid was given to another since is never
signalled in its place. A zombie counts as dead: PID 1 of a container may never reap it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from nvrx_slurm.errors import NvrxError, WaitTimeout
from nvrx_slurm.journal.records import Record
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import boot_id, hold
from nvrx_slurm.util.processes import environment_of as environment_of
from nvrx_slurm.util.processes import send as send_to_held

T = TypeVar("T")

_PROC = Path("/proc")
_FREEZE_ROUNDS = 50
_STOP_TIMEOUT_S = 10.0
_DEATH_TIMEOUT_S = 10.0


class Identity(Record, frozen=True, kw_only=True):
    """One process, for good: `started` is in clock ticks since the boot named by `boot`."""

    pid: int
    started: int
    boot: str


@dataclass(frozen=True)
class Process:
    """One line of the process table. `state` is the letter that ps shows: Z and X are dead, T is stopped."""

    pid: int
    parent: int
    state: str
    started: int
    program: str

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


Table = Mapping[int, Process]


def read_table() -> dict[int, Process]:
    """Every live process of the machine that can be seen, by pid."""
    found = (_read_process(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return {process.pid: process for process in found if process and process.alive}


def _read_process(pid: int) -> Process | None:
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text(errors="replace"))
    except OSError:  # it ended meanwhile
        return None


def parse_stat(text: str) -> Process:
    """A line of /proc/PID/stat, see proc(5). The program's name may itself hold spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    pid, _, program = head.partition(" (")
    fields = tail.split()
    return Process(pid=int(pid), parent=int(fields[1]), state=fields[0], started=int(fields[19]), program=program)


def descendants(table: Table, roots: Iterable[int], barrier: Iterable[int] = ()) -> set[int]:
    """The roots that live, and all below them. The walk neither enters nor passes a pid of `barrier`."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    stop, found = set(barrier), set[int]()
    pending = [pid for pid in roots if pid in table]
    while pending:
        pid = pending.pop()
        if pid not in found and pid not in stop:
            found.add(pid)
            pending += children.get(pid, [])
    return found


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None when there is none."""
    process = _read_process(pid)
    return Identity(pid=pid, started=process.started, boot=boot_id()) if process else None


def lives(identity: Identity, table: Table | None = None) -> bool:
    """Whether exactly this process still runs (stopped counts as running)."""
    process = _read_process(identity.pid) if table is None else table.get(identity.pid)
    return (
        process is not None and process.alive and process.started == identity.started and identity.boot == boot_id()
    )


def is_own(pid: int) -> bool:
    """Whether this user started the process. What a process says of itself, in its environment for one, any user can
    say; the kernel's word is its real user id."""
    try:
        status = (_PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    return f"\nUid:\t{os.getuid()}\t" in status


def marked(table: Table, variable: str, value: str) -> set[int]:
    """The processes of this user whose environment has the variable with this value. Children inherit it, also those
    that detach themselves."""
    return {pid for pid in table if environment_of(pid).get(variable) == value and is_own(pid)}


def working_folder_of(pid: int) -> str:
    """Its current directory; empty when it may not be read."""
    try:
        return str((_PROC / str(pid) / "cwd").readlink())
    except OSError:
        return ""


def freeze(members: Callable[[Table], set[int]], clock: Clock) -> set[int]:
    """Stop (SIGSTOP) all that `members` finds, and again, until it finds no new one: a fork cannot slip through.

    This process itself is left out. Returns the pids, when none takes a step any more. Raises NvrxError when they
    fork faster than that, WaitTimeout when one does not stop.
    """
    frozen: set[int] = set()
    for _ in range(_FREEZE_ROUNDS):
        table = read_table()
        fresh = members(table) - frozen - {os.getpid()}
        if not fresh:
            return frozen
        send((table[pid] for pid in fresh), signal.SIGSTOP)
        frozen |= fresh
        # A signal is sent long before it arrives, on a machine that is busy; until then they go on, and fork.
        stopped = partial(_take_no_step, fresh)
        wait_until(stopped, timeout_s=_STOP_TIMEOUT_S, what="processes to stop", clock=clock)
    raise NvrxError(f"{len(frozen)} processes were stopped, and new ones still appear: is it a fork bomb?")


def _take_no_step(pids: Iterable[int]) -> bool:
    """Whether no thread of these processes runs or can be woken."""
    # One that is stuck in the kernel (D) stops before it gets out; so does the parent of a vfork, which waits there
    # for its stopped child.
    for pid in pids:
        try:
            stats = (_PROC / str(pid) / "task").glob("*/stat")
            threads = [parse_stat(stat.read_text(errors="replace")) for stat in stats]
        except OSError:  # one has ended meanwhile: look again
            return False
        if any(thread.state in "RS" for thread in threads):
            return False
    return True


def kill(
    members: Callable[[Table], set[int]], clock: Clock, *, at_the_kill: Callable[[], None] = lambda: None
) -> set[int]:
    """Freeze all that `members` finds, SIGKILL them in one sweep, and wait until they are dead. Returns their pids,
    without those that had ended before the kill.

    Frozen first, none can react to the death of another: to each other, and to the world, they die at once.
    Children die before their parents, since the kernel wakes (SIGCONT) stopped children that a death leaves alone;
    srun, for one, would then have the step cancelled on all other nodes.
    `at_the_kill` is called in between: to find and freeze them may take a second on a machine that is busy.
    Raises WaitTimeout when the kernel does not let one go (it hangs in a system call).
    """
    doomed = freeze(members, clock)
    table = read_table()  # again: one of them may have been killed by others meanwhile
    doomed &= table.keys()
    # Sorted ahead of the call, so that the kills follow it without a pause.
    in_order = children_first(doomed, table)
    at_the_kill()
    send((table[pid] for pid in in_order), signal.SIGKILL)
    try:
        wait_until(
            lambda: not doomed & read_table().keys(),
            timeout_s=_DEATH_TIMEOUT_S,
            what="killed processes to be gone",
            clock=clock,
        )
    except WaitTimeout as error:
        raise WaitTimeout(f"{error}: {sorted(doomed & read_table().keys())}") from None
    # Reap those that are children of this process, so that no zombie stays.
    for child in doomed:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    return doomed


def children_first(pids: Iterable[int], table: Table) -> list[int]:
    """The processes, each before its parent."""

    def depth(pid: int) -> int:
        above = 0
        while (process := table.get(pid)) is not None and process.parent in table:
            pid, above = process.parent, above + 1
        return above

    return sorted(pids, key=depth, reverse=True)


def send(processes: Iterable[Process | Identity], number: signal.Signals) -> None:
    """Signal exactly these processes. One that has ended is left out, also where another has its pid by now."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
            # The descriptor is opened before the start time is read: so the start time is that of the descriptor's
            # process, or that process has ended and gets no signal.
            if (held := hold(process.pid)) is not None:
                stack.callback(os.close, held)
            now = _read_process(process.pid)
            if now is not None and now.started == process.started:
                send_to_held(held, process.pid, number)


_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


def wait_until(condition: Callable[[], T | None], *, timeout_s: float, what: str, clock: Clock) -> T:
    """Return what `condition()` returns as soon as that is true; it is asked often at first, then every 100 ms.

    Raises WaitTimeout, naming `what`, once `timeout_s` have passed and it still does not hold.
    """
    deadline, pause = clock.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    while not (found := condition()):
        if clock.monotonic() >= deadline:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}, in vain")
        clock.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
    return found
