"""What asyncio lacks: tasks whose errors are heard of and whose end is sure, and standard streams."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

AGAIN_S = 0.1


def start(
    work: Coroutine[Any, Any, Any], among: set[asyncio.Task[Any]], failed: Callable[[BaseException], object]
) -> asyncio.Task[Any]:
    """Run it beside the caller, as one `among` these tasks until it has ended. What it raises goes to `failed`."""
    task = asyncio.get_running_loop().create_task(work)
    among.add(task)  # the event loop itself holds a task weakly

    def done(task: asyncio.Task[Any]) -> None:
        among.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task.add_done_callback(done)
    return task


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all of them have ended; what they raise is dropped."""
    running = {task for task in tasks if task is not asyncio.current_task()}
    left = running
    # Once is not enough: when a connection is closed in the same moment, redis-py makes an error of the connection
    # out of a cancellation, and a loop that is patient with such errors goes on. `asyncio.run` cancels once more, and
    # then waits for ever.
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


async def standard_streams(line_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Standard input and output of this process, for an exchange of lines with its parent.

    A line longer than `line_bytes` is a ValueError of the reader. The writer's `drain` ends when all is in the pipe.
    """
    loop = asyncio.get_running_loop()
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints goes to standard error, not between the lines
    reader = asyncio.StreamReader(limit=line_bytes)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), output)
    transport.set_write_buffer_limits(high=0)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)
