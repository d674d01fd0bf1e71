"""One session with an MCP server that runs as a child; it is given up for good when anything of it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import mcp_types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError

from nvrx_slurm.attribution.sources.stdio import child_streams
from nvrx_slurm.errors import SourceError

START_S = 30.0
"""How long a server may take until it has initialised: it may have to be installed first, by `uvx` say."""


class Session:
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
        """Call a tool. Raises SourceError; a call that was called off ends the session, for the server may hang."""
        self._calls += 1
        try:
            return await (await asyncio.shield(self._ready)).call_tool(tool, arguments)
        except MCPError as error:
            self.is_over |= error.code == mcp_types.CONNECTION_CLOSED
            raise SourceError(self._told(error)) from None
        except BaseException:
            self.is_over = True
            raise
        finally:
            self._calls -= 1
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

    def _told(self, error: BaseException) -> str:
        if isinstance(error, MCPError) and error.code == mcp_types.CONNECTION_CLOSED:
            return f"{self._name} has ended or closed the connection; its standard error is in the desk's log"
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
            self._fail(SourceError(self._told(_innermost(error))))

    def _fail(self, error: SourceError) -> None:
        self.is_over = True
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen: nobody may be waiting any more


def _innermost(error: BaseException) -> BaseException:
    """The first of the errors that task groups have wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
