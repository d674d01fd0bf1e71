"""The messages of an MCP session over a child process's pipes; the child never outlives this process.

The SDK's own `stdio_client` keeps a line of any length, and starts a child that a SIGKILL to this process leaves
behind. Everything else of the session is the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from nvrx_slurm.attribution.sources.answers import MOST_BYTES
from nvrx_slurm.errors import SourceError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent

log = get_logger("attribution")

GRACE_S = 1.0
"""How long the child may take to end once its standard input is closed."""

MOST_STRAY = 50
"""So many lines that are no messages may come between the others: something prints where it should not."""

Received = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]


@contextlib.asynccontextmanager
async def child_streams(command: Sequence[str]) -> AsyncGenerator[Streams, None]:
    """Start the command and carry messages to and from it; end it, with its process group, on the way out.

    Its standard error is ours. Raises SourceError where it cannot be started.
    """
    child = await _start(command)
    to_session, from_child = anyio.create_memory_object_stream[Received](0)
    to_child, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    async with to_session, from_child, to_child, from_session, anyio.create_task_group() as tasks:
        tasks.start_soon(_receive, child, to_session)
        tasks.start_soon(_send, child, from_session, to_session)
        try:
            yield from_child, to_child
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await _end(child)


async def _start(command: Sequence[str]) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            env=env.child_environment({}),
            limit=MOST_BYTES,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
    except (OSError, ValueError) as error:
        raise SourceError(f"mcp_command {command[0]!r} cannot be started: {error}") from None


async def _receive(child: Process, to_session: MemoryObjectSendStream[Received]) -> None:
    """Until the child closes its end, says a line that is longer than an answer may be, or just chats."""
    assert child.stdout is not None
    stray = 0
    async with to_session:
        with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while stray < MOST_STRAY and (line := await child.stdout.readline()):
                message = _message(line)
                if message is not None:
                    await to_session.send(message)
                elif line.strip():
                    stray += 1
                    log.warning("the MCP server printed what is no message: %r", line[:120])


def _message(line: bytes) -> SessionMessage | None:
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        return None


async def _send(
    child: Process,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[Received],
) -> None:
    assert child.stdin is not None
    try:
        async for message in from_session:
            child.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await child.stdin.drain()
    except OSError:
        await to_session.aclose()  # or the session would wait for an answer to what was never sent


async def _end(child: Process) -> None:
    """Close its input and give it a moment; then kill it, with all it has started in its process group. Also where
    the moment is called off."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        await _wait_a_moment(child)
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await _wait_a_moment(child)


async def _wait_a_moment(child: Process) -> None:
    """Until it has ended, or for `GRACE_S`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await asyncio.gather(child.wait(), _drained(child))


async def _drained(child: Process) -> None:
    """A child that still has something to say would wait for us to read it."""
    assert child.stdout is not None
    while await child.stdout.read(1 << 16):
        pass
