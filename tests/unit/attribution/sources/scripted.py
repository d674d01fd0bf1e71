"""A source in this process that does what a test says, and an inquiry to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvrx_slurm.journal.verdicts import Attribution, Evidence, FailureKey, Inquiry, Verdict

Behaviour = Callable[[Inquiry, asyncio.Event], Awaitable[Attribution]]


def key_of(cycle: int = 0, rank: int | None = 3) -> FailureKey:
    return FailureKey(job="/jobs/7", generation=0, replica="main-0", cycle=cycle, rank=rank)


def inquiry_of(cycle: int = 0, rank: int | None = 3) -> Inquiry:
    return Inquiry(key=key_of(cycle, rank), paths=("/jobs/7/logs",))


def said(verdict: Verdict = Verdict.STOP, *, rank: int | None = 3, **fields: object) -> Attribution:
    line = Evidence(file="rank.err", line=1, text="boom", rank=rank)
    return Attribution(source="scripted", verdict=verdict, **{"confidence": 0.9, "primary": line, **fields})  # type: ignore[arg-type]


async def answers(inquiry: Inquiry, settled: asyncio.Event) -> Attribution:
    return said()


async def hangs(inquiry: Inquiry, settled: asyncio.Event) -> Attribution:
    return await asyncio.get_running_loop().create_future()


async def clings(inquiry: Inquiry, settled: asyncio.Event) -> Attribution:
    """Hangs, and cannot be cancelled before the test's end."""
    while True:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if settled.is_set():
                raise


def raises(error: Exception) -> Behaviour:
    async def behave(inquiry: Inquiry, settled: asyncio.Event) -> Attribution:
        raise error

    return behave


class Scripted:
    """`asked` are the inquiries that it received; `behaviour` may be changed at any time."""

    def __init__(self, behaviour: Behaviour = answers, name: str = "scripted") -> None:
        self.name, self.behaviour = name, behaviour
        self.asked: list[Inquiry] = []
        self.opened = self.closed = False

    async def open(self) -> None:
        self.opened = True

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        self.asked.append(inquiry)
        return await self.behaviour(inquiry, settled)

    async def close(self) -> None:
        self.closed = True
