"""The end of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.1


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all of them have ended; what they raise is dropped.

    Once is not enough: when a connection is closed in the same moment, redis-py makes an error of the connection out
    of a cancellation, and a loop that is patient with such errors goes on. `asyncio.run` cancels once more, and then
    waits for ever.
    """
    running = {task for task in tasks if task is not asyncio.current_task()}
    left = running
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
    for task in running:
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never retrieved


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Give it its result, or the exception that stands for one, unless its waiter has gone."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
