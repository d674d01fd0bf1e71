"""What asyncio lacks: tasks whose errors are heard of and whose end is sure, programs with a bound, and standard
streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

AGAIN_S = 0.1

# How long a program that was killed is waited for: it may be in uninterruptible sleep (D).
REAPED_S = 0.2


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


async def run_program(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    stderr: int = DEVNULL,
) -> tuple[int, bytes]:
    """Run a program to its end. Returns its exit code and what it has printed. `folder`: where it runs.

    Raises OSError where it cannot be started; TimeoutError after `timeout_s`: it is killed then, as with
    a cancellation.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv, env=env, cwd=folder, stdin=DEVNULL, stdout=PIPE, stderr=stderr, start_new_session=True
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The process may run already. asyncio would kill it alone, and what it has started would go on.
        with contextlib.suppress(OSError):
            await _kill(await starting)
        raise
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            await _kill(process)
    assert process.returncode is not None
    return process.returncode, printed


async def _kill(process: Process) -> None:
    """Kill it with all that it has started: a site's program may be a script, whose child would hold the pipe."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # stuck in the kernel: SIGKILL ends that some day
        await asyncio.wait_for(process.wait(), REAPED_S)


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
