"""Installs the hook in a worker's environment, asks a process that has it, and waits until its answer is whole.

The signal is never sent to any other process: its default action kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path

import msgspec

from nvrx_slurm.diagnostics.stacks.process import (
    descriptor_target,
    has_signal,
    open_descriptors,
    read_task,
    thread_ids,
)

LONGEST_ANSWER_BYTES = 1 << 20
# Where the hook puts its descriptor, if it may: looked at first.
FIRST_HIGH_DESCRIPTOR = 1000

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.020
# How long a process may be in no state to answer (a page comes from disk, signals are blocked around a fork).
PATIENCE_S = 0.1


class Unasked(Enum):
    """Why a process was not asked."""

    GONE = auto()
    NO_HOOK = auto()
    NOT_NOW = auto()


class PendingAnswer(msgspec.Struct, frozen=True):
    """A process that got the signal: its answer starts at `offset` of `path`; `deaf` threads block the signal."""

    pid: int
    signum: int
    path: Path
    offset: int
    deaf: frozenset[int]


class HookAnswer(msgspec.Struct, frozen=True):
    """What the hook printed; not `whole` where the bound passed before its end."""

    text: str
    whole: bool


async def ask(pid: int, *, signum: int, dump_dir: Path, timeout_s: float) -> HookAnswer | Unasked:
    """The stacks of all threads of a process, or why it was not asked. It goes on running meanwhile.

    It sends the signal before its first wait: many gathered calls send all signals before one waits.
    """
    now = asyncio.get_running_loop().time
    began = now()
    pause_s = FIRST_PAUSE_S
    posed: PendingAnswer | Unasked
    while (posed := pose(pid, signum, dump_dir)) is Unasked.NOT_NOW and now() < began + min(PATIENCE_S, timeout_s):
        pause_s = await _pause(pause_s)
    if isinstance(posed, Unasked):
        return posed
    pause_s = FIRST_PAUSE_S
    while not (whole := is_answered(posed)) and now() < began + timeout_s and _lives(pid):
        pause_s = await _pause(pause_s)
    text = read_answer(posed)
    return HookAnswer(text, whole) if text or _lives(pid) else Unasked.GONE


def _lives(pid: int) -> bool:
    main = read_task(pid, pid)
    return main is not None and not main.has_ended


async def _pause(pause_s: float) -> float:
    # The kernel reports no return of another process's signal handler: look again, less and less often.
    await asyncio.sleep(pause_s)
    return min(2 * pause_s, LONGEST_PAUSE_S)


def pose(pid: int, signum: int, dump_dir: Path) -> PendingAnswer | Unasked:
    """Send the signal, if this process will answer it."""
    threads = [task for tid in thread_ids(pid) if (task := read_task(pid, tid))]
    if not threads or threads[0].has_ended:
        return Unasked.GONE
    # Two conditions prove that the process will answer: it catches the signal, and it holds its own answer file open.
    # A child between fork and exec has inherited the handler, but has no file of its own; exec removes both.
    path = dump_dir.resolve() / str(pid)
    descriptors = sorted(open_descriptors(pid), key=lambda number: (number < FIRST_HIGH_DESCRIPTOR, number))
    holds_open = any(descriptor_target(pid, number) == str(path) for number in descriptors)
    if not has_signal(threads[0].caught, signum) or not holds_open:
        return Unasked.NO_HOOK
    deaf = frozenset(task.tid for task in threads if has_signal(task.blocked, signum))
    if threads[0].state not in "RS" or len(deaf) == len(threads):
        return Unasked.NOT_NOW
    asked = PendingAnswer(pid, signum, path, _size(path), deaf)
    # The signal's default action is death: read the mask once more, right before sending.
    main = read_task(pid, pid)
    if main is None or main.has_ended:
        return Unasked.GONE
    if not has_signal(main.caught, signum):
        return Unasked.NO_HOOK
    if not has_signal(main.pending, signum):  # else an earlier request is pending; one answer serves both
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return Unasked.GONE
        except PermissionError:
            return Unasked.NO_HOOK
    return asked


def is_answered(asked: PendingAnswer) -> bool:
    """Whether the handler has run to its end."""
    # The size first: once the file has grown the handler has begun. While it runs, its thread blocks the signal
    # (faulthandler does not set SA_NODEFER). So if no thread blocks the signal after that, it has ended.
    if _size(asked.path) <= asked.offset:
        return False
    tids = (tid for tid in thread_ids(asked.pid) if tid not in asked.deaf)
    threads = (thread for tid in tids if (thread := read_task(asked.pid, tid)))
    return not any(has_signal(thread.pending | thread.blocked, asked.signum) for thread in threads)


def read_answer(asked: PendingAnswer) -> str:
    """What has been printed since the signal was sent."""
    try:
        with asked.path.open("rb") as file:
            file.seek(asked.offset)
            return file.read(LONGEST_ANSWER_BYTES).decode(errors="replace")
    except OSError:
        return ""


def sweep(dump_dir: Path) -> None:
    """Remove the answer files of processes that have ended: every Python process of a worker leaves one."""
    with contextlib.suppress(OSError):
        for path in dump_dir.iterdir():
            if path.name.isdigit() and not _lives(int(path.name)):
                path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# The signal that requests a worker's stacks: 61. Real-time, because launchers, Slurm's `--signal`, profilers and
# checkpoint requests use the lower ones. Of the real-time ones C libraries take the first few (32 to 34),
# systemd, containers and Mono count up from there, valgrind and qemu use the last (64). Nothing known uses this one.
DUMP_SIGNAL: int = signal.SIGRTMAX - 3

HOOK_DIR = Path(__file__).resolve().parent / "hook"


def hook_environment(inherited: Mapping[str, str], dump_dir: Path) -> dict[str, str]:
    """The variables to add for one worker, whose environment without them is `inherited`.

    The hook goes first on PYTHONPATH, and what was there follows; `dump_dir` must exist when the worker starts, in
    memory of this node and of the worker's user only. A crash in native code prints its stacks to stderr
    (PYTHONFAULTHANDLER) unless the user has set that variable; an empty value counts.
    """
    hook = str(HOOK_DIR)
    others = [part for part in inherited.get("PYTHONPATH", "").split(os.pathsep) if part and part != hook]
    return {
        "PYTHONFAULTHANDLER": inherited.get("PYTHONFAULTHANDLER", "1"),
        "PYTHONPATH": os.pathsep.join([hook, *others]),
        "NVRX_DUMP_DIR": str(dump_dir),
        "NVRX_DUMP_SIGNAL": str(DUMP_SIGNAL),
    }
