"""Goes to every process of a dump, by the hook, by py-spy and by /proc, and brings back what is known of each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from nvrx_slurm.diagnostics.stacks import programs
from nvrx_slurm.diagnostics.stacks.aside import aside
from nvrx_slurm.diagnostics.stacks.asking import Answer, Unasked, ask
from nvrx_slurm.diagnostics.stacks.environment import DUMP_SIGNAL
from nvrx_slurm.diagnostics.stacks.process import ProcessState, describe
from nvrx_slurm.diagnostics.stacks.traces import lacks_threads

SPIED_PER_GROUP = 8
"""For how many processes of a rank py-spy is started at most: a worker may have hundreds of children."""

SPIES = 2
"""How many run at once: a node that hangs has little to spare."""


class Method(StrEnum):
    """How a process was reached."""

    HOOK = "hook"
    PY_SPY = "py-spy"
    PROC = "proc only"


@dataclass(frozen=True, slots=True)
class Account:
    """All that is known of a process. `state` is None if /proc did not answer in time, `method` if it has ended."""

    pid: int
    state: ProcessState | None
    method: Method | None
    stacks: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """One timeout, shared out: to look at /proc, to be answered, to spy, and the rest to write."""

    looking: float
    asking: float
    spying: float
    writing: float

    @classmethod
    def within(cls, timeout_s: float) -> Bounds:
        """From this moment on, by the event loop's clock."""
        now = asyncio.get_running_loop().time()
        return cls(*(now + share * timeout_s for share in (0.2, 0.5, 0.8, 1.0)))


def left_s(bound: float) -> float:
    """Seconds until a bound, 0 if it has passed."""
    return max(0.0, bound - asyncio.get_running_loop().time())


class Accounting:
    """One visit to all processes at once. `groups`: label → its worker, then that one's descendants."""

    def __init__(
        self, groups: Mapping[str, Sequence[int]], dump_dir: Path, bounds: Bounds, *, py_spy: bool, may_pause: bool
    ) -> None:
        self._groups, self._dump_dir, self._bounds, self._may_pause = groups, dump_dir, bounds, may_pause
        self._spied = {pid for pids in groups.values() for pid in pids[:SPIED_PER_GROUP]} if py_spy else set()
        self._spies = asyncio.Semaphore(SPIES)
        self._states: dict[int, ProcessState | None] = {}
        self._py_spy: str | None = None

    async def all(self) -> dict[str, list[Account]]:
        """Every process's account, by label."""
        pids = list(dict.fromkeys(pid for group in self._groups.values() for pid in group))
        await self._look()
        answers = dict(zip(pids, await asyncio.gather(*map(self._ask, pids)), strict=True))
        if any(self._is_for_spying(pid, answer) for pid, answer in answers.items()):
            self._py_spy = await programs.find("py-spy", left_s(self._bounds.spying))
        accounts = await asyncio.gather(*(self._account(pid, answer) for pid, answer in answers.items()))
        of_pid = dict(zip(pids, accounts, strict=True))
        return {label: [of_pid[pid] for pid in group] for label, group in self._groups.items()}

    async def _look(self) -> None:
        """What /proc says, a thread a group: reading it hangs where a process holds its memory map locked."""
        looking = [aside(partial(self._describe, group), f"look at {label}") for label, group in self._groups.items()]
        if looking:
            await asyncio.wait(looking, timeout=left_s(self._bounds.looking))

    def _describe(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self._states[pid] = describe(pid)

    async def _ask(self, pid: int) -> Answer | Unasked:
        timeout_s = left_s(self._bounds.asking)
        return await ask(pid, signum=DUMP_SIGNAL, dump_dir=self._dump_dir, timeout_s=timeout_s)

    def _is_for_spying(self, pid: int, answer: Answer | Unasked) -> bool:
        return pid in self._spied and answer is not Unasked.GONE and bool(_shortfall(answer))

    async def _account(self, pid: int, answer: Answer | Unasked) -> Account:
        state = self._states.get(pid)
        if answer is Unasked.GONE:
            return Account(pid, state, method=None)
        text = answer.text if isinstance(answer, Answer) else ""
        note, method = _shortfall(answer), Method.HOOK if text else Method.PROC
        if self._py_spy is None or not self._is_for_spying(pid, answer):
            return Account(pid, state, method, text, note)
        said = await self._spy(self._py_spy, pid, state)
        if said.ok:
            return Account(pid, state, Method.PY_SPY, f"{text}{said.text}\n", note)
        return Account(pid, state, method, text, f"{note}; py-spy: {said.text}")

    async def _spy(self, program: str, pid: int, state: ProcessState | None) -> programs.Said:
        may_pause = self._may_pause and state is not None and state.state in "RS"
        async with self._spies:
            timeout_s = left_s(self._bounds.spying)
            return await programs.spy(program, pid, may_pause=may_pause, timeout_s=timeout_s)


_SHORTFALLS = {
    Unasked.NO_HOOK: "it has no hook",
    Unasked.NOT_NOW: "it is stopped, in uninterruptible sleep, or blocks the signal",
    Unasked.GONE: "it has ended",
}


def _shortfall(answer: Answer | Unasked) -> str:
    """Why the hook's answer is not all there is to know; empty if it is."""
    if isinstance(answer, Unasked):
        return _SHORTFALLS[answer]
    if not answer.whole:
        return "its handler did not end in time"
    return "of more than 100 threads the oldest are missing" if lacks_threads(answer.text) else ""
