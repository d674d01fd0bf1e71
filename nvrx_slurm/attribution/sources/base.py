"""The port of every source of attribution, and when a source's view of unfinished logs is good enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, Inquiry, Scope, Verdict


class Source(Protocol):
    """Answers inquiries about failures.

    `open` prepares what an ask would have to wait for; an ask does not need it. `ask` raises SourceError where there
    is no verdict; it may be cancelled at any moment, and is after `timeout_s`. `settled` is set once all workers of
    the cycle have ended, so that their logs are complete.
    """

    name: str

    async def open(self) -> None: ...
    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution: ...
    async def close(self) -> None: ...


@runtime_checkable
class FindingsTaker(Protocol):
    """A source that judges by what agents have found in the logs of their nodes."""

    def found(self, findings: AgentFindings) -> None:
        """It never waits, and raises nothing."""
        ...


Look = Callable[[bool], Awaitable[Attribution]]
"""Analyses the logs as they are now; its argument says whether they are complete."""


def is_conclusive(attribution: Attribution | None, inquiry: Inquiry) -> bool:
    """Whether more of the logs would not change it: a verdict that rests on the failing rank's own lines.

    A line of another rank may be a consequence of the failure, whose own line is not written yet; and every rank
    whose peer has gone reports that the network failed.
    """
    if attribution is None or attribution.primary is None:
        return False
    if attribution.verdict not in (Verdict.STOP, Verdict.RESTART):
        return False
    rank = inquiry.key.rank
    return rank is None or (attribution.primary.rank == rank and attribution.scope is not Scope.NETWORK)


async def look_twice(look: Look, inquiry: Inquiry, *, settled: asyncio.Event, settle_s: float) -> Attribution:
    """Look at once; if that is not conclusive, look again when the logs are complete.

    If they are not within `settle_s`, the result of the first look stands.
    """
    if settled.is_set():
        return await look(True)
    first = await look(False)
    if is_conclusive(first, inquiry):
        return first
    try:
        async with asyncio.timeout(settle_s):
            await settled.wait()
    except TimeoutError:
        return first
    return await look(True)
