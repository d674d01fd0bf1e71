"""Stacks of a node's processes: each is asked by the hook, by py-spy and by /proc, and one file per rank is written.

One bound holds for all of it: a process, a program or a file system that does not answer is named, not waited for.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from nvrx_slurm.diagnostics.stacks import programs
from nvrx_slurm.diagnostics.stacks.hook_client import DUMP_SIGNAL, HookAnswer, Unasked, ask, sweep
from nvrx_slurm.diagnostics.stacks.process import ProcessState, describe
from nvrx_slurm.diagnostics.stacks.traces import innermost_frame, lacks_threads
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.files import open_log, write_all
from nvrx_slurm.util.threads import awaitable_thread

GPU_LABEL = "gpus"

# For how many processes of a rank py-spy is started at most: a worker may have hundreds of children.
SPIED_PER_GROUP = 8

# How many run at once: a node that hangs has few resources left.
SPIES = 2


class DumpMethod(StrEnum):
    """How a process was reached."""

    HOOK = "hook"
    PY_SPY = "py-spy"
    PROC = "proc only"


class ProcessDump(msgspec.Struct, frozen=True):
    """All that is known of a process. `state` is None if /proc did not answer in time, `method` if it has ended."""

    pid: int
    state: ProcessState | None
    method: DumpMethod | None
    stacks: str = ""
    note: str = ""


class DumpReport(msgspec.Struct, frozen=True):
    """What a dump has found.

    `files`: label → the file that was appended to. `answered`: how each living process was reached. `last_lines`:
    label → where its main thread is, such as `train.py:41 in step`. `problems`: sentences, one for each file that
    could not be written.
    """

    files: Mapping[str, Path]
    answered: Mapping[DumpMethod, tuple[int, ...]]
    last_lines: Mapping[str, str]
    problems: tuple[str, ...]


async def dump(
    groups: Mapping[str, Sequence[int]],
    *,
    dump_dir: Path,
    out: Path,
    why: str,
    timeout_s: float,
    py_spy: bool = True,
    may_pause: bool = False,
    gpus: bool = False,
    clock: Clock | None = None,
) -> DumpReport:
    """Write the stacks of every process of `groups` (label, such as "rank 3" → its worker, then its descendants).

    Promises: it returns after about `timeout_s` seconds at most, and the report names what hangs; no process is
    stopped, or killed by the request; a process that ends meanwhile is no problem. `may_pause`, for processes that
    are about to be ended, lets py-spy stop one for some milliseconds and see native frames too.

    `out` gets `<label>.txt`, with dashes for spaces, appended to; with `gpus`, and where there is nvidia-smi, also
    `gpus.txt`. `dump_dir` is the one that the workers' `hook_environment` was made with; one dump of it at a time.
    """
    deadlines = _Deadlines.within(timeout_s)
    collection = _Collection(groups, dump_dir, deadlines, py_spy=py_spy, may_pause=may_pause)
    dumps, gpu_text = await asyncio.gather(
        collection.all(), programs.gpu_state(_left_s(deadlines.spy)) if gpus else asyncio.sleep(0, None)
    )
    now = datetime.fromtimestamp((clock or SystemClock()).wall(), UTC)
    head = f"{now:%Y-%m-%dT%H:%M:%SZ} {why}"
    texts = {label: "".join(_section(head, label, each) for each in group) for label, group in dumps.items()}
    if gpu_text is not None:
        texts[GPU_LABEL] = f"=== {head}\n{gpu_text}\n\n"
    writer = _StackWriter(out, texts)
    # In threads: a file system that does not answer keeps the thread, not this call.
    work = [awaitable_thread(writer.run, "write stacks"), awaitable_thread(partial(sweep, dump_dir), "sweep stacks")]
    await asyncio.wait(work, timeout=_left_s(deadlines.write))
    last_lines: dict[str, str] = {}
    for label, group in dumps.items():
        for each in group:  # the worker comes before its descendants, and the first frame counts
            if (frame := innermost_frame(each.stacks)) is not None:
                last_lines.setdefault(label, frame)
    of_pid = {each.pid: each for group in dumps.values() for each in group}
    answered = {way: tuple(each.pid for each in of_pid.values() if each.method is way) for way in DumpMethod}
    return DumpReport(files=writer.files(), answered=answered, last_lines=last_lines, problems=writer.problems())


class _Deadlines(msgspec.Struct, frozen=True):
    """One timeout, shared out, by the event loop's clock: to read /proc, to be answered, to run py-spy, to write."""

    look: float
    ask: float
    spy: float
    write: float

    @classmethod
    def within(cls, timeout_s: float) -> _Deadlines:
        now = asyncio.get_running_loop().time()
        return cls(*(now + share * timeout_s for share in (0.2, 0.5, 0.8, 1.0)))


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())


class _Collection:
    """One dump of all processes at once. `groups`: label → its worker, then that one's descendants."""

    def __init__(
        self,
        groups: Mapping[str, Sequence[int]],
        dump_dir: Path,
        deadlines: _Deadlines,
        *,
        py_spy: bool,
        may_pause: bool,
    ) -> None:
        self._groups, self._dump_dir, self._deadlines, self._may_pause = groups, dump_dir, deadlines, may_pause
        self._spied = {pid for pids in groups.values() for pid in pids[:SPIED_PER_GROUP]} if py_spy else set()
        self._spies = asyncio.Semaphore(SPIES)
        self._states: dict[int, ProcessState | None] = {}
        self._py_spy: str | None = None

    async def all(self) -> dict[str, list[ProcessDump]]:
        """What is known of every process, by label."""
        pids = list(dict.fromkeys(pid for group in self._groups.values() for pid in group))
        # A thread for each group: reading /proc hangs where a process holds its memory map locked.
        looking = [
            awaitable_thread(partial(self._describe, group), f"look at {label}")
            for label, group in self._groups.items()
        ]
        if looking:
            await asyncio.wait(looking, timeout=_left_s(self._deadlines.look))
        asked_for_s = _left_s(self._deadlines.ask)
        asking = (ask(pid, signum=DUMP_SIGNAL, dump_dir=self._dump_dir, timeout_s=asked_for_s) for pid in pids)
        answers = dict(zip(pids, await asyncio.gather(*asking), strict=True))
        if any(self._needs_py_spy(pid, answer) for pid, answer in answers.items()):
            self._py_spy = await programs.find("py-spy", _left_s(self._deadlines.spy))
        dumps = await asyncio.gather(*(self._dump(pid, answer) for pid, answer in answers.items()))
        of_pid = dict(zip(pids, dumps, strict=True))
        return {label: [of_pid[pid] for pid in group] for label, group in self._groups.items()}

    def _describe(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self._states[pid] = describe(pid)

    def _needs_py_spy(self, pid: int, answer: HookAnswer | Unasked) -> bool:
        return pid in self._spied and answer is not Unasked.GONE and bool(_shortfall(answer))

    async def _dump(self, pid: int, answer: HookAnswer | Unasked) -> ProcessDump:
        state = self._states.get(pid)
        if answer is Unasked.GONE:
            return ProcessDump(pid, state, method=None)
        text = answer.text if isinstance(answer, HookAnswer) else ""
        note, method = _shortfall(answer), DumpMethod.HOOK if text else DumpMethod.PROC
        if self._py_spy is None or not self._needs_py_spy(pid, answer):
            return ProcessDump(pid, state, method, text, note)
        may_pause = self._may_pause and state is not None and state.state in "RS"
        async with self._spies:
            left_s = _left_s(self._deadlines.spy)
            spied = await programs.spy(self._py_spy, pid, may_pause=may_pause, timeout_s=left_s)
        if spied.ok:
            return ProcessDump(pid, state, DumpMethod.PY_SPY, f"{text}{spied.text}\n", note)
        return ProcessDump(pid, state, method, text, f"{note}; py-spy: {spied.text}")


_SHORTFALLS = {
    Unasked.NO_HOOK: "it has no hook",
    Unasked.NOT_NOW: "it is stopped, in uninterruptible sleep, or blocks the signal",
    Unasked.GONE: "it has ended",
}


def _shortfall(answer: HookAnswer | Unasked) -> str:
    """Why the hook's answer is not all there is to know; empty if it is."""
    if isinstance(answer, Unasked):
        return _SHORTFALLS[answer]
    if not answer.whole:
        return "its handler did not end in time"
    return "of more than 100 threads the oldest are missing" if lacks_threads(answer.text) else ""


def _section(head: str, label: str, dumped: ProcessDump) -> str:
    """One process: its name and why it was asked, what is missing, its stacks, and what /proc contains."""
    name = f" ({dumped.state.name})" if dumped.state else ""
    title = f"=== {head} | {label}, pid {dumped.pid}{name}"
    if dumped.method is None:
        return f"{title}\nit has ended\n\n"
    lines = [title, dumped.note, dumped.stacks.strip("\n")]
    proc = dumped.state.text() if dumped.state else "  /proc did not answer in time\n"
    return "\n".join(filter(None, lines)) + f"\n{proc}\n"


class _StackWriter:
    """Appends texts to files, one a label; what is written so far can be read from another thread."""

    def __init__(self, out: Path, texts: Mapping[str, str]) -> None:
        self._texts = texts
        # `rank 3` is written to `rank-3.txt`
        self._paths = {label: out / (re.sub(r"[\s/]+", "-", label) + ".txt") for label in texts}
        self._written: dict[str, Path] = {}
        self._failed: dict[str, str] = {}

    def run(self) -> None:
        """Write all of them. May block for as long as the file system does; raises nothing."""
        for label, path in self._paths.items():
            try:
                descriptor = open_log(path)
                try:
                    write_all(descriptor, self._texts[label].encode(errors="replace"))
                finally:
                    os.close(descriptor)
            except OSError as error:
                self._failed[label] = f"{path}: {error.strerror}; the stacks of {label} are lost"
            else:
                self._written[label] = path

    def files(self) -> dict[str, Path]:
        """Label → file, of those written by now."""
        return dict(self._written)

    def problems(self) -> tuple[str, ...]:
        """One sentence for each label whose file is not written."""
        late = "its file system did not take the stacks in time; they may still arrive"
        return tuple(
            self._failed.get(label, f"{path}: {late}")
            for label, path in self._paths.items()
            if label not in self._written
        )
