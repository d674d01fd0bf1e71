"""When a view of logs that are still being written is good enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvrx_slurm.journal.verdicts import Attribution, Inquiry, Scope, Verdict

_SAYS_SOMETHING = frozenset({Verdict.STOP, Verdict.RESTART})

Look = Callable[[bool], Awaitable[Attribution]]
"""Analyses the logs as they are now; told whether they are whole."""


def is_conclusive(attribution: Attribution | None, inquiry: Inquiry) -> bool:
    """Whether more of the logs would not change it: a verdict that rests on the failing rank's own words.

    What another rank says may well follow from the failure, whose own line has not been written out yet; and that the
    network failed is what any rank says whose peer has gone.
    """
    if attribution is None or attribution.primary is None or attribution.verdict not in _SAYS_SOMETHING:
        return False
    rank = inquiry.key.rank
    return rank is None or (attribution.primary.rank == rank and attribution.scope is not Scope.NETWORK)


async def look_twice(look: Look, inquiry: Inquiry, *, settled: asyncio.Event, patience_s: float) -> Attribution:
    """Look at once; where that is not conclusive, look again when the logs are whole.

    Where they are not within `patience_s`, the first view has to do.
    """
    if settled.is_set():
        return await look(True)
    first = await look(False)
    if is_conclusive(first, inquiry):
        return first
    try:
        async with asyncio.timeout(patience_s):
            await settled.wait()
    except TimeoutError:
        return first
    return await look(True)
