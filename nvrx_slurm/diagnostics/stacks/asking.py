"""Asks a process that has the hook for its stacks, and knows when the answer is whole. Never signals any other."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from nvrx_slurm.diagnostics.stacks.process import (
    Task,
    descriptor_target,
    has_signal,
    open_descriptors,
    read_task,
    thread_ids,
)

LONGEST_ANSWER_BYTES = 1 << 20
FIRST_HIGH_DESCRIPTOR = 1000
"""Where the hook puts its descriptor, if it may: looked at first."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.020
PATIENCE_S = 0.1
"""How long a process may be in no state to answer (a page comes from disk, signals are blocked around a fork)."""


class Unasked(Enum):
    """Why a process was not asked."""

    GONE = auto()
    NO_HOOK = auto()
    NOT_NOW = auto()


@dataclass(frozen=True, slots=True)
class Question:
    """A process that was asked: its answer starts at `offset` of `path`; `deaf` threads never took the signal."""

    pid: int
    signum: int
    path: Path
    offset: int
    deaf: frozenset[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the hook printed; not `whole` where the bound passed before its end."""

    text: str
    whole: bool


async def ask(pid: int, *, signum: int, dump_dir: Path, timeout_s: float) -> Answer | Unasked:
    """The stacks of all threads of a process, or why it was not asked. It goes on running meanwhile.

    The first steps run before the first wait, so that many calls gathered ask everybody before they wait for one.
    """
    now = asyncio.get_running_loop().time
    began = now()
    pause_s = FIRST_PAUSE_S
    posed: Question | Unasked
    while (posed := pose(pid, signum, dump_dir)) is Unasked.NOT_NOW and now() < began + min(PATIENCE_S, timeout_s):
        pause_s = await _pause(pause_s)
    if isinstance(posed, Unasked):
        return posed
    pause_s = FIRST_PAUSE_S
    while not (whole := is_answered(posed)) and now() < began + timeout_s and _lives(pid):
        pause_s = await _pause(pause_s)
    text = read_answer(posed)
    return Answer(text, whole) if text or _lives(pid) else Unasked.GONE


def _lives(pid: int) -> bool:
    main = read_task(pid, pid)
    return main is not None and not main.has_ended


async def _pause(pause_s: float) -> float:
    """Nothing in the kernel tells when another process's signal handler returns: look again, less and less often."""
    await asyncio.sleep(pause_s)
    return min(2 * pause_s, LONGEST_PAUSE_S)


def pose(pid: int, signum: int, dump_dir: Path) -> Question | Unasked:
    """Send the signal, if this process will answer it.

    Two witnesses: it catches the signal, and it holds its own answer file open. A child between fork and exec has
    inherited the handler, but not a file of its own; exec takes both away. The signal's default action is death, so
    the mask is read once more right before sending.
    """
    threads = [task for tid in thread_ids(pid) if (task := read_task(pid, tid))]
    if not threads or threads[0].has_ended:
        return Unasked.GONE
    path = dump_dir.resolve() / str(pid)
    if not has_signal(threads[0].caught, signum) or not _holds_open(pid, path):
        return Unasked.NO_HOOK
    deaf = frozenset(task.tid for task in threads if has_signal(task.blocked, signum))
    if threads[0].state not in "RS" or len(deaf) == len(threads):
        return Unasked.NOT_NOW
    return _send(Question(pid, signum, path, _size(path), deaf))


def _send(question: Question) -> Question | Unasked:
    main = read_task(question.pid, question.pid)
    if main is None or main.has_ended:
        return Unasked.GONE
    if not has_signal(main.caught, question.signum):
        return Unasked.NO_HOOK
    if not has_signal(main.pending, question.signum):  # else an earlier question is still open; one answer will do
        try:
            os.kill(question.pid, question.signum)
        except ProcessLookupError:
            return Unasked.GONE
        except PermissionError:
            return Unasked.NO_HOOK
    return question


def is_answered(question: Question) -> bool:
    """Whether the handler has run to its end.

    While it runs, its thread blocks the signal (faulthandler does not set SA_NODEFER). The size is read first: once
    the file has grown the handler has begun, so if no thread blocks the signal after that, it has ended.
    """
    if _size(question.path) <= question.offset:
        return False
    hearing = (tid for tid in thread_ids(question.pid) if tid not in question.deaf)
    return not any(_is_busy(task, question.signum) for tid in hearing if (task := read_task(question.pid, tid)))


def _is_busy(task: Task, signum: int) -> bool:
    return has_signal(task.pending | task.blocked, signum)


def read_answer(question: Question) -> str:
    """What has been printed since the question."""
    try:
        with question.path.open("rb") as file:
            file.seek(question.offset)
            return file.read(LONGEST_ANSWER_BYTES).decode(errors="replace")
    except OSError:
        return ""


def sweep(dump_dir: Path) -> None:
    """Remove the answer files of processes that have ended: every Python process of a worker leaves one."""
    with contextlib.suppress(OSError):
        for path in dump_dir.iterdir():
            if path.name.isdigit() and not _lives(int(path.name)):
                path.unlink(missing_ok=True)


def _holds_open(pid: int, path: Path) -> bool:
    descriptors = sorted(open_descriptors(pid), key=lambda number: (number < FIRST_HIGH_DESCRIPTOR, number))
    return any(descriptor_target(pid, number) == str(path) for number in descriptors)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
