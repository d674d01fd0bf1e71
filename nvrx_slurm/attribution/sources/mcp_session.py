"""One session with an MCP server that runs as a child, and the messages on its pipes; any failure ends it.

The child never outlives this process. The SDK's own `stdio_client` keeps a line of any length, and starts a child
that a SIGKILL to this process leaves behind; the rest of the session is the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from nvrx_slurm.attribution.sources.base import MOST_BYTES
from nvrx_slurm.errors import SourceError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent

log = get_logger("attribution")

# How long a server may take until it has initialised: it may have to be installed first, by `uvx` say.
START_S = 30.0


class McpSession:
    """A server that starts at once; wait until it has `started` before the first call.

    `is_over`: it takes no more calls. Its child ends when the last call under way has.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._calls = 0
        self.is_over = False
        # Its own task: what a session has entered must be left by the same task.
        self._holder = asyncio.create_task(self._hold(), name="mcp session")

    async def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool. Raises SourceError; a call that is cancelled ends the session, for the server may hang."""
        self._calls += 1
        try:
            return await (await asyncio.shield(self._ready)).call_tool(tool, arguments)
        except MCPError as error:
            self.is_over |= error.code == mcp_types.CONNECTION_CLOSED
            raise SourceError(self._describe(error)) from None
        except BaseException:
            self.is_over = True
            raise
        finally:
            self._calls -= 1
            # Other calls under way still get their answers: the last one ends the session.
            if self.is_over and not self._calls:
                self._end.set()

    async def started(self) -> None:
        """Wait until it has initialised. Raises SourceError."""
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._ready)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise SourceError(f"{self._name}: not initialised within {START_S:g} s") from None
            raise

    async def close(self) -> None:
        """End the child; takes two seconds at most."""
        self.is_over = True
        self._end.set()
        if not self._ready.done():
            self._holder.cancel()
        await asyncio.wait({self._holder})

    @property
    def _name(self) -> str:
        return f"the MCP server {' '.join(self._command)!r}"

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, MCPError) and error.code == mcp_types.CONNECTION_CLOSED:
            return f"{self._name} has ended or closed the connection; its standard error is in the broker's log"
        return str(error) if isinstance(error, SourceError) else f"{self._name}: {error}"

    async def _hold(self) -> None:
        try:
            async with child_streams(self._command) as streams, ClientSession(*streams) as session:
                await session.initialize()
                self._ready.set_result(session)
                await self._end.wait()
        except asyncio.CancelledError:
            self._fail(SourceError(f"{self._name}: closed before it had initialised"))
            raise
        except Exception as error:
            innermost: BaseException = error
            while isinstance(innermost, BaseExceptionGroup):  # task groups wrap what they raise
                innermost = innermost.exceptions[0]
            self._fail(SourceError(self._describe(innermost)))

    def _fail(self, error: SourceError) -> None:
        self.is_over = True
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: perhaps no call waits for it


# ---- the pipes

# How long the child may take to end once its standard input is closed.
GRACE_S = 1.0

# So many lines that are no messages may come between the others: something prints where it should not.
MOST_STRAY = 50

Received = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]


@contextlib.asynccontextmanager
async def child_streams(command: Sequence[str]) -> AsyncGenerator[Streams, None]:
    """Start the command and carry messages to and from it; end it, with its process group, on the way out.

    It inherits this process's standard error. Raises SourceError where it cannot be started.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            env=env.child_environment({}),
            limit=MOST_BYTES,
            # In a process group of its own, so that `_end` can kill what the command has started, and nothing else.
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
    except (OSError, ValueError) as error:
        raise SourceError(f"mcp_command {command[0]!r} cannot be started: {error}") from None
    # Without buffers: a child that writes faster than the session reads has to wait.
    to_session, from_child = anyio.create_memory_object_stream[Received](0)
    to_child, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    async with to_session, from_child, to_child, from_session, anyio.create_task_group() as tasks:
        tasks.start_soon(_receive, child, to_session)
        tasks.start_soon(_send, child, from_session, to_session)
        try:
            yield from_child, to_child
        finally:
            tasks.cancel_scope.cancel()
            # Shielded: the child is ended also where this task is being cancelled.
            with anyio.CancelScope(shield=True):
                await _end(child)


async def _receive(child: Process, to_session: MemoryObjectSendStream[Received]) -> None:
    """Pass messages on until the child closes its output, or prints too long a line or too many other lines."""
    assert child.stdout is not None
    stray = 0
    async with to_session:
        # ValueError: a line of more than MOST_BYTES, of which asyncio has dropped a part. The session ends with it.
        with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while stray < MOST_STRAY and (line := await child.stdout.readline()):
                try:
                    message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    if line.strip():
                        stray += 1
                        log.warning("the MCP server printed a line that is no message: %r", line[:120])
                else:
                    await to_session.send(SessionMessage(message))


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
    """Close its input and give it `GRACE_S`; then kill it, with all it has started in its process group. It is killed
    also where the wait is cancelled."""
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None and stdout is not None

    async def drained() -> None:
        while await stdout.read(1 << 16):  # a child whose output is not read would wait, and never end
            pass

    async def ended() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                # In a task: `_receive`, which is cancelled but has not ended yet, leaves the stream before it begins.
                await asyncio.gather(child.wait(), drained())

    stdin.close()
    try:
        await ended()
    finally:
        # Where the command itself has ended, others of its group may still hold its output. While the group has a
        # member, the kernel gives its number to no other process.
        if child.returncode is None or not stdout.at_eof():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await ended()
